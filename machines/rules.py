"""The rules of starting, one function each: None when the rule lets go, else the reason.

decide() and why() ask the same functions, so that what is explained is what is
done.  The pool lock, gates and waves have their own files; here is the rest,
and the order in which all are asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from machines import gates, pools, traffic, windows
from machines.index import Index
from machines.moments import span, stamp
from machines.node import Observation
from machines.plan import GateName, WaveSpec
from machines.rollout import Reason, Rollout, Target
from machines.stands import held, kept_down, settling, sight
from machines.states import BUSY, Phase
from machines.waves import Course
from machines.windows import Window


@dataclass(slots=True)
class Room:
    """How many may still start, and the slots that this decision has given away."""

    taken: pools.Taken = field(default_factory=pools.Taken)
    fleet: int = 0
    rollouts: dict[str, int] = field(default_factory=dict)

    def take(self, index: Index, target: Target) -> None:
        """Count one more start."""
        self.taken.take(target.node, index.all_pools(target.node))
        self.fleet += 1
        self.rollouts[target.rollout] = self.rollouts.get(target.rollout, 0) + 1


# -- the whole rollout ------------------------------------------------------------


def rollout_block(index: Index, rollout: Rollout, now: float) -> Reason | None:
    """Return why no node of the rollout may start, other than time and waves."""
    if rollout.cancelled is not None:
        by = rollout.cancelled
        return Reason("cancelled", f"cancelled by {by.by.name}: {by.reason}", by.at)
    if rollout.ended_at is not None:
        return Reason("ended", f"{rollout.id} has ended", rollout.ended_at)
    if rollout.paused is not None:
        by = rollout.paused
        return Reason(
            "paused", f"paused by {by.by.name}: {by.reason}", by.at, f"rolloutctl resume {rollout.id}"
        )
    return (
        _rejected(index, rollout, now) or _start_block(index, rollout, now) or _failure_block(index, rollout)
    )


def observe_only(index: Index) -> Reason | None:
    """Return why nothing starts anywhere when the settings say so."""
    if not index.limits.observe_only:
        return None
    return Reason(
        "observe-only", "observe_only is set: everything is decided, nothing is done", None, "the settings"
    )


def _rejected(index: Index, rollout: Rollout, now: float) -> Reason | None:
    for vote in rollout.votes:
        if not vote.yes and vote.withdrawn_at is None and vote.digest == rollout.digest.whole:
            after, named = (f" after {vote.wave}", f" --wave {vote.wave}") if vote.wave else ("", "")
            text = f"{vote.actor.name} said no at {vote.gate}{after}: {vote.reason}"
            by = f"{vote.actor.name}: rolloutctl withdraw {rollout.id} {vote.gate}{named}"
            return Reason("rejected", text, vote.at, by)
    return None


def _start_block(index: Index, rollout: Rollout, now: float) -> Reason | None:
    if gates.is_open(index, rollout, GateName.START, "", now):
        return None
    view = gates.gate_view(index, rollout, GateName.START, "", now)
    text = f"the start gate waits: {view.missing or 'its votes are in'}"
    return Reason("gate-start", text, rollout.submitted_at, f"rolloutctl approve {rollout.id} start")


def _failure_block(index: Index, rollout: Rollout) -> Reason | None:
    failures = gates.unsettled(index, rollout)
    if not failures:
        return None
    first = failures[0]
    more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
    text = f"{first.node} failed in {first.step}: {first.message}{more}"
    return Reason("node-failed", text, first.at, f"rolloutctl approve {rollout.id} proceed")


# -- one node ------------------------------------------------------------------------


def wave_block(course: Course, target: Target) -> Reason | None:
    """Return why the node's wave may not start."""
    if course.wave is None or (course.block is None and course.wave.name == target.wave):
        return None
    if course.block is not None:
        return course.block
    return Reason("earlier-wave", f"wave {course.wave.name} is not over", None, f"wave {course.wave.name}")


