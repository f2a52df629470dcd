"""Handlers of the audit: a page of it, its verification, its head, and the settlement of mismatches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from rolloutd.audit.audit_chain import GENESIS_HASH
from rolloutd.audit.audit_segments import SEGMENTS_DIRECTORY
from rolloutd.commands import audit_settlement
from rolloutd.commands.execution import UserCommand, execute
from rolloutd.commands.resolve import resolve_in_audit
from rolloutd.control import requests, rights
from rolloutd.control.audit import audit_serializers, wire_audit
from rolloutd.control.formats import format_timestamp
from rolloutd.control.requests import AuditQuery, VerifyQuery
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.ports import AuditEntry

routes = RouteTable()

PAGE_SIZE = 200
"""Entries read from the store and decoded at once: few, because one may have 500 nodes."""

MAX_SCANNED_ENTRIES = 50_000
"""Entries read for one page if the store cannot filter them (by actor); `next` says where to resume."""


@routes.add("GET", "/v1/audit", on_standby=True)
async def audit(services: Services, request: Request[AuditQuery]) -> wire_audit.Audit:
    """Show a page of the audit."""
    query = request.input
    entries: list[wire_audit.AuditEntry] = []
    last = query.after
    scanned = 0
    exported = await _exported(services)
    rollout_id = None if query.rollout is None else await resolve_in_audit(services.state, query.rollout)
    async for entry in _matching_entries(services, query, rollout_id):
        last = entry.seq
        scanned += 1
        parsed = json.loads(entry.text)
        if query.actor is None or parsed["actor"]["name"] == query.actor:
            at = format_timestamp(parsed["at"])
            entries.append({"seq": entry.seq, "at": at, "hash": entry.hash, "entry": parsed})
        if len(entries) == query.limit or scanned == MAX_SCANNED_ENTRIES:
            return {"entries": _oldest_first(entries, query), "next": last, "exported": exported}
    return {"entries": _oldest_first(entries, query), "next": None, "exported": exported}


@routes.add("GET", "/v1/audit/verify", is_heavy=True)
async def verify(services: Services, request: Request[VerifyQuery]) -> wire_audit.AuditVerification:
    """Verify the audit's hash chain, and that the database follows from the audit."""
    head = request.input.head
    # With a noted hash the report is also about that hash, which must not block nodes.
    verified = services.verify_audit() if head is None else services.state.store.verify_audit(head)
    report = await verified
    report = replace(report, anchor_problem=await services.compare_anchors())
    return audit_serializers.audit_report(report, await _exported(services))


@routes.add("GET", "/v1/audit/head", on_standby=True)
async def audit_head(services: Services, request: Request) -> wire_audit.AuditHead:
    """Show the latest hash of the audit, to keep elsewhere."""
    latest = await services.state.store.latest_audit_entry()
    if latest is None:
        return {"seq": 0, "hash": GENESIS_HASH, "at": None, "exported": None}
    at = format_timestamp(json.loads(latest.text)["at"])
    return {"seq": latest.seq, "hash": latest.hash, "at": at, "exported": await _exported(services)}


@routes.add("POST", "/v1/audit/settle", access=rights.ADMIN, operation="settle")
async def settle(services: Services, request: Request[requests.SettleBody]) -> wire_audit.AuditVerification:
    """Restore rows from the audit, or accept them as they are stored."""
    body = request.input
    state, who = services.state, request.identity
    report = await services.verify_audit()  # before the lock: no commit waits for it
    decide = partial(
        audit_settlement.settle, report=report, subjects=body.subjects, keep=body.keep, reason=body.reason
    )
    await execute(state, who, UserCommand(request.cause, decide))
    return audit_serializers.audit_report(await services.verify_audit(), await _exported(services))


async def _exported(services: Services) -> wire_audit.AuditExport | None:
    """Return where entries are that the database no longer has."""
    base = await services.state.store.load_audit_base()
    return audit_serializers.audit_export(base, services.state.settings.state_dir / SEGMENTS_DIRECTORY)


async def _matching_entries(
    services: Services, query: AuditQuery, rollout_id: str | None
) -> AsyncIterator[AuditEntry]:
    """Yield the entries in the order in which they are read: with `before`, the latest first."""
    after, before = query.after, query.before
    # An actor's entries may be rare: `limit` of them are found in many more.
    size = PAGE_SIZE if query.actor is not None else min(query.limit, PAGE_SIZE)
    while True:
        page = await services.state.store.read_audit(
            after=after,
            before=before,
            limit=size,
            rollout=rollout_id,
            node=query.node,
            event=query.kind,
        )
        for entry in page if before is None else reversed(page):
            yield entry
        if len(page) < size:
            return
        after, before = (page[-1].seq, None) if before is None else (after, page[0].seq)


def _oldest_first(entries: list[wire_audit.AuditEntry], query: AuditQuery) -> list[wire_audit.AuditEntry]:
    return entries if query.before is None else entries[::-1]
