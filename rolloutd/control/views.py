"""From the core's values to the wire's shapes.

Pure functions: instants become RFC 3339, absent becomes null, and nothing is
decided.  A rollout's status is made from running counts, so it costs as much
for ten thousand nodes as for ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from machines import ballots, gates, pools, schedule
from machines import progress as standing
from machines.index import Index
from machines.node import Node, Sight
from machines.plan import Digest, GateName
from machines.rollout import Failure, Hold, Reason, Rollout, Target, Vote
from machines.stands import Stand
from machines.states import BUSY
from machines.windows import Freeze
from rolloutd.control import looking, wire
from rolloutd.control.finding import Found
from rolloutd.control.standstill import standstill
from rolloutd.control.times import maybe, moment
from rolloutd.ports import ClosedRollout
from rolloutd.settings import Settings
from rolloutd.state import Live, SourceState, State

NOTHING = Live()


def reason(found: Reason | None) -> wire.Reason | None:
    """Return a reason, or null."""
    if found is None:
        return None
    return {
        "code": found.code,
        "text": found.text,
        "since": maybe(found.since),
        "lifted_by": found.lifted_by or None,
    }


def hashes(digest: Digest) -> wire.Hashes:
    """Return the hashes of a plan's parts."""
    return {
        "change": digest.change,
        "scope": digest.scope,
        "policy": digest.policy,
        "whole": digest.whole,
    }


# -- rollouts -----------------------------------------------------------------


def rollout(state: State, found: Found) -> wire.Rollout:
    """Return a rollout as `status` shows it."""
    now = state.now()
    each, index = found.rollout, found.index
    far = standing.progress(index, each.id, now)
    return {
        "rollout": each.id,
        "plan": each.plan.name,
        "digest": each.digest.whole,
        "state": far.state.value,
        "wave": far.wave or None,
        "percent": round(far.percent, 2),
        "total": far.total,
        "done": far.done,
        "failed": far.failed,
        "skipped": far.skipped,
        "pending": far.pending,
        "in_flight": [in_flight(state, target) for target in far.in_flight],
        "pools": [_pool(pool) for pool in far.pools],
        "gates": [gate(index, each, view, now) for view in _gates(index, each, now)],
        "reason": reason(far.reason),
        "eta": None if far.eta_s is None or each.closed else moment(now + far.eta_s),
        "submitted_by": each.submitted_by.name,
        "submitted_at": moment(each.submitted_at),
        "looked_at": looking.looked_at(each.plan),
        "not_looked_at": looking.not_looked_at(each.plan),
        "owner": each.plan.owner,
        "expected_s": index.expected_s(each.id),
    }


def line(index: Index, each: Rollout, now: float) -> wire.RolloutLine:
    """Return a rollout of the index as a list shows it."""
    far = standing.progress(index, each.id, now)
    return {
        "rollout": each.id,
        "plan": each.plan.name,
        "digest": each.digest.whole,
        "state": far.state.value,
        "percent": round(far.percent, 2),
        "submitted_by": each.submitted_by.name,
        "submitted_at": moment(each.submitted_at),
        "ended_at": maybe(_ended_at(each)),
    }


def closed_line(each: ClosedRollout) -> wire.RolloutLine:
    """Return a rollout that only the store remembers as a list shows it."""
    tally = each.tally
    total = sum(tally.values()) - tally.get("left", 0)
    wanted = total - tally.get("skipped", 0) - tally.get("rolled-back", 0)
    done = tally.get("changed", 0) + tally.get("already-current", 0)
    ended = each.ended_at if each.cancelled is None else each.cancelled.at
    percent = 100.0 * done / wanted if wanted else (0.0 if each.cancelled else 100.0)
    return {
        "rollout": each.id,
        "plan": each.name,
        "digest": each.digest.whole,
        "state": "done" if each.cancelled is None else "cancelled",
        "percent": round(percent, 2),
        "submitted_by": each.submitted_by.name,
        "submitted_at": moment(each.submitted_at),
        "ended_at": maybe(ended),
    }


