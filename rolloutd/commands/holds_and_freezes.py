"""Commands on the slots that all plans share: holds and freezes.

A hold takes a node's slots for a person or a tool outside the plans; the rule that
grants it is the rule by which nodes start.  A freeze blocks all starts in its scope.
"""

from __future__ import annotations

from dataclasses import replace

from machines.facts.node_work import WorkKind, conflicts
from machines.model.causes import Cause, CauseCode
from machines.model.events import FreezeLifted, FreezeStarted, HoldReleased, HoldTaken
from machines.model.reasons import Reason, ReasonCode
from machines.model.rollout import Hold, Target
from machines.model.windows import Freeze
from machines.rules import pools
from machines.rules.node_claims import work_reason
from machines.scheduler.expiry import end_hold
from rolloutd.commands.execution import Events, Principal
from rolloutd.commands.rollout_commands import (
    FLEETLOCK_SOURCE,
    LEFT_ISOLATED_SOURCE,
    PERSON_SOURCE,
    occupied,
    require_member,
    unknown_node,
)
from rolloutd.engine.state import State
from rolloutd.errors import DeadlineInPast, NotAllowed, NotFound, Refused
from rolloutd.texts.cause_text import describe_causes
from rolloutd.texts.formats import suggest_name
from rolloutd.texts.reason_text import describe

MAX_HOLDS = 10_000
"""Holds at once: one for every node of the largest fleet."""

RESERVED_SOURCES = {
    LEFT_ISOLATED_SOURCE: "nodes skipped with --leave",
    FLEETLOCK_SOURCE: "machines that reboot themselves",
}
"""Sources of holds that no request names, and what they are for."""

MAX_NAMED_FREEZES = 5

MAX_FREEZES = 1_000
"""Freezes at once, because every decision evaluates all of them; members of teams cannot exceed it."""


class SlotStateUnknown(Refused):
    """It is unknown whether a slot is free, because these nodes have no fresh observation."""

    def __init__(self, reason: Reason, nodes: tuple[str, ...]) -> None:
        super().__init__(reason.code, describe(reason))
        self.nodes = nodes


def hold(
    state: State,
    who: Principal,
    node: str,
    reason: str,
    *,
    source: str | None = None,
    id: str | None = None,  # noqa: A002  # the API's word
    until: float | None = None,
) -> Events:
    """Take the node's slots, or renew the hold with the same (source, id).

    A renewed hold keeps its owner and its start, and gets the end and reason of this
    request.  Raises SlotStateUnknown, Refused if no slot is free, DeadlineInPast, NotAllowed.
    """
    require_member(who, _team_of(state, node), f"hold {node}")
    requested = Hold(node, source or PERSON_SOURCE, id or who.user, who.actor, reason, state.now(), until)
    _require_future(state, until)
    if (use := RESERVED_SOURCES.get(requested.source)) is not None:
        raise Refused("reserved", f"source {requested.source!r}: reserved for {use}; use another")
    existing = find_hold(state, node, requested.source, requested.id)
    expired: Events = ()
    if existing is not None:
        if existing.until is None or state.now() < existing.until:
            # No slot is judged: the hold has it already.
            _require_hold_owner(who, existing, "hold again")
            renewed = replace(existing, until=until, reason=reason)
            return () if renewed == existing else (HoldTaken(renewed),)
        expired = (end_hold(existing, state.now(), describe_causes((Cause(CauseCode.TIME_IS_OVER),))),)
    if len(state.index.holds) >= MAX_HOLDS:
        raise Refused("too-many-holds", f"holds: the maximum of {MAX_HOLDS} is reached; release some")
    _require_unclaimed(
        state, requested, is_own=requested.source == PERSON_SOURCE and requested.id == who.user
    )
    _require_free_slot(state, node)
    return (*expired, HoldTaken(requested))


def release(
    state: State,
    who: Principal,
    node: str,
    *,
    source: str | None = None,
    id: str | None = None,  # noqa: A002  # the API's word
) -> Events:
    """Release one's own hold, or as an admin any; a missing hold is not an error."""
    existing = find_hold(state, node, source or PERSON_SOURCE, id or who.user)
    if existing is None:
        require_member(who, _team_of(state, node), f"release {node}")
        return ()
    if existing.source == FLEETLOCK_SOURCE:
        # No account owns it: a machine that does not come back is its team's.
        require_member(who, _team_of(state, node), f"release {node}")
    else:
        _require_hold_owner(who, existing, "release")
    if existing.source == LEFT_ISOLATED_SOURCE and existing.id.partition("/")[0] in state.index.rollouts:
        raise Refused(
            "isolated", f"{node} was skipped and left isolated; rolloutctl return {node} releases it"
        )
    return (HoldReleased(node, existing.source, existing.id, who.actor, state.now()),)


