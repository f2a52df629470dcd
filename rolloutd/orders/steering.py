"""What people may ask of a rollout and of its nodes, and what follows from it.

Each order is a function from the facts, the person and the arguments to events;
nothing is written here.  An order that cannot be carried out is refused with a
sentence that says what could be done instead.  Whether a slot, a gate or a
transition allows a thing is the core's to say: no rule is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from machines.events import (
    Event,
    HoldReleased,
    HoldTaken,
    NodeAdvanced,
    NodeOrdered,
    RolloutCancelled,
    RolloutDeleted,
    RolloutPaused,
    RolloutResumed,
)
from machines.moves import move
from machines.rollout import Actor, Hold, Order, Rollout, Target
from machines.stands import Stand, elsewhere, settling
from machines.states import BUSY, Outcome, Phase, Trigger
from rolloutd.errors import NotAllowed, NotFound, Refused
from rolloutd.state import State

PERSON = "person"
"""The source of a hold that a person took without naming one."""

LEFT = "left"
"""The source of a hold that stands for a node which was skipped and left isolated."""

Events = tuple[Event, ...]


class Asker(Protocol):
    """Who asks, as far as an order needs to know."""

    @property
    def user(self) -> str:
        """The name people know them by."""
        ...

    @property
    def actor(self) -> Actor:
        """The same somebody, as events name them."""
        ...

    @property
    def admin(self) -> bool:
        """Whether the settings list them among the admins."""
        ...

    @property
    def teams(self) -> frozenset[str]:
        """The teams of the settings they are members of."""
        ...


# -- who may ------------------------------------------------------------------


def mind_steering(who: Asker, rollout: Rollout, verb: str) -> None:
    """Raise NotAllowed unless they own the plan or are an admin."""
    if not who.admin and rollout.plan.owner not in who.teams:
        raise NotAllowed(
            f"{who.user} may not {verb} {rollout.id}: members of {rollout.plan.owner}, who own its plan, "
            "and admins may"
        )


def mind_submitting(who: Asker, owner: str) -> None:
    """Raise NotAllowed unless they are a member of the plan's owner or an admin."""
    if not who.admin and owner not in who.teams:
        raise NotAllowed(f"{who.user} may not submit a plan of {owner}: members of {owner} and admins may")


def mind_trying(who: Asker) -> None:
    """Raise NotAllowed unless they are in some team or an admin: what they send is fetched and kept."""
    if not who.admin and not who.teams:
        raise NotAllowed(
            f"{who.user} may not upload or preview: members of the teams in the settings and admins may"
        )


def mind_administering(who: Asker, verb: str) -> None:
    """Raise NotAllowed unless they are in some team or an admin."""
    if not who.admin and not who.teams:
        raise NotAllowed(f"{who.user} may not {verb}: members of the teams in the settings and admins may")


# -- a whole rollout ----------------------------------------------------------


def pause(state: State, who: Asker, rollout: Rollout, reason: str, *, stop: bool = False) -> Events:
    """Start no node of it until a person resumes it; with `stop`, end what runs as well."""
    mind_steering(who, rollout, "pause")
    _mind_open(rollout)
    paused = RolloutPaused(rollout.id, who.actor, reason, state.now())
    stops = _stops(state, who, rollout, reason) if stop else ()
    return stops if rollout.paused is not None else (paused, *stops)


def resume(state: State, who: Asker, rollout: Rollout, reason: str) -> Events:
    """Lift a person's pause, and nothing else; refused where there is none."""
    mind_steering(who, rollout, "resume")
    _mind_open(rollout)
    if rollout.paused is None:
        raise Refused(
            "not-paused",
            f"nobody has paused {rollout.id}: a failed node is settled by a proceed vote, retry, skip or "
            "rollback, and a rejected gate by withdrawing the vote",
        )
    return (RolloutResumed(rollout.id, who.actor, reason, state.now()),)


def cancel(state: State, who: Asker, rollout: Rollout, reason: str, *, stop: bool = False) -> Events:
    """Start nothing of it ever again; nodes in flight finish, unless `stop` ends what runs."""
    mind_steering(who, rollout, "cancel")
    stops = _stops(state, who, rollout, reason) if stop else ()
    if rollout.cancelled is not None:
        return stops
    _mind_open(rollout)
    return (RolloutCancelled(rollout.id, who.actor, reason, state.now()), *stops)