def own_block(index: Index, rollout: Rollout, target: Target, now: float) -> Reason | None:
    """Return why this node may not start whatever its pools say."""
    if target.node not in index.nodes:
        return Reason("node-gone", f"the inventory no longer has {target.node}", None, "the inventory")
    if now < target.not_before:
        why = f": {target.last_text}" if target.last_text else ""
        return Reason(
            "backoff",
            f"{target.node} is tried again at {stamp(target.not_before)}{why}",
            target.since,
            "time",
        )
    return (
        gates.team_waits(index, target)
        or freeze_block(index, target, now)
        or window_block(index, rollout, target.team, now)
        or _hold_block(index, target)
        or _other_rollout(index, target)
        or _sight_block(index, target)
    )


def freeze_block(index: Index, target: Target, now: float) -> Reason | None:
    """Return the freeze that covers the node."""
    if not index.freezes:
        return None
    ids = [f"node/{target.node}", *(pool.id for pool in index.pools_for(target.rollout, target.node))]
    for freeze in index.freezes:
        if freeze.is_active(now) and freeze.covers(target.team, ids):
            until = "" if freeze.until is None else f" until {stamp(freeze.until)}"
            text = f"{freeze.scope} is frozen by {freeze.by}{until}: {freeze.reason}"
            return Reason("freeze", text, freeze.at, f"{freeze.by}: rolloutctl unfreeze --scope {freeze.id}")
    return None


def window_block(index: Index, rollout: Rollout, team: str | None, now: float) -> Reason | None:
    """Return why no work may start now: the plan's windows, tightened by the team's."""
    groups = _window_groups(index, rollout, team)
    needed = index.expected_s(rollout.id)
    for whose, group in groups:
        if not group:
            continue
        until = windows.open_until(group, now)
        if until is None:
            opening = windows.next_common_opening([each for _, each in groups], now)
            when = "not within two weeks" if opening is None else f"next at {stamp(opening)}"
            return Reason("outside-window", f"{whose} windows are closed; {when}", None, "time")
        if now + needed > until:
            text = f"a node takes {span(needed)} and {whose} window closes at {stamp(until)}"
            return Reason("window-too-short", text, None, "time")
    return None


def _hold_block(index: Index, target: Target) -> Reason | None:
    stand = held(index, target.node)
    return None if stand is None else Reason("held", stand.text, stand.since, stand.lifted_by)


def _other_rollout(index: Index, target: Target) -> Reason | None:
    for other in index.targets_on(target.node):
        if other.rollout == target.rollout:
            continue
        if other.phase in BUSY or other.phase is Phase.FAILED or other.isolated:
            stand = kept_down(index, other)
            return Reason("other-rollout", stand.text, stand.since, stand.lifted_by)
    return None


def _sight_block(index: Index, target: Target) -> Reason | None:
    """Return what was seen of the node that forbids its start; we know why one that we isolated is down."""
    seen = sight(index, target.node)
    foreign = seen is not None and isinstance(seen.by, Observation) and seen.by.foreign
    if seen is None or (target.isolated and not foreign):
        return None
    code = {"down": "node-down", "foreign": "foreign-cordon"}.get(seen.code, "node-unknown")
    return Reason(code, seen.text, seen.since, seen.lifted_by)


def traffic_block(index: Index, rollout: Rollout, target: Target) -> Reason | None:
    """Return what traffic was last seen on the node; whether it needs the change at all is asked before."""
    if not rollout.plan.traffic or target.maybe_current:
        return None
    return traffic.block(index.traffic_of(target.rollout, target.node))


def standing(index: Index, target: Target) -> Reason:
    """Say where a node stands that does not wait to start."""
    if target.phase is Phase.FAILED:
        told = target.failure
        text = f"{target.node} failed" + ("" if told is None else f" in {told.step}: {told.message}")
        over = index.rollout(target.rollout).closed
        return Reason("failed", text, target.since, settling(target, over=over))
    if target.phase in BUSY:
        return Reason(target.phase.value, f"{target.node} is {target.phase}", target.since)
    outcome = target.outcome.value if target.outcome is not None else "done"
    return Reason(outcome, f"{target.node} is done: {outcome}", target.since)


