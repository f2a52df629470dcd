"""What anybody may ask: how things stand, why, and what happened."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from machines.events import StepRecord
from rolloutd.chain import GENESIS
from rolloutd.control import openapi, views, wire
from rolloutd.control.finding import MOST_CLOSED, Found, find, find_in_audit
from rolloutd.control.logs import may_see
from rolloutd.control.requests import AuditQuery, HeadQuery, StatusQuery
from rolloutd.control.routes import Call, Desk, Route
from rolloutd.control.times import moment
from rolloutd.ports import Entry

MOST_CLOSED_SHOWN = 20
"""Closed rollouts that `status` shows whole, the latest; `rollouts` lists all."""

MOST_SCANNED = 50_000
"""Entries looked at for one page of a filter that the store does not know; the answer says where to go on."""


async def health(desk: Desk, call: Call) -> wire.Health:
    """Say that the daemon is there."""
    state = desk.state
    return {
        "version": desk.version,
        "epoch": state.index.epoch,
        "pid": os.getpid(),
        "since": moment(desk.since),
        "observe_only": state.index.limits.observe_only,
        "trouble": "; ".join(state.troubles()) or None,
    }


async def whoami(desk: Desk, call: Call) -> wire.WhoAmI:
    """Say who is asking."""
    who = call.who
    plans = (each.plan.owner for each in desk.state.index.rollouts.values() if not each.closed)
    return {
        "user": who.user,
        "uid": who.uid,
        "groups": sorted(who.groups),
        "teams": sorted(who.teams),
        "owner_of": sorted({owner for owner in plans if owner in who.teams}),
        "admin": who.admin,
    }


async def status(desk: Desk, call: Call) -> wire.Status:
    """Show all rollouts that are not over, and with `all` the others too."""
    query: StatusQuery = call.query
    state = desk.state
    shown = [
        views.rollout(state, Found(state.index, each, live=True))
        for each in state.index.rollouts.values()
        if query.all or not each.closed or state.index.tally(each.id).busy
    ]
    if query.all:
        shown += [
            views.rollout(state, await find(state, closed.id))
            for closed in await state.store.closed_rollouts(MOST_CLOSED_SHOWN)
            if closed.id not in state.index.rollouts
        ]
    return {"rollouts": shown, "trouble": "; ".join(state.troubles()) or None, "seq": state.feed.latest}


async def rollouts(desk: Desk, call: Call) -> wire.Rollouts:
    """List all rollouts, the latest first."""
    state = desk.state
    now = state.now()
    lines = [views.line(state.index, each, now) for each in state.index.rollouts.values()]
    lines += [
        views.closed_line(each)
        for each in await state.store.closed_rollouts(MOST_CLOSED)
        if each.id not in state.index.rollouts
    ]
    return {"rollouts": sorted(lines, key=lambda each: each["submitted_at"], reverse=True)}


async def rollout(desk: Desk, call: Call) -> wire.Rollout:
    """Show one rollout."""
    return views.rollout(desk.state, await find(desk.state, call.names["r"]))


async def nodes(desk: Desk, call: Call) -> wire.Nodes:
    """Show the nodes of a rollout."""
    found = await find(desk.state, call.names["r"])
    return {"nodes": views.nodes(desk.state, found), "seq": desk.state.feed.latest}


async def node(desk: Desk, call: Call) -> wire.NodeDetail:
    """Show one node of a rollout and everything that was done to it."""
    found = await find(desk.state, call.names["r"])
    target = found.target(call.names["n"])
    steps = await desk.state.store.steps(target.rollout, target.node)
    shown = views.node(desk.state, found, target, views.why(desk.state, found, target))
    return {
        **shown,
        "steps": [_step(record, visible=may_see(record, call.who)) for record in steps],
        "failure": views.failure(target.failure),
    }


async def why(desk: Desk, call: Call) -> wire.Why:
    """Say why a node does not move."""
    found = await find(desk.state, call.names["r"])
    target = found.target(call.names["n"])
    block = views.why(desk.state, found, target)
    return {"node": target.node, "phase": target.phase.value, "reason": views.reason(block)}


async def plan(desk: Desk, call: Call) -> wire.PlanContent:
    """Show a rollout's plan in its canonical form."""
    found = (await find(desk.state, call.names["r"])).rollout
    content, source = await desk.state.store.content(found.id)
    digest = found.digest
    return {
        "content": dict(content),
        "source": dict(source),
        "digest": digest.whole,
        "hashes": views.hashes(digest),
    }


async def locks(desk: Desk, call: Call) -> wire.Locks:
    """Show every pool's slots and who has them."""
    return views.locks(desk.state)