def delete(state: State, who: Asker, rollout: Rollout, targets: Sequence[Target]) -> Events:
    """Take a closed rollout off the lists; its audit entries stay.

    A node that the inventory lost while it was isolated stays held, in the name of
    who deletes: should it come back, nothing else would know how it was left.
    """
    mind_steering(who, rollout, "delete")
    if not rollout.closed:
        raise Refused("not-closed", f"{rollout.id} is still going: cancel it first")
    handed: list[Event] = []
    for target in targets:
        if target.phase in BUSY or target.order is not None or (rollout.id, target.node) in state.live:
            todo = "what is being done there has not ended; wait for it"
        elif target.node not in state.index.nodes:
            handed += _handed_over(state, who, target)
            continue
        elif target.isolated and target.phase is Phase.PENDING:
            todo = f"rolloutctl skip {rollout.id} {target.node} --return first"
        elif target.isolated or _is_left(state, target):
            todo = f"rolloutctl return {target.node} first"
        elif target.phase is Phase.FAILED:
            todo = f"rolloutctl skip {rollout.id} {target.node} first: its slot would be free"
        else:
            continue
        raise Refused("not-settled", f"{target.node} of {rollout.id} is {_standing(target)}: {todo}")
    return (*handed, RolloutDeleted(rollout.id, who.actor, state.now()))


# -- one node -----------------------------------------------------------------


def advance(state: State, who: Asker, rollout: Rollout, target: Target, reason: str) -> Events:
    """Let a waiting node go before the others of its wave; every rule of starting still holds."""
    if target.team is None or target.team not in who.teams:
        mind_steering(who, rollout, f"advance {target.node} of")
    _mind_open(rollout)
    if target.phase is not Phase.PENDING:
        raise Refused("not-now", f"{target.node} is {_standing(target)}: only waiting nodes can be advanced")
    places = [each.position for each in state.index.targets(rollout.id) if each.wave == target.wave]
    if target.position == min(places):
        return ()
    return (NodeAdvanced(rollout.id, target.node, min(places) - 1, who.actor, reason, state.now()),)


def retry(state: State, who: Asker, rollout: Rollout, target: Target, reason: str) -> Events:
    """Let a failed node start anew when its turn comes; what isolated it stays until then."""
    mind_steering(who, rollout, f"retry {target.node} of")
    _mind_failed(rollout, target, "retried")
    _mind_open(rollout, target)
    return (move(target, Trigger.RETRIED, state.now(), text=reason),)


def rollback(state: State, who: Asker, rollout: Rollout, target: Target, reason: str) -> Events:
    """Bring a failed node back with the plan's rollback playbook; ignores windows and freezes."""
    mind_steering(who, rollout, f"roll back {target.node} of")
    _mind_failed(rollout, target, "rolled back")
    _mind_open(rollout, target)
    _mind_acting(state)
    if rollout.plan.rollback is None:
        raise Refused(
            "no-rollback",
            f"the plan of {rollout.id} has no rollback playbook: retry {target.node} or skip it",
        )
    _mind_alone(state, target)
    return (move(target, Trigger.ROLLBACK_ORDERED, state.now(), text=reason),)


def skip(
    state: State, who: Asker, rollout: Rollout, target: Target, reason: str, put_back: str | None
) -> Events:
    """Leave a pending or failed node out.

    One that is isolated needs `put_back`: `return` undoes and checks it first,
    `leave` keeps its slots taken by a hold in the person's name.
    """
    mind_steering(who, rollout, f"skip {target.node} of")
    if target.phase not in (Phase.PENDING, Phase.FAILED):
        raise Refused(
            "not-now", f"{target.node} is {_standing(target)}: only pending and failed nodes can be skipped"
        )
    _mind_unordered(target)
    skipped = move(target, Trigger.SKIPPED, state.now(), outcome=Outcome.SKIPPED, text=reason)
    if not target.isolated:
        return (skipped,)
    held = HoldTaken(_left(state, who, target, reason))
    match put_back:
        case "leave":
            return (skipped, held)
        case "return":
            _mind_acting(state)
            ordered = _ordered(state, who, target, reason)
            # A pending node could be started while it is being returned, so it is skipped at once.
            return (ordered,) if target.phase is Phase.FAILED else (skipped, held, ordered)
        case _:
            raise Refused(
                "put-back-needed",
                f"{target.node} is isolated: skip it with --return (undo, then infra checks) "
                "or with --leave (it stays isolated and keeps its slots)",
            )


