"""Waves: the order of the nodes, and a rollout's progress through it.

A wave is over when all its nodes are done, or failed and covered by a vote.  Then it soaks, counted from
the end of its last node.  The next wave starts when the soak is over and the gate between them is open.
This file does not know pools, windows and other rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Final

from machines.facts.index import Index
from machines.model.node import Node, natural_sort_key
from machines.model.plan import PILOT_WAVE, GateName, Plan, WaveDef
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Rollout
from machines.rules import gates

CANARY: Final = "canary"
"""The wave to which teams may add nodes of their own."""


# -- the order -------------------------------------------------------------


def assign_waves(
    nodes: Iterable[Node], plan: Plan, team_canaries: Mapping[str, tuple[str, ...]]
) -> list[tuple[Node, str, int]]:
    """Return each node with its wave and its position, in order.

    Within a wave the teams take turns, each by name (n2 before n10), so that several pools are at work.
    """
    remaining = sorted(nodes, key=lambda node: natural_sort_key(node.name))
    assigned: list[tuple[Node, str, int]] = []
    for spec in plan.waves:
        chosen = _select_nodes(spec, plan, remaining, team_canaries)
        for node in _interleave_teams(node for node in remaining if node.name in chosen):
            assigned.append((node, spec.name, len(assigned)))
        remaining = [node for node in remaining if node.name not in chosen]
    return assigned


def _select_nodes(
    spec: WaveDef, plan: Plan, remaining: list[Node], team_canaries: Mapping[str, tuple[str, ...]]
) -> set[str]:
    # The last wave takes what is left, so that no target is without a wave.
    if spec is plan.waves[-1]:
        return {node.name for node in remaining}
    if spec.name == PILOT_WAVE:
        return {node.name for node in remaining if node.name == plan.pilot_node}
    if spec.name == CANARY:
        return _select_canaries(spec, remaining, team_canaries)
    return {node.name for node in remaining if spec.select is None or spec.select.matches(node.labels)}


def _select_canaries(
    spec: WaveDef, remaining: list[Node], team_canaries: Mapping[str, tuple[str, ...]]
) -> set[str]:
    """Return the plan's and the teams' canaries; without a selector every team has one."""
    nominated = {name for names in team_canaries.values() for name in names}
    chosen = {node.name for node in remaining if node.name in nominated}
    if spec.select is not None:
        return chosen | {node.name for node in remaining if spec.select.matches(node.labels)}
    covered_teams = {node.team for node in remaining if node.name in chosen}
    # A team whose nodes differ from all others finds its errors on one node too.
    for node in remaining:
        if node.team not in covered_teams:
            covered_teams.add(node.team)
            chosen.add(node.name)
    return chosen


def _interleave_teams(nodes: Iterable[Node]) -> Iterator[Node]:
    teams: dict[str, list[Node]] = {}
    for node in nodes:
        teams.setdefault(node.team or "", []).append(node)
    queues = [teams[team] for team in sorted(teams, key=lambda team: (not team, natural_sort_key(team)))]
    return (node for node in chain.from_iterable(zip_longest(*queues)) if node is not None)


# -- progress ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaveProgress:
    """The first wave that was not passed, and what blocks the next one.

    `wave` is None when all waves are over.  `blocker` is None while the wave has nodes to do.
    `soak_ends_at` is in epoch seconds, None unless the wave soaks.
    """

    wave: WaveDef | None
    blocker: Reason | None = None
    soak_ends_at: float | None = None


def wave_progress(index: Index, rollout: Rollout, now: float) -> WaveProgress:
    last = len(rollout.plan.waves) - 1
    for number, spec in enumerate(rollout.plan.waves):
        if not index.is_wave_over(rollout.id, spec.name):
            return WaveProgress(spec)
        if number < last:
            blocked = _blocked_after(index, rollout, spec, now)
            if blocked is not None:
                return blocked
    return WaveProgress(None)


def soak_ends_at(index: Index, rollout: Rollout, spec: WaveDef) -> float:
    """Return when the soak of a finished wave ends (epoch seconds); its end without a soak, 0 if empty."""
    end = index.wave_end(rollout.id, spec.name)
    return 0.0 if end is None else end + spec.soak_s


def _blocked_after(index: Index, rollout: Rollout, spec: WaveDef, now: float) -> WaveProgress | None:
    """Return what blocks the nodes after a finished wave, None when nothing does."""
    # The soak is named before the gate: votes are accepted meanwhile, but they cannot shorten it.
    until = soak_ends_at(index, rollout, spec)
    if spec.soak_s and now < until:
        params: Params = {"wave": spec.name, "until": until}
        remedy = Remedy(RemedyKind.WAIT_UNTIL, until=until)
        reason = Reason(ReasonCode.SOAKING, rollout.id, params, until - spec.soak_s, remedy)
        return WaveProgress(spec, reason, until)
    if spec.gate is None:
        return None
    is_start = spec.gate is GateName.START  # the gate after the pilot
    wave = "" if is_start else spec.name
    if gates.is_open(index, rollout, spec.gate, wave, now):
        return None
    if is_start and (blocker := gates.voting_blocker(index, rollout, spec.gate, wave, now)) is not None:
        # The pilot is done and its evidence, which votes are for, is not attached yet.
        attached = Remedy(RemedyKind.WAIT_FOR_NODE, {"node": str(rollout.plan.pilot_node)})
        return WaveProgress(spec, replace(blocker, since=until, remedy=attached))
    missing = gates.gate_view(index, rollout, spec.gate, wave, now).missing
    remedy = Remedy(RemedyKind.APPROVE, {"rollout": rollout.id, "gate": spec.gate.value})
    votes: Params = {"wave": spec.name, **missing}
    code = ReasonCode.GATE_START if is_start else ReasonCode.GATE_CONTINUE
    return WaveProgress(spec, Reason(code, rollout.id, votes, until, remedy))