def freeze(
    state: State, who: Principal, scope: str, reason: str, until: float | None, freeze_id: str
) -> Events:
    """Block all starts in a scope; `freeze_id` is the new freeze's id."""
    _require_known_scope(state, scope)
    _require_scope_access(state, who, scope, "freeze")
    _require_future(state, until)
    # An admin's freeze may be an emergency, and a team could have used up the maximum with its own.
    if len(state.index.freezes) >= MAX_FREEZES and not who.admin:
        raise Refused("too-many-freezes", f"freezes: the maximum of {MAX_FREEZES} is reached; lift some")
    return (FreezeStarted(Freeze(freeze_id, scope, reason, who.user, state.now(), until)),)


def unfreeze(state: State, who: Principal, scope: str, reason: str = "") -> Events:
    """Lift the freeze of exactly this scope, or the one with this id; none is not an error.

    Raises Refused if the scope has several: each has an owner and a reason of its own.
    """
    freezes = [each for each in state.index.freezes if scope in (each.scope, each.id)]
    active = [each for each in freezes if each.is_active(state.now())]
    if len(active) > 1:
        named = ", ".join(f"{each.id} by {each.by}" for each in active[:MAX_NAMED_FREEZES])
        raise Refused(
            "several-freezes", f"{scope}: {len(active)} freezes ({named}); lift each by its id as the scope"
        )
    # A freeze outlives its scope: a node leaves the inventory, a team the settings.  It must still be lifted.
    if not freezes:
        _require_known_scope(state, scope)
    for each in {one.scope for one in freezes} or {scope}:
        _require_scope_access(state, who, each, "lift the freeze of")
    return tuple(FreezeLifted(each.id, who.actor, state.now(), each.scope, reason) for each in freezes)


def find_hold(state: State, node: str, source: str, id: str) -> Hold | None:  # noqa: A002
    """Return the hold with this (source, id) on the node, also an expired one."""
    holds = state.index.holds_on(node)
    return next((each for each in holds if (each.source, each.id) == (source, id)), None)


def unobserved_peers(state: State, node: str, reason: Reason) -> tuple[str, ...]:
    """Return the nodes whose observation may free a slot for the node that waits for this reason."""
    if reason.code is not ReasonCode.PEER_UNKNOWN:
        return ()
    pools = state.index.pools_for("", node)
    return tuple(mate for pool in pools for mate in sorted(pool.unknown) if mate != node)


def _team_of(state: State, node: str) -> str | None:
    known = state.index.nodes.get(node)
    if known is None:
        raise unknown_node(state, node)
    return known.team


def _require_unclaimed(state: State, requested: Hold, *, is_own: bool) -> None:
    """Raise Refused for a node that has other work or that another owner holds.

    A person may hold a node in flight, or in a prepare stage, in their own name (`is_own`): they get it
    once that has ended.  A tool would start its work as soon as the hold is granted.
    """
    index, now = state.index, state.now()
    for work in conflicts(index, WorkKind.HOLD, requested.node, now):
        if not (is_own and work.kind in (WorkKind.ATTEMPT, WorkKind.STAGE)):
            reason = work_reason(index, work)
            raise occupied(reason, reason.code)


def _require_free_slot(state: State, node: str) -> None:
    candidate = Target("", node, _team_of(state, node), (), "", 0)
    reason = pools.slot_blocker(state.index, candidate, state.now())
    if reason is None:
        return
    if peers := unobserved_peers(state, node, reason):
        raise SlotStateUnknown(reason, peers)
    raise Refused(reason.code, describe(reason))


def _require_hold_owner(who: Principal, hold: Hold, verb: str) -> None:
    # Two actors without a uid are never the same: nothing proves it.
    is_owner = (who.actor.kind, who.actor.uid) == (hold.actor.kind, hold.actor.uid)
    if not who.admin and not (is_owner and who.actor.uid is not None):
        raise NotAllowed(
            f"{who.user} may not {verb} {hold.node}; ask its holder {hold.actor.name} or an admin"
        )


def _require_known_scope(state: State, scope: str) -> None:
    key, _, value = scope.partition("/")
    known = (
        scope == "all"
        or (key == "team" and value in state.settings.teams)
        or (key == "node" and value in state.index.nodes)
        or scope in state.index.pool_ids()
    )
    if not known:
        scopes = [f"team/{team}" for team in state.settings.teams] + list(state.index.pool_ids())
        scopes += [f"node/{node}" for node in state.index.nodes]
        action = suggest_name(
            scope, ["all", *scopes], "use all, team/NAME, node/NAME or a pool (rolloutctl locks)"
        )
        raise NotFound(f"{scope}: no such scope; {action}")


def _require_scope_access(state: State, who: Principal, scope: str, verb: str) -> None:
    key, _, value = scope.partition("/")
    team = value if key == "team" else None
    if key == "node" and value in state.index.nodes:
        team = state.index.nodes[value].team
    require_member(who, team, f"{verb} {scope}")


def _require_future(state: State, until: float | None) -> None:
    if until is not None and until <= state.now():
        raise DeadlineInPast("past", "until: in the past; give a future time")
