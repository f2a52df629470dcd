"""What people may ask to be done: each order decided and written in one breath.

Between the look at the facts and the commit nothing else is written, so an
order is judged by the facts it changes.  The rules of orders are not here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from machines import gates
from machines.plan import GateName
from machines.rollout import Rollout, Target
from rolloutd.control import requests, views, wire
from rolloutd.control.finding import Found, find, find_for_good
from rolloutd.control.identity import Identity
from rolloutd.control.routes import Call, Desk, Route
from rolloutd.errors import Refused
from rolloutd.orders import locking, steering, voting
from rolloutd.orders.steering import Events
from rolloutd.state import State

OWNERS = "members of the team that owns the plan, and admins"
VOTERS = "members of the teams that the gate asks"
HOLDERS = "members of the node's team, and admins"
FREEZERS = "admins; members of a team for its own scope"

NO_REASON = "no reason given"


# -- gates --------------------------------------------------------------------


async def vote(desk: Desk, call: Call) -> wire.Gate:
    """Say yes or no at a gate."""
    body: requests.CastVote = call.body
    ballot = voting.Ballot(
        gate=GateName(body.gate),
        yes=body.yes,
        reason=body.reason,
        team=body.team,
        digest=body.digest,
        wave=body.wave,
        shown=None if body.shown is None else tuple(body.shown),
        nodes=tuple(body.nodes),
        more=body.more,
        until=_instant(body.until),
    )
    found = await _live(desk, call)
    wave = voting.wave_of(desk.state, found.rollout, ballot.gate, ballot.wave)
    await _order(desk, call, found, lambda rollout: voting.vote(desk.state, call.who, rollout, ballot))
    return gate_of(desk, found, ballot.gate, wave)


async def withdraw(desk: Desk, call: Call) -> wire.Gate:
    """Take one's own votes at a gate back."""
    body: requests.WithdrawVote = call.body
    name = GateName(body.gate)
    found = await _live(desk, call)
    wave = voting.wave_of(desk.state, found.rollout, name, body.wave)
    await _order(
        desk,
        call,
        found,
        lambda rollout: voting.withdraw(
            desk.state, call.who, rollout, name, body.reason, team=body.team, wave=body.wave
        ),
    )
    return gate_of(desk, found, name, wave)


# -- rollouts -----------------------------------------------------------------


async def pause(desk: Desk, call: Call) -> wire.Rollout:
    """Start no node of a rollout until it is resumed."""
    return await _steer(desk, call, partial(steering.pause, stop=call.body.now))


async def resume(desk: Desk, call: Call) -> wire.Rollout:
    """Lift a person's pause."""
    return await _steer(desk, call, steering.resume)


async def cancel(desk: Desk, call: Call) -> wire.Rollout:
    """End a rollout: nothing of it starts any more."""
    return await _steer(desk, call, partial(steering.cancel, stop=call.body.now))


async def delete(desk: Desk, call: Call) -> wire.Deleted:
    """Take a closed rollout off the lists; what its runs have said is removed."""
    found = await find_for_good(desk.state, call.names["r"])
    async with desk.state.deciding(call.who.actor) as commit:
        rollout = _current(desk.state, found)
        targets = tuple(found.index.targets(rollout.id))
        await commit(steering.delete(desk.state, call.who, rollout, targets), "delete")
    desk.prune()
    return {"rollout": found.rollout.id}


# -- nodes --------------------------------------------------------------------


async def advance(desk: Desk, call: Call) -> wire.Node:
    """Let a waiting node go before the others of its wave."""
    return await _steer_node(desk, call, steering.advance)


async def retry(desk: Desk, call: Call) -> wire.Node:
    """Try a failed node again."""
    return await _steer_node(desk, call, steering.retry)


async def rollback(desk: Desk, call: Call) -> wire.Node:
    """Run the rollback playbook on a failed node."""
    return await _steer_node(desk, call, steering.rollback)


async def skip(desk: Desk, call: Call) -> wire.Node:
    """Leave a node out of a rollout."""
    body: requests.SkipNode = call.body

    def skipped(state: State, who: Identity, rollout: Rollout, target: Target, reason: str) -> Events:
        return steering.skip(state, who, rollout, target, reason, body.put_back)

    return await _steer_node(desk, call, skipped)