def in_flight(state: State, target: Target) -> wire.InFlight:
    """Return a node that is being worked on, with what it is doing this moment."""
    live = state.live.get((target.rollout, target.node), NOTHING)
    return {
        "node": target.node,
        "pools": list(target.pools),
        "phase": target.phase.value,
        "step": live.step or None,
        "percent": round(live.percent, 1) if live.step else None,
        "task": live.task or None,
        "since": moment(target.since),
    }


def in_flight_of_all(state: State, rollout_id: str | None) -> list[wire.InFlightOf]:
    """Return every node that is being worked on, of one rollout if it is named."""
    return [
        {**in_flight(state, target), "rollout": target.rollout}
        for target in state.index.busy()
        if target.phase in BUSY and rollout_id in (None, target.rollout)
    ]


def _pool(pool: standing.PoolProgress) -> wire.Pool:
    return {
        "pool": pool.pool,
        "total": pool.total,
        "done": pool.done,
        "failed": pool.failed,
        "in_flight": pool.in_flight,
        "down": pool.down,
        "unseen": pool.unseen,
        "max_unavailable": pool.max_unavailable,
    }


def _ended_at(each: Rollout) -> float | None:
    return each.ended_at if each.cancelled is None else each.cancelled.at


# -- gates --------------------------------------------------------------------


def _gates(index: Index, each: Rollout, now: float) -> Iterable[gates.GateView]:
    yield gates.gate_view(index, each, GateName.START, "", now)
    for spec in each.plan.waves:
        if spec.gate is not None:
            yield gates.gate_view(index, each, GateName.CONTINUE, spec.name, now)
    yield gates.gate_view(index, each, GateName.PROCEED, "", now)


def gate(index: Index, each: Rollout, view: gates.GateView, now: float) -> wire.Gate:
    """Return a gate as it stands, with every vote that was cast there."""
    cast_here = [
        vote
        for vote in each.votes
        if vote.gate is view.gate and (view.gate is not GateName.CONTINUE or vote.wave == view.wave)
    ]
    return {
        "gate": view.gate.value,
        "wave": view.wave or None,
        "team": None,
        "state": cast(wire.GateState, view.state),
        "needs": {
            "owner": {"want": view.owner_want, "have": view.owner_have},
            "teams": [{"team": team, "want": want, "have": have} for team, want, have in view.teams],
        },
        "votes": [_vote(each, vote, now) for vote in cast_here],
        "missing": view.missing or None,
    }


def _vote(each: Rollout, vote: Vote, now: float) -> wire.Vote:
    return {
        "id": vote.id,
        "by": vote.actor.name,
        "uid": vote.actor.uid,
        "yes": vote.yes,
        "teams": list(vote.teams),
        "reason": vote.reason,
        "at": moment(vote.at),
        "digest": vote.digest,
        "withdrawn": maybe(vote.withdrawn_at),
        "counts": ballots.counts(each, vote, now),
    }


# -- nodes --------------------------------------------------------------------


def node(state: State, found: Found, target: Target, block: Reason | None) -> wire.Node:
    """Return a node of a rollout; `block` is why it does not move."""
    live = state.live.get((target.rollout, target.node), NOTHING)
    return {
        "node": target.node,
        "team": target.team,
        "pools": list(target.pools),
        "phase": target.phase.value,
        "wave": target.wave,
        "outcome": target.outcome.value if target.outcome is not None else None,
        "attempt": target.attempt,
        "isolated": target.isolated,
        "since": maybe(target.since),
        "step": live.step or None,
        "percent": round(live.percent, 1) if live.step else None,
        "reason": reason(block),
        "admitted_at": maybe(target.admitted_at),
    }


def nodes(state: State, found: Found) -> list[wire.Node]:
    """Return the nodes of a rollout in their order, each with the reason why it does not move."""
    targets = sorted(found.index.targets(found.rollout.id), key=lambda target: target.position)
    blocks = schedule.why_all(found.index, found.rollout.id, state.now())
    live = {each.node: state.live.get((each.rollout, each.node), NOTHING) for each in targets}
    reasons = (standstill(found.index, each, blocks.get(each.node), live[each.node]) for each in targets)
    return [node(state, found, each, why) for each, why in zip(targets, reasons, strict=True)]