def give_back(state: State, who: Asker, node: str, reason: str) -> tuple[Target, Events]:
    """Return the target whose isolation is to be undone, and the order; ordered twice is ordered once.

    Raises NotFound for a node nobody knows, Refused when there is nothing to return.
    """
    targets = tuple(state.index.targets_on(node))
    if not targets and node not in state.index.nodes:
        raise NotFound(f"there is no node {node}")
    isolated = [target for target in targets if target.isolated or _is_left(state, target)]
    if not isolated:
        raise Refused("not-isolated", f"{node} is not isolated by rolloutd: there is nothing to return")
    target = isolated[0]
    rollout = state.index.rollout(target.rollout)
    mind_steering(who, rollout, f"return {node} of")
    if target.phase in BUSY:
        raise Refused(
            "not-now", f"{node} is {_standing(target)} in {rollout.id}: it is put back when that is done"
        )
    if target.phase is Phase.PENDING:
        raise Refused(
            "pending",
            f"{node} waits for another try in {rollout.id}: rolloutctl skip {rollout.id} {node} --return",
        )
    if target.order is not None:
        return target, ()
    if node not in state.index.nodes:
        raise Refused("node-gone", f"the inventory no longer has {node}, so nobody knows how to reach it")
    _mind_acting(state)
    return target, (_ordered(state, who, target, reason),)


# -- what they share ----------------------------------------------------------


def _stops(state: State, who: Asker, rollout: Rollout, reason: str) -> Events:
    """Return the order to stop for every node that is at work."""
    return tuple(
        NodeOrdered(rollout.id, each.node, Order.STOP, who.actor, reason, state.now())
        for each in state.index.targets(rollout.id)
        if each.phase in BUSY and each.order is not Order.STOP
    )


def _ordered(state: State, who: Asker, target: Target, reason: str) -> NodeOrdered:
    return NodeOrdered(target.rollout, target.node, Order.RETURN, who.actor, reason, state.now())


def _is_left(state: State, target: Target) -> bool:
    """Say whether a skipped node has still the hold of one that was left: it may be half returned."""
    name = f"{target.rollout}/{target.node}"
    return any(hold.source == LEFT and hold.id == name for hold in state.index.holds_on(target.node))


def _handed_over(state: State, who: Asker, target: Target) -> Sequence[Event]:
    """Return what makes a hold of a person's of an isolation that nothing else remembers any more."""
    left, now = _left(state, who, target, ""), state.now()
    is_left = _is_left(state, target)
    if not (target.isolated or is_left):
        return ()
    reason = (
        f"{target.rollout} left it isolated and was deleted while the inventory did not have it: "
        "see to it by hand that it is in service, then release it"
    )
    released = HoldReleased(left.node, LEFT, left.id, who.actor, now)
    taken = HoldTaken(Hold(target.node, PERSON, left.id, who.actor, reason, now))
    return (released, taken) if is_left else (taken,)


def _left(state: State, who: Asker, target: Target, reason: str) -> Hold:
    return Hold(target.node, LEFT, f"{target.rollout}/{target.node}", who.actor, reason, state.now())


def _mind_open(rollout: Rollout, failed: Target | None = None) -> None:
    """Refuse what a rollout that is over does no more; of a failed node it is said how it is settled."""
    if rollout.cancelled is not None:
        todo = "" if failed is None else f"; what is left is {settling(failed, over=True)}"
        by = rollout.cancelled.by.name
        raise Refused("cancelled", f"{rollout.id} was cancelled by {by}: nothing of it starts{todo}")
    if rollout.ended_at is not None:
        raise Refused("ended", f"{rollout.id} has ended: submit the plan again with --again")


def _mind_failed(rollout: Rollout, target: Target, verb: str) -> None:
    if target.phase is not Phase.FAILED:
        raise Refused(
            "not-failed",
            f"{target.node} of {rollout.id} is {_standing(target)}: only failed nodes can be {verb}",
        )
    _mind_unordered(target)


def _mind_unordered(target: Target) -> None:
    if target.order is not None:
        by = "somebody" if target.order_by is None else target.order_by.name
        raise Refused("ordered", f"{target.node} is being returned by order of {by}: wait for that")


def _mind_alone(state: State, target: Target) -> None:
    """Refuse a node in the hands of a person, a tool or another rollout: a playbook runs there at once."""
    holds = (h for h in state.index.holds_on(target.node) if h.until is None or state.now() < h.until)
    stand = next((Stand(target.node, "held", hold) for hold in holds), None)
    stand = stand or elsewhere(state.index, target)
    if stand is not None:
        raise Refused(stand.code, f"{stand.text}; first {stand.lifted_by}")


def _mind_acting(state: State) -> None:
    if state.index.limits.observe_only:
        raise Refused(
            "observe-only", "this daemon only observes (observe_only in its settings): it touches no node"
        )


def _standing(target: Target) -> str:
    if target.outcome is not None:
        return f"{target.phase} ({target.outcome})"
    return (
        f"{target.phase} and isolated" if target.isolated and target.phase not in BUSY else str(target.phase)
    )
