"""Waves: which node goes in which, and how far a rollout has come in them.

A wave is over when all its nodes are done, or failed and covered by a vote.
Then it soaks, counted from the last node's end; the next wave starts when the
soak is over and the gate between them is open.  Pools, windows and the order
among rollouts are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final

from machines import gates
from machines.index import Index
from machines.moments import stamp
from machines.node import Node, natural
from machines.plan import GateName, Plan, WaveSpec
from machines.rollout import Reason, Rollout

CANARY: Final = "canary"
"""The wave to which teams may add nodes of their own."""


# -- who goes when -------------------------------------------------------------


def assign(
    nodes: Iterable[Node], plan: Plan, team_canaries: Mapping[str, tuple[str, ...]]
) -> list[tuple[Node, str, int]]:
    """Return each node with its wave and its position, in order.

    Within a wave the teams take turns, each by name (n2 before n10), so that
    no team's pool is the only one at work.
    """
    left = sorted(nodes, key=lambda node: natural(node.name))
    placed: list[tuple[Node, str, int]] = []
    for spec in plan.waves:
        chosen = _chosen(spec, plan, left, team_canaries)
        for node in _interleaved(node for node in left if node.name in chosen):
            placed.append((node, spec.name, len(placed)))
        left = [node for node in left if node.name not in chosen]
    return placed


def _chosen(
    spec: WaveSpec, plan: Plan, left: list[Node], team_canaries: Mapping[str, tuple[str, ...]]
) -> set[str]:
    if spec is plan.waves[-1]:
        return {node.name for node in left}
    if spec.name == CANARY:
        return _canaries(spec, left, team_canaries)
    return {node.name for node in left if spec.select is None or spec.select.matches(node.labels)}


def _canaries(spec: WaveSpec, left: list[Node], team_canaries: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Return the plan's and the teams' canaries; where the plan names none, a silent team sends its first."""
    nominated = {name for names in team_canaries.values() for name in names}
    chosen = {node.name for node in left if node.name in nominated}
    if spec.select is not None:
        return chosen | {node.name for node in left if spec.select.matches(node.labels)}
    spoken_for = {node.team for node in left if node.name in chosen}
    for node in left:
        if node.team not in spoken_for:
            spoken_for.add(node.team)
            chosen.add(node.name)
    return chosen


def _interleaved(nodes: Iterable[Node]) -> Iterator[Node]:
    teams: dict[str, list[Node]] = {}
    for node in nodes:
        teams.setdefault(node.team or "", []).append(node)
    queues = [teams[team] for team in sorted(teams, key=lambda team: (not team, natural(team)))]
    return (node for node in chain.from_iterable(zip_longest(*queues)) if node is not None)


# -- how far -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Course:
    """Where a rollout is: its first wave that was not passed, and what keeps the next one.

    `wave` is None when all waves are over.  `block` is None while the wave is
    being worked on; `soaking` says that only time is missing, until `until`
    (epoch seconds).
    """

    wave: WaveSpec | None
    block: Reason | None = None
    soaking: bool = False
    until: float | None = None


def course(index: Index, rollout: Rollout, now: float) -> Course:
    """Return where the rollout is in its waves."""
    last = len(rollout.plan.waves) - 1
    for number, spec in enumerate(rollout.plan.waves):
        if not index.is_wave_over(rollout.id, spec.name):
            return Course(spec)
        if number < last:
            kept = _kept(index, rollout, spec, now)
            if kept is not None:
                return kept
    return Course(None)


def soaked_at(index: Index, rollout: Rollout, spec: WaveSpec) -> float:
    """Return when the soak of a wave that is over ends (epoch seconds); an empty wave has none."""
    end = index.wave_end(rollout.id, spec.name)
    return 0.0 if end is None else end + spec.soak_s


def _kept(index: Index, rollout: Rollout, spec: WaveSpec, now: float) -> Course | None:
    """Return what keeps the nodes after a wave that is over, None when nothing does."""
    until = soaked_at(index, rollout, spec)
    if now < until:
        text = f"wave {spec.name} soaks until {stamp(until)}"
        return Course(spec, Reason("soaking", text, until - spec.soak_s, "time"), True, until)
    if spec.gate is None or gates.is_open(index, rollout, GateName.CONTINUE, spec.name, now):
        return None
    view = gates.gate_view(index, rollout, GateName.CONTINUE, spec.name, now)
    waiting = view.missing or "its votes are in"
    text = f"the continue gate after wave {spec.name} waits: {waiting}"
    return Course(spec, Reason("gate-continue", text, until, f"rolloutctl approve {rollout.id} continue"))