def why(state: State, found: Found, target: Target) -> Reason | None:
    """Return why a node does not move; None where it does, or has arrived."""
    block = schedule.why(found.index, found.rollout.id, target.node, state.now())
    return standstill(found.index, target, block, state.live.get((target.rollout, target.node), NOTHING))


def failure(found: Failure | None) -> wire.Failure | None:
    """Return how a node failed."""
    if found is None:
        return None
    return {
        "id": found.id,
        "attempt": found.attempt,
        "step": found.step,
        "message": found.message,
        "at": moment(found.at),
    }


# -- slots --------------------------------------------------------------------


def locks(state: State) -> wire.Locks:
    """Return every pool with who takes its slots, the holds and the freezes."""
    now = state.now()
    index = state.index
    return {
        "pools": [_lock(index, pool, now) for pool in sorted(index.pool_ids())],
        "holds": [hold(each) for each in index.holds if each.until is None or now < each.until],
        "freezes": [freeze(each) for each in index.freezes if each.until is None or now < each.until],
        "seq": state.feed.latest,
    }


def _lock(index: Index, pool_id: str, now: float) -> wire.Lock:
    held = [_holder(each) for each in pools.holders(index, pool_id, now)]
    return {
        "pool": pool_id,
        "max_unavailable": pools.budget(index, pool_id),
        "members": len(index.pool(pool_id).members),
        "down": len(held),
        "unseen": sum(each["unseen"] for each in held),
        "holders": held,
    }


def _holder(each: Stand) -> wire.Holder:
    by = each.by
    return {
        "node": each.node,
        "why": each.text,
        "rollout": by.rollout if isinstance(by, Target) else None,
        "source": by.source if isinstance(by, Hold) else None,
        "id": by.id if isinstance(by, Hold) else None,
        "since": maybe(each.since),
        "unseen": not each.sure,
    }


def hold(each: Hold) -> wire.Hold:
    """Return a hold."""
    return {
        "node": each.node,
        "source": each.source,
        "id": each.id,
        "by": each.actor.name,
        "reason": each.reason,
        "at": moment(each.at),
        "until": maybe(each.until),
    }


def freeze(each: Freeze) -> wire.Freeze:
    """Return a freeze."""
    return {
        "id": each.id,
        "scope": each.scope,
        "by": each.by,
        "reason": each.reason,
        "at": moment(each.at),
        "until": maybe(each.until),
    }


# -- the settings -------------------------------------------------------------


def settings(shown: Settings) -> wire.SettingsShown:
    """Return who may do what, and how much at once; nothing of how anything is reached."""
    return {
        "observe_only": shown.observe_only,
        "max_parallel": shown.max_parallel,
        "admins": list(shown.admins),
        "teams": [
            {
                "team": name,
                "members": list(team.members),
                "checks": len(team.verify),
                "windows": len(team.windows),
                "canaries": list(team.canaries),
            }
            for name, team in sorted(shown.teams.items())
        ],
        "pools": [
            {"key": key, "max_unavailable": str(pool.max_unavailable)} for key, pool in shown.pools.items()
        ],
    }


# -- the inventory ------------------------------------------------------------


def inventory(index: Index, sources: Mapping[str, SourceState]) -> wire.Inventory:
    """Return all known nodes and where they come from."""
    return {
        "nodes": [_known(index, each) for each in sorted(index.nodes.values(), key=lambda one: one.name)],
        "sources": [
            {
                "source": each.source,
                "refreshed_at": maybe(each.refreshed_at),
                "nodes": each.nodes,
                "error": each.error or None,
            }
            for each in sources.values()
        ],
    }


def _known(index: Index, each: Node) -> wire.InventoryNode:
    seen = index.observation(each.name)
    return {
        "node": each.name,
        "kind": each.kind.value,
        "team": each.team,
        "labels": dict(each.labels),
        "pools": list(index.pools_of(each)),
        "sources": list(each.sources),
        "sight": (Sight.UNKNOWN if seen is None else seen.sight).value,
        "seen_at": None if seen is None else moment(seen.at),
        "why": "not observed yet" if seen is None else seen.why or None,
    }
