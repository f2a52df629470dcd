"""Handler that settles what the audit does not account for."""

from __future__ import annotations

from rolloutd.commands import audit_settlement
from rolloutd.control import requests, rights, serializers, wire_fleet
from rolloutd.control.routes import Request, RouteTable, Services

routes = RouteTable()


@routes.add("POST", "/v1/audit/settle", access=rights.ADMIN)
async def settle(services: Services, request: Request[requests.SettleBody]) -> wire_fleet.AuditVerification:
    """Restore rows from the audit, or accept them as they are stored."""
    body = request.input
    state = services.state
    async with state.exclusive_commit(request.identity.actor) as commit:
        events = await audit_settlement.settle(state, request.identity, body.subjects, body.keep, body.reason)
        await commit(events, f"{request.operation}: {body.reason}")
    report = await state.store.verify_audit()
    services.record_audit(report)
    return serializers.audit_report(report)
