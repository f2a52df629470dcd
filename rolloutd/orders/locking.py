"""What people may ask of the slots that all plans share: holds and freezes.

A hold takes a node's slots for somebody outside the plans, and is granted by
the same rule by which a node may start.  A freeze lets nothing start.  Each is
a function from the facts, the person and the arguments to events.
"""

from __future__ import annotations

from dataclasses import replace

from machines import pools
from machines.events import Frozen, HoldReleased, HoldTaken, Unfrozen
from machines.rollout import Actor, Hold, Reason, Target
from machines.stands import Stand
from machines.states import BUSY
from machines.windows import Freeze
from rolloutd.errors import NotAllowed, NotFound, Passed, Refused
from rolloutd.orders.steering import LEFT, PERSON, Asker, Events
from rolloutd.state import State

MOST_HOLDS = 10_000
"""Holds there may be at once: one for every node of the largest fleet."""

MOST_FREEZES = 1_000
"""Freezes there may be at once; every decision looks at all of them."""


class SlotUnknown(Refused):
    """Nobody can say whether a slot is free, because these nodes were not observed lately."""

    def __init__(self, reason: Reason, nodes: tuple[str, ...]) -> None:
        super().__init__(reason.code, reason.text)
        self.nodes = nodes


def hold(
    state: State,
    who: Asker,
    node: str,
    reason: str,
    *,
    source: str | None = None,
    id: str | None = None,  # noqa: A002  # the API's word
    until: float | None = None,
) -> tuple[Hold, Events]:
    """Take the node's slots; asked again for the same (source, id) it is granted again, as asked last.

    A hold that is renewed keeps its owner and its beginning; its end and its
    reason are those of the last request.  Raises SlotUnknown, Refused with the
    reason why there is no slot, Passed, NotAllowed for another team's node.
    """
    team = _team(state, node)
    if not who.admin and (team is None or team not in who.teams):
        owners = "admins" if team is None else f"members of {team} and admins"
        raise NotAllowed(f"{who.user} may not hold {node}: {owners} may")
    wanted = Hold(node, source or PERSON, id or who.user, who.actor, reason, state.now(), until)
    _mind_future(state, until)
    if wanted.source == LEFT:
        raise Refused(
            "reserved", f"the source {LEFT!r} is for nodes that were skipped with --leave; name another"
        )
    there = find_hold(state, node, wanted.source, wanted.id)
    ended: Events = ()
    if there is not None:
        if _lasts(state, there):
            _mind_mine(who, there, "hold again")
            renewed = replace(there, until=until, reason=reason)
            return renewed, () if renewed == there else (HoldTaken(renewed),)
        ended = (HoldReleased(node, there.source, there.id, there.actor, state.now()),)
    if len(state.index.holds) >= MOST_HOLDS:
        raise Refused("too-many-holds", f"there are {MOST_HOLDS} holds already: release some")
    _mind_others(state, wanted, own=wanted.source == PERSON and wanted.id == who.user)
    _mind_slot(state, node)
    return wanted, (*ended, HoldTaken(wanted))


def release(
    state: State,
    who: Asker,
    node: str,
    *,
    source: str | None = None,
    id: str | None = None,  # noqa: A002  # the API's word
) -> Events:
    """Give the node's slots back; one's own hold, or any as an admin.  Not held is released."""
    there = find_hold(state, node, source or PERSON, id or who.user)
    if there is None:
        _team(state, node)
        return ()
    _mind_mine(who, there, "release")
    if there.source == LEFT and there.id.partition("/")[0] in state.index.rollouts:
        raise Refused(
            "isolated", f"{node} was skipped and left isolated: rolloutctl return {node} releases it"
        )
    return (HoldReleased(node, there.source, there.id, who.actor, state.now()),)