async def give_back(desk: Desk, call: Call) -> wire.Node:
    """Put a node back in service that was left isolated."""
    body: requests.MaybeBecause = call.body
    reason = body.reason or NO_REASON
    async with desk.state.deciding(call.who.actor) as commit:
        target, events = steering.give_back(desk.state, call.who, call.names["n"], reason)
        await commit(events, _cause("return", reason))
    return _node(
        desk, Found(desk.state.index, desk.state.index.rollout(target.rollout), live=True), target.node
    )


# -- slots and freezes --------------------------------------------------------


async def hold(desk: Desk, call: Call) -> wire.Hold:
    """Take a node's slots; where nobody knows whether there is one, look first."""
    try:
        return await _hold(desk, call)
    except locking.SlotUnknown as unknown:
        await desk.observe(unknown.nodes)
        return await _hold(desk, call)


async def _hold(desk: Desk, call: Call) -> wire.Hold:
    body: requests.TakeHold = call.body
    async with desk.state.deciding(call.who.actor) as commit:
        granted, events = locking.hold(
            desk.state,
            call.who,
            body.node,
            body.reason,
            source=body.source,
            id=body.id,
            until=_instant(body.until),
        )
        await commit(events, _cause("hold", body.reason))
    return views.hold(granted)


async def release(desk: Desk, call: Call) -> wire.Released:
    """Give a node's slots back."""
    body: requests.ReleaseHold = call.body
    async with desk.state.deciding(call.who.actor) as commit:
        events = locking.release(desk.state, call.who, body.node, source=body.source, id=body.id)
        await commit(events, "release")
    return {"lifted": len(events)}


async def freeze(desk: Desk, call: Call) -> wire.Freeze:
    """Let nothing start."""
    body: requests.Freeze = call.body
    fresh = f"freeze-{secrets.token_hex(4)}"
    async with desk.state.deciding(call.who.actor) as commit:
        events = locking.freeze(desk.state, call.who, body.scope, body.reason, _instant(body.until), fresh)
        await commit(events, _cause("freeze", body.reason))
    return views.freeze(next(each for each in desk.state.index.freezes if each.id == fresh))


async def unfreeze(desk: Desk, call: Call) -> wire.Released:
    """Lift the freezes of a scope, or one by its id."""
    body: requests.Unfreeze = call.body
    async with desk.state.deciding(call.who.actor) as commit:
        events = locking.unfreeze(desk.state, call.who, body.scope)
        await commit(events, _cause("unfreeze", body.reason or NO_REASON))
    return {"lifted": len(events)}


async def refresh(desk: Desk, call: Call) -> wire.Refreshing:
    """Ask the inventory sources again; the answer does not wait for theirs."""
    steering.mind_administering(call.who, "refresh the inventory")
    desk.refresh()
    return {"sources": sorted(desk.state.sources)}


# -- what they share ----------------------------------------------------------

_Steering = Callable[[State, Identity, Rollout, str], Events]
_SteeringNode = Callable[[State, Identity, Rollout, Target, str], Events]


async def _steer(desk: Desk, call: Call, order: _Steering) -> wire.Rollout:
    found = await _live(desk, call)
    reason: str = call.body.reason
    await _order(desk, call, found, lambda rollout: order(desk.state, call.who, rollout, reason))
    return views.rollout(desk.state, _refound(desk, found))


async def _steer_node(desk: Desk, call: Call, order: _SteeringNode) -> wire.Node:
    found = await _live(desk, call)
    reason: str = call.body.reason

    def decided(rollout: Rollout) -> Events:
        return order(desk.state, call.who, rollout, found.target(call.names["n"]), reason)

    await _order(desk, call, found, decided)
    return _node(desk, found, call.names["n"])


async def _order(desk: Desk, call: Call, found: Found, decide: Callable[[Rollout], Events]) -> None:
    """Decide by the facts as they are when nobody else can change them, and write."""
    async with desk.state.deciding(call.who.actor) as commit:
        events = decide(_current(desk.state, found))
        await commit(events, _cause(_verb(call), call.body.reason))


