"""The blast radius of a gate: what may start once it opens, until the next gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from machines.facts.index import Index
from machines.facts.votes import was_opened
from machines.model.plan import GateName, WaveDef
from machines.model.rollout import Rollout, Target
from machines.states import Phase


@dataclass(frozen=True, slots=True)
class BlastRadius:
    """What starts after a gate: nodes of these waves and teams, at most `at_once` in flight together."""

    waves: tuple[str, ...]
    nodes: int
    teams: tuple[str, ...]
    at_once: int


def blast_radius(index: Index, rollout: Rollout, gate: GateName, wave: str) -> BlastRadius:
    """Return the blast radius of a gate of a live rollout; `proceed` resumes the waves behind open gates."""
    waves = _waves_behind(rollout, gate, wave)
    targets: dict[str, list[Target]] = {spec.name: [] for spec in waves}
    for target in index.targets(rollout.id):
        if target.phase is Phase.PENDING and target.wave in targets:
            targets[target.wave].append(target)
    limits = [_at_once(index, rollout, spec, targets[spec.name]) for spec in waves]
    pending = [target for spec in waves for target in targets[spec.name]]
    return BlastRadius(
        waves=tuple(spec.name for spec in waves if targets[spec.name]),
        nodes=len(pending),
        teams=tuple(sorted({target.team for target in pending if target.team is not None})),
        at_once=max(limits, default=0),
    )


def _waves_behind(rollout: Rollout, gate: GateName, wave: str) -> Sequence[WaveDef]:
    behind: list[list[WaveDef]] = [[]]
    for spec in rollout.plan.waves:
        behind[-1].append(spec)
        if spec.gate is not None:
            behind.append([])
    by_gate = dict(zip(rollout.plan.gates_in_order, behind, strict=True))
    if gate is GateName.PROCEED:
        return [spec for key, waves in by_gate.items() if was_opened(rollout, *key) for spec in waves]
    return by_gate[gate, wave]


def _at_once(index: Index, rollout: Rollout, spec: WaveDef, targets: Sequence[Target]) -> int:
    """Return how many nodes of a wave can be in flight together: by limits, and by the pools of a key."""
    bounds = [len(targets)]
    bounds += [
        limit
        for limit in (index.limits.max_parallel, rollout.plan.max_parallel, spec.max_parallel)
        if limit is not None
    ]
    # A node is in one pool of each key: the pools of a key add up, and the tightest key limits all.
    slots: Counter[str] = Counter()
    for pool, count in Counter(pool for target in targets for pool in target.pools).items():
        found = index.pool(pool)
        slots[found.key] += min(count, index.budget(found))
    return min([*bounds, *slots.values()])