# -- room ----------------------------------------------------------------------------


def room_block(index: Index, rollout: Rollout, wave: WaveSpec, room: Room) -> Reason | None:
    """Return which limit on nodes at work is reached: the fleet's, the rollout's or the wave's."""
    for whose, most, at_work in limits_at_work(index, rollout, wave, room):
        if most is not None and at_work >= most:
            nodes = "1 node" if at_work == 1 else f"{at_work} nodes"
            text = f"{nodes} of {whose} {'is' if at_work == 1 else 'are'} at work, and max_parallel is {most}"
            return Reason("max-parallel", text, None, "the next node that is done")
    return None


def has_room(index: Index, rollout: Rollout, wave: WaveSpec, room: Room) -> bool:
    """Say whether one more node may be at work; room_block() is the same in words."""
    limits = limits_at_work(index, rollout, wave, room)
    return all(most is None or at_work < most for _, most, at_work in limits)


def room_left(index: Index, rollout: Rollout, wave: WaveSpec, room: Room) -> int:
    """Return how many more nodes of the wave may be at work."""
    limits = limits_at_work(index, rollout, wave, room)
    return max(0, min(most - at_work for _, most, at_work in limits if most is not None))


def limits_at_work(
    index: Index, rollout: Rollout, wave: WaveSpec, room: Room
) -> tuple[tuple[str, int | None, int], ...]:
    """Return each limit on nodes at work: whose it is, how many may be, how many are."""
    more = room.rollouts.get(rollout.id, 0)
    tally = index.tally(rollout.id)
    phases = tally.waves.get(wave.name)
    in_wave = 0 if phases is None else sum(phases[phase] for phase in BUSY)
    return (
        ("the fleet", index.limits.max_parallel, index.in_flight() + room.fleet),
        (rollout.id, rollout.plan.max_parallel, len(tally.busy) + more),
        (f"wave {wave.name} of {rollout.id}", wave.max_parallel, in_wave + more),
    )


UNSEEN = frozenset({"mate-unknown", "node-unknown"})
"""Reasons that an observation may lift."""


def vagueness(index: Index, target: Target, reason: Reason) -> int:
    """Rank a reason: 0 what is known, 1 who was last seen out of service, 2 who was merely not seen lately.

    Nobody is looked at for a node that could not start anyhow; and of two looks that
    are too old, the next one rather lifts the one that was good.
    """
    match reason.code:
        case "node-unknown":
            doubted = sight(index, target.node)
        case "mate-unknown":
            doubted = pools.doubted(index, target)
        case _:
            return 0
    return 1 if doubted is not None and doubted.suspect else 2


def until(index: Index, rollout: Rollout, target: Target, reason: Reason, now: float) -> float:
    """Return when time alone may lift this reason (epoch seconds); infinity when it cannot."""
    match reason.code:
        case "backoff":
            return target.not_before
        case "freeze":
            return min(
                (each.until for each in index.freezes if each.until and each.until > now), default=math.inf
            )
        case "outside-window":
            groups = _window_groups(index, rollout, target.team)
            opening = windows.next_common_opening([each for _, each in groups], now)
            return math.inf if opening is None else opening
        case "window-too-short":
            closings = [
                windows.open_until(each, now) for _, each in _window_groups(index, rollout, target.team)
            ]
            return min((each for each in closings if each is not None), default=math.inf)
        case _:
            return math.inf


def _window_groups(index: Index, rollout: Rollout, team: str | None) -> list[tuple[str, Sequence[Window]]]:
    groups: list[tuple[str, Sequence[Window]]] = [("the plan's", rollout.plan.windows)]
    if team is not None:
        groups.append((f"team {team}'s", index.limits.team_windows.get(team, ())))
        own = index.team_rules.get(team)
        if own is not None:
            groups.append((f"team {team}'s own", own.windows))
    return groups