async def settings(desk: Desk, call: Call) -> wire.SettingsShown:
    """Show who may do what, and how much at once."""
    return views.settings(desk.state.settings)


async def inventory(desk: Desk, call: Call) -> wire.Inventory:
    """Show all known nodes."""
    return views.inventory(desk.state.index, desk.state.sources)


async def audit(desk: Desk, call: Call) -> wire.Audit:
    """Show a page of the audit."""
    query: AuditQuery = call.query
    found: list[wire.AuditEntry] = []
    last = query.after
    scanned = 0
    named = None if query.rollout is None else await find_in_audit(desk.state, query.rollout)
    async for entry in _entries(desk, query, named):
        last = entry.seq
        scanned += 1
        parsed = json.loads(entry.text)
        if query.actor is None or parsed["actor"]["name"] == query.actor:
            at = moment(parsed["at"])
            found.append({"seq": entry.seq, "at": at, "hash": entry.hash, "entry": parsed})
        if len(found) == query.limit or scanned == MOST_SCANNED:
            return {"entries": found, "next": last}
    return {"entries": found, "next": None}


async def verify(desk: Desk, call: Call) -> wire.Verdict:
    """Check the audit's chain, entry by entry."""
    query: HeadQuery = call.query
    verdict = await desk.state.store.verify(query.head)
    return {
        "ok": verdict.ok,
        "entries": verdict.entries,
        "head": verdict.head,
        "first_bad": verdict.first_bad,
        "message": verdict.message,
    }


async def audit_head(desk: Desk, call: Call) -> wire.Head:
    """Show the hash to be kept elsewhere."""
    latest = await desk.state.store.head()
    if latest is None:
        return {"seq": 0, "hash": GENESIS, "at": None}
    return {"seq": latest.seq, "hash": latest.hash, "at": moment(json.loads(latest.text)["at"])}


async def document(desk: Desk, call: Call) -> dict[str, Any]:
    """Return this API's OpenAPI document."""
    from rolloutd.control.handlers import ROUTES as ALL

    return openapi.document(ALL, desk.version)


# -- what they share ----------------------------------------------------------


async def _entries(desk: Desk, query: AuditQuery, rollout_id: str | None) -> AsyncIterator[Entry]:
    after = query.after
    while True:
        page = await desk.state.store.audit(
            after=after, limit=query.limit, rollout=rollout_id, node=query.node, event=query.kind
        )
        for entry in page:
            after = entry.seq
            yield entry
        if len(page) < query.limit:
            return


def _step(record: StepRecord, *, visible: bool) -> wire.Step:
    return {
        "attempt": record.attempt,
        "step": record.step,
        "action": record.action.value,
        "number": record.number,
        "state": record.state.value,
        "began_at": moment(record.began_at),
        "at": moment(record.at),
        "text": record.text,
        "output": record.output if visible else None,
    }


ROUTES: Sequence[Route] = (
    Route("GET", "/v1/health", health, "Is the daemon there, and does anything trouble it", wire.Health),
    Route("GET", "/v1/openapi.json", document, "This document", dict[str, Any]),
    Route("GET", "/v1/whoami", whoami, "Who is asking, as the socket says", wire.WhoAmI),
    Route("GET", "/v1/status", status, "All rollouts that are not over", wire.Status, query=StatusQuery),
    Route("GET", "/v1/rollouts", rollouts, "A list of all rollouts", wire.Rollouts),
    Route("GET", "/v1/rollouts/{r}", rollout, "One rollout", wire.Rollout),
    Route("GET", "/v1/rollouts/{r}/nodes", nodes, "The nodes of a rollout", wire.Nodes),
    Route("GET", "/v1/rollouts/{r}/nodes/{n}", node, "One node, with its steps", wire.NodeDetail),
    Route("GET", "/v1/rollouts/{r}/nodes/{n}/why", why, "Why a node does not move", wire.Why),
    Route("GET", "/v1/rollouts/{r}/plan", plan, "A rollout's plan, canonical", wire.PlanContent),
    Route("GET", "/v1/locks", locks, "Slots, holds and freezes", wire.Locks),
    Route("GET", "/v1/settings", settings, "Who may do what, and how much at once", wire.SettingsShown),
    Route("GET", "/v1/inventory", inventory, "All known nodes", wire.Inventory),
    Route("GET", "/v1/audit", audit, "A page of the audit", wire.Audit, query=AuditQuery),
    Route("GET", "/v1/audit/head", audit_head, "The hash to be kept elsewhere", wire.Head),
    Route("GET", "/v1/audit/verify", verify, "Check the audit's chain", wire.Verdict, query=HeadQuery),
)
