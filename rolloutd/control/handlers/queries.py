"""Handlers of queries, open to every caller: state, reasons, inventory, audit."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace

from machines.model.events import StepRecord
from rolloutd.audit_chain import GENESIS_HASH
from rolloutd.commands.rollout_commands import unknown_node
from rolloutd.control import fleet_serializers, openapi, serializers, wire, wire_fleet, wire_plans
from rolloutd.control.comparison import comparison
from rolloutd.control.handover import handover
from rolloutd.control.logs import may_see_output
from rolloutd.control.requests import AuditQuery, HandoverQuery, NoParams, PageQuery, StatusQuery, VerifyQuery
from rolloutd.control.resolve import (
    MAX_CLOSED,
    ResolvedRollout,
    resolve_for_reading,
    resolve_in_audit,
    resolve_rollout,
)
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.control.serializers import format_timestamp
from rolloutd.ports import AuditEntry

MAX_CLOSED_SHOWN = 20
"""Latest closed rollouts that `status --all` shows in full; `rollouts` lists all."""

MAX_SCANNED_ENTRIES = 50_000
"""Entries read for one page if the store cannot filter them (by actor); `next` says where to resume."""

routes = RouteTable()


@routes.add("GET", "/v1/health")
async def health(services: Services, request: Request[NoParams]) -> wire_fleet.Health:
    """Report that the daemon runs, and its trouble."""
    state = services.state
    return {
        "version": services.version,
        "epoch": state.index.epoch,
        "pid": os.getpid(),
        "since": format_timestamp(services.started_at),
        "observe_only": state.index.limits.observe_only,
        "trouble": "; ".join(state.problems()) or None,
        "runs": serializers.runs(state.runner_status),
    }


@routes.add("GET", "/v1/whoami")
async def whoami(services: Services, request: Request[NoParams]) -> wire_fleet.WhoAmI:
    """Return the caller, as the socket identifies them."""
    identity = request.identity
    plans = (each.plan.owner for each in services.state.index.rollouts.values() if not each.closed)
    return {
        "user": identity.user,
        "uid": identity.uid,
        "groups": sorted(identity.groups),
        "teams": sorted(identity.teams),
        "owner_of": sorted({owner for owner in plans if owner in identity.teams}),
        "admin": identity.admin,
    }


@routes.add("GET", "/v1/status")
async def status(services: Services, request: Request[StatusQuery]) -> wire.Status:
    """Show all rollouts that are not closed, or with `all` the latest closed ones too."""
    query = request.input
    state = services.state
    shown = [
        serializers.rollout(state, ResolvedRollout(state.index, each, live=True))
        for each in state.index.rollouts.values()
        if query.all or not each.closed or state.index.counters(each.id).in_flight
    ]
    if query.all:
        shown += [
            serializers.rollout(state, await resolve_rollout(state, closed.id))
            for closed in await state.store.list_closed_rollouts(MAX_CLOSED_SHOWN)
            if closed.id not in state.index.rollouts
        ]
    return {
        "rollouts": shown,
        "trouble": "; ".join(state.problems()) or None,
        "seq": state.changes.latest_seq,
    }


@routes.add("GET", "/v1/rollouts")
async def rollouts(services: Services, request: Request[NoParams]) -> wire.Rollouts:
    """List all rollouts, latest first."""
    state = services.state
    now = state.now()
    index = state.index.at(now)
    lines = [serializers.rollout_line(index, each, now) for each in index.rollouts.values()]
    lines += [
        serializers.closed_rollout_line(each)
        for each in await state.store.list_closed_rollouts(MAX_CLOSED)
        if each.id not in state.index.rollouts
    ]
    return {"rollouts": sorted(lines, key=lambda each: each["submitted_at"], reverse=True)}


@routes.add("GET", "/v1/rollouts/{r}")
async def rollout(services: Services, request: Request[NoParams]) -> wire.Rollout:
    """Show one rollout."""
    return serializers.rollout(
        services.state, await resolve_for_reading(services.state, request.path_params["r"])
    )


@routes.add("GET", "/v1/rollouts/{r}/nodes")
async def nodes(services: Services, request: Request[PageQuery]) -> wire.Nodes:
    """Show the nodes of a rollout."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    return serializers.nodes(services.state, resolved, request.input)


@routes.add("GET", "/v1/rollouts/{r}/nodes/{n}")
async def node(services: Services, request: Request[NoParams]) -> wire.NodeDetail:
    """Show one node of a rollout, with its steps."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    target = resolved.target(request.path_params["n"])
    steps = await services.state.store.load_steps(target.rollout, target.node)
    shown = serializers.node(
        services.state, resolved, target, serializers.blocking_reason(services.state, resolved, target)
    )
    return {
        **shown,
        "steps": [
            _step_response(record, visible=may_see_output(record, request.identity)) for record in steps
        ],
        "failure": serializers.failure(target.failure),
    }


@routes.add("GET", "/v1/rollouts/{r}/nodes/{n}/why")
async def why(services: Services, request: Request[NoParams]) -> wire.NodeReason:
    """Explain why a node does not move."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    target = resolved.target(request.path_params["n"])
    blocker = serializers.blocking_reason(services.state, resolved, target)
    return {
        "node": target.node,
        "phase": target.phase.value,
        "reason": serializers.reason(blocker),
        "trouble": "; ".join(services.state.problems()) or None,
    }