def freeze(state: State, who: Asker, scope: str, reason: str, until: float | None, fresh: str) -> Events:
    """Let nothing of this scope start; `fresh` is the new freeze's id."""
    _mind_scope(state, who, scope, "freeze")
    _mind_future(state, until)
    if len(state.index.freezes) >= MOST_FREEZES:
        raise Refused("too-many-freezes", f"there are {MOST_FREEZES} freezes already: lift some")
    return (Frozen(Freeze(fresh, scope, reason, who.user, state.now(), until)),)


def unfreeze(state: State, who: Asker, scope: str) -> Events:
    """Lift every freeze of this very scope, or the one of this id; none there is lifted."""
    meant = [each for each in state.index.freezes if scope in (each.scope, each.id)]
    for each in {one.scope for one in meant} or {scope}:
        _mind_scope(state, who, each, "lift the freeze of")
    return tuple(Unfrozen(each.id, who.actor, state.now()) for each in meant)


def find_hold(state: State, node: str, source: str, id: str) -> Hold | None:  # noqa: A002
    """Return the hold of this owner on the node, also one that has run out."""
    for each in state.index.holds_on(node):
        if (each.source, each.id) == (source, id):
            return each
    return None


# -- what they share ----------------------------------------------------------


def _team(state: State, node: str) -> str | None:
    known = state.index.nodes.get(node)
    if known is None:
        raise NotFound(f"there is no node {node}; rolloutctl inventory lists them")
    return known.team


def _mind_others(state: State, wanted: Hold, *, own: bool) -> None:
    """Refuse a node that is in somebody's hands: its slot is taken already, but by them.

    What a rollout has in hand a person may take in their `own` name: it is theirs
    once the rollout lets go of it.  Whoever asks as something else, a tool, goes
    to work as soon as it is granted.
    """
    for target in state.index.targets_on(wanted.node):
        if target.phase in BUSY and not own:
            stand = Stand(wanted.node, "busy", target)
            raise Refused("other-rollout", f"{stand.text}; lifted by {stand.lifted_by}")
    for each in state.index.holds_on(wanted.node):
        if (each.source, each.id) != (wanted.source, wanted.id) and _lasts(state, each):
            stand = Stand(wanted.node, "held", each)
            raise Refused("held", f"{stand.text}; lifted by {stand.lifted_by}")


def _mind_slot(state: State, node: str) -> None:
    asked = Target("", node, _team(state, node), (), "", 0)
    reason = pools.may_start(state.index, asked, state.now())
    if reason is None:
        return
    mates = tuple(
        mate for pool in state.index.pools_for("", node) for mate in sorted(pool.unknown) if mate != node
    )
    if reason.code == "mate-unknown" and mates:
        raise SlotUnknown(reason, mates)
    raise Refused(reason.code, reason.text)


def _lasts(state: State, there: Hold) -> bool:
    return there.until is None or state.now() < there.until


def _mind_mine(who: Asker, there: Hold, verb: str) -> None:
    if not who.admin and not _same(who.actor, there.actor):
        raise NotAllowed(
            f"{who.user} may not {verb} {there.node}: {there.actor.name}, who holds it, and admins may"
        )


def _same(one: Actor, other: Actor) -> bool:
    return (one.kind, one.uid) == (other.kind, other.uid) and one.uid is not None


def _mind_scope(state: State, who: Asker, scope: str, verb: str) -> None:
    key, _, value = scope.partition("/")
    known = (
        scope == "all"
        or (key == "team" and value in state.settings.teams)
        or (key == "node" and value in state.index.nodes)
        or scope in state.index.pool_ids()
    )
    if not known:
        raise NotFound(
            f"there is no scope {scope}: it is all, team/NAME, node/NAME or a pool (rolloutctl locks)"
        )
    team = value if key == "team" else None
    if key == "node" and value in state.index.nodes:
        team = state.index.nodes[value].team
    if who.admin or team in who.teams:
        return
    owners = f"members of {team} and admins" if team is not None else "admins"
    raise NotAllowed(f"{who.user} may not {verb} {scope}: {owners} may")


def _mind_future(state: State, until: float | None) -> None:
    if until is not None and until <= state.now():
        raise Passed("past", "the time named by `until` has passed already")