async def _live(desk: Desk, call: Call) -> Found:
    """Return the rollout that is meant, if it can still be steered."""
    found = await find(desk.state, call.names["r"])
    if not found.live:
        raise Refused("closed", f"{found.rollout.id} is closed: there is nothing to steer")
    return found


def _current(state: State, found: Found) -> Rollout:
    return state.index.rollouts.get(found.rollout.id, found.rollout)


def _refound(desk: Desk, found: Found) -> Found:
    return Found(desk.state.index, _current(desk.state, found), live=True)


def gate_of(desk: Desk, found: Found, name: GateName, wave: str) -> wire.Gate:
    """Return a gate as it stands now."""
    now, rollout = desk.state.now(), _current(desk.state, found)
    view = gates.gate_view(desk.state.index, rollout, name, wave, now)
    return views.gate(desk.state.index, rollout, view, now)


def _node(desk: Desk, found: Found, name: str) -> wire.Node:
    there = _refound(desk, found)
    target = there.target(name)
    return views.node(desk.state, there, target, views.why(desk.state, there, target))


def _verb(call: Call) -> str:
    return call.verb


def _cause(verb: str, reason: str) -> str:
    return f"{verb}: {reason}"


def _instant(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


_R, _N = "/v1/rollouts/{r}", "/v1/rollouts/{r}/nodes/{n}"
_BECAUSE, _BECAUSE_NOW = requests.Because, requests.BecauseNow

ROUTES: Sequence[Route] = (
    Route(
        "POST", f"{_R}/votes", vote, "Say yes or no at a gate", wire.Gate, body=requests.CastVote, who=VOTERS
    ),
    Route(
        "POST",
        f"{_R}/withdraw",
        withdraw,
        "Take one's own votes at a gate back",
        wire.Gate,
        body=requests.WithdrawVote,
        who="whoever cast them",
    ),
    Route("POST", f"{_R}/pause", pause, "Start no node", wire.Rollout, body=_BECAUSE_NOW, who=OWNERS),
    Route("POST", f"{_R}/resume", resume, "Lift a person's pause", wire.Rollout, body=_BECAUSE, who=OWNERS),
    Route(
        "POST",
        f"{_R}/cancel",
        cancel,
        "Start nothing of it any more",
        wire.Rollout,
        body=_BECAUSE_NOW,
        who=OWNERS,
    ),
    Route("DELETE", _R, delete, "Take a closed rollout off the lists", wire.Deleted, who=OWNERS),
    Route(
        "POST",
        f"{_N}/advance",
        advance,
        "Let a waiting node go first",
        wire.Node,
        body=_BECAUSE,
        who="members of the team that owns the plan or the node, and admins",
    ),
    Route("POST", f"{_N}/retry", retry, "Try a failed node again", wire.Node, body=_BECAUSE, who=OWNERS),
    Route("POST", f"{_N}/rollback", rollback, "Roll a node back", wire.Node, body=_BECAUSE, who=OWNERS),
    Route("POST", f"{_N}/skip", skip, "Leave a node out", wire.Node, body=requests.SkipNode, who=OWNERS),
    Route(
        "POST",
        "/v1/nodes/{n}/return",
        give_back,
        "Put a node back in service that was left isolated",
        wire.Node,
        body=requests.MaybeBecause,
        optional_body=True,
        who=OWNERS,
    ),
    Route("PUT", "/v1/holds", hold, "Take a node's slots", wire.Hold, body=requests.TakeHold, who=HOLDERS),
    Route(
        "DELETE",
        "/v1/holds",
        release,
        "Give a node's slots back",
        wire.Released,
        body=requests.ReleaseHold,
        who="whoever holds it, and admins",
    ),
    Route(
        "POST", "/v1/freezes", freeze, "Let nothing start", wire.Freeze, body=requests.Freeze, who=FREEZERS
    ),
    Route(
        "DELETE",
        "/v1/freezes",
        unfreeze,
        "Lift freezes",
        wire.Released,
        body=requests.Unfreeze,
        optional_body=True,
        who=FREEZERS,
    ),
    Route(
        "POST",
        "/v1/inventory/refresh",
        refresh,
        "Ask the inventory sources again",
        wire.Refreshing,
        body=requests.Nothing,
        optional_body=True,
        who="members of the teams in the settings, and admins",
    ),
)