@routes.add("GET", "/v1/rollouts/{r}/plan")
async def plan(services: Services, request: Request[NoParams]) -> wire_plans.PlanContent:
    """Show a rollout's plan in its canonical form."""
    found = (await resolve_for_reading(services.state, request.path_params["r"])).rollout
    content, source = await services.state.store.load_plan(found.id)
    digest = found.digest
    return {
        "content": dict(content),
        "source": serializers.source(source),
        "digest": digest.whole,
        "hashes": serializers.hashes(digest),
    }


@routes.add("GET", "/v1/rollouts/{r}/comparison")
async def compare(services: Services, request: Request[NoParams]) -> wire.Comparison:
    """Compare the nodes of now with the canaries: durations and changed tasks."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    return await comparison(services.state, services.runner, resolved)


@routes.add("GET", "/v1/handover")
async def hand_over(services: Services, request: Request[HandoverQuery]) -> wire_fleet.Handover:
    """Show what changed since an instant, who decided, and what waits."""
    query = request.input
    return await handover(services.state, query.since.timestamp())


@routes.add("GET", "/v1/locks")
async def locks(services: Services, request: Request[NoParams]) -> wire_fleet.Locks:
    """Show every pool's slots and holders, the holds and the freezes."""
    return fleet_serializers.locks(services.state)


@routes.add("GET", "/v1/settings")
async def settings(services: Services, request: Request[NoParams]) -> wire_fleet.SettingsSummary:
    """Show the settings' limits, admins and teams."""
    return fleet_serializers.settings(services.state.settings)


@routes.add("GET", "/v1/inventory")
async def inventory(services: Services, request: Request[PageQuery]) -> wire_fleet.Inventory:
    """Show all known nodes, and the age of each source's answer."""
    return fleet_serializers.inventory(services.state, request.input)


@routes.add("GET", "/v1/inventory/{n}")
async def inventory_node(services: Services, request: Request[NoParams]) -> wire_fleet.InventoryNodeDetail:
    """Show what each source last reported of a node."""
    name = request.path_params["n"]
    if name not in services.state.index.nodes:
        raise unknown_node(services.state, name)
    return fleet_serializers.inventory_node(services.state, name)


@routes.add("GET", "/v1/audit")
async def audit(services: Services, request: Request[AuditQuery]) -> wire_fleet.Audit:
    """Show a page of the audit."""
    query = request.input
    entries: list[wire_fleet.AuditEntry] = []
    last = query.after
    scanned = 0
    rollout_id = None if query.rollout is None else await resolve_in_audit(services.state, query.rollout)
    async for entry in _matching_entries(services, query, rollout_id):
        last = entry.seq
        scanned += 1
        parsed = json.loads(entry.text)
        if query.actor is None or parsed["actor"]["name"] == query.actor:
            at = format_timestamp(parsed["at"])
            entries.append({"seq": entry.seq, "at": at, "hash": entry.hash, "entry": parsed})
        if len(entries) == query.limit or scanned == MAX_SCANNED_ENTRIES:
            return {"entries": _oldest_first(entries, query), "next": last}
    return {"entries": _oldest_first(entries, query), "next": None}


@routes.add("GET", "/v1/audit/verify", is_heavy=True)
async def verify(services: Services, request: Request[VerifyQuery]) -> wire_fleet.AuditVerification:
    """Verify the audit's hash chain, and that the database follows from the audit."""
    report = await services.state.store.verify_audit(request.input.head)
    if request.input.head is None:
        services.record_audit(report)
    return serializers.audit_report(replace(report, anchor_problem=await services.compare_anchors()))


@routes.add("GET", "/v1/audit/head")
async def audit_head(services: Services, request: Request[NoParams]) -> wire_fleet.AuditHead:
    """Show the latest hash of the audit, to keep elsewhere."""
    latest = await services.state.store.latest_audit_entry()
    if latest is None:
        return {"seq": 0, "hash": GENESIS_HASH, "at": None}
    return {"seq": latest.seq, "hash": latest.hash, "at": format_timestamp(json.loads(latest.text)["at"])}


@routes.add("GET", "/v1/openapi.json")
async def document(services: Services, request: Request[NoParams]) -> wire_fleet.OpenApi:
    """Return this API's OpenAPI document."""
    from rolloutd.control.handlers import ROUTES as ALL

    return await asyncio.to_thread(openapi.openapi_document, ALL, services.version)


# -- what handlers share ------------------------------------------------------


async def _matching_entries(
    services: Services, query: AuditQuery, rollout_id: str | None
) -> AsyncIterator[AuditEntry]:
    """Yield the entries in the order in which they are read: with `before`, the latest first."""
    after, before = query.after, query.before
    while True:
        page = await services.state.store.read_audit(
            after=after,
            before=before,
            limit=query.limit,
            rollout=rollout_id,
            node=query.node,
            event=query.kind,
        )
        for entry in page if before is None else reversed(page):
            yield entry
        if len(page) < query.limit:
            return
        after, before = (page[-1].seq, None) if before is None else (after, page[0].seq)


def _oldest_first(entries: list[wire_fleet.AuditEntry], query: AuditQuery) -> list[wire_fleet.AuditEntry]:
    return entries if query.before is None else entries[::-1]


def _step_response(record: StepRecord, *, visible: bool) -> wire.Step:
    return {
        "attempt": record.attempt,
        "step": record.step,
        "action": record.action.value,
        "number": record.number,
        "state": record.state.value,
        "began_at": format_timestamp(record.began_at),
        "at": format_timestamp(record.at),
        "text": record.text,
        "output": record.output if visible else None,
    }
