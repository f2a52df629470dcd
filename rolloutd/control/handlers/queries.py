"""Handlers of queries, open to every caller: state, reasons, inventory, audit."""

from __future__ import annotations

import os
from dataclasses import replace

from machines.model.events import StepRecord
from rolloutd.commands.resolve import MAX_CLOSED, ResolvedRollout, resolve_for_reading, resolve_rollout
from rolloutd.commands.rollout_commands import unknown_node
from rolloutd.concurrency import threads
from rolloutd.configuration.shown_variables import shown_plan
from rolloutd.control import fleet_serializers, openapi, serializers, wire, wire_fleet, wire_plans
from rolloutd.control.coverage import coverage_of
from rolloutd.control.handlers.leadership import daemons_of
from rolloutd.control.logs import may_see_output
from rolloutd.control.requests import MAX_NODES_NAMED, NodesQuery, PageQuery, StatusQuery
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.control.serializers import format_timestamp
from rolloutd.engine.tasks import compute

MAX_CLOSED_SHOWN = 20
"""Latest closed rollouts that `status --all` shows in full; `rollouts` lists all."""


MAX_CHANGED_ENTRIES = 10_000
"""Audit entries that are read for the nodes that changed; after more of them all nodes are shown."""


FEW_NODES = 200
"""Nodes that are shown without a fork, of which each makes the next commit copy tables: some milliseconds."""

routes = RouteTable()


@routes.add("GET", "/v1/health", on_standby=True)
async def health(services: Services, request: Request) -> wire_fleet.Health:
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


@routes.add("GET", "/v1/whoami", on_standby=True)
async def whoami(services: Services, request: Request) -> wire_fleet.WhoAmI:
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


@routes.add("GET", "/v1/status", is_shared=True, on_standby=True)
async def status(services: Services, request: Request[StatusQuery]) -> wire.Status:
    """Show all rollouts that are not closed, or with `all` the latest closed ones too."""
    query = request.input
    state = services.state
    # Before the facts: what is committed while closed rollouts are loaded is not in the answer.
    seq = state.changes.latest_seq
    shown = []
    for name, each in tuple(state.index.rollouts.items()):
        covered = await coverage_of(state, state.index, each)
        # Again: it may have been deleted, or have changed, while its nodes were examined.
        live = state.index.rollouts.get(name)
        if live is not None and (query.all or not live.closed or state.index.counters(name).in_flight):
            shown.append(serializers.rollout(state, ResolvedRollout(state.index, live, live=True), covered))
    if query.all:
        for closed in await state.store.list_closed_rollouts(MAX_CLOSED_SHOWN):
            if closed.id not in state.index.rollouts:
                resolved = await resolve_rollout(state, closed.id)
                covered = await coverage_of(state, resolved.index, resolved.rollout)
                shown.append(serializers.rollout(state, resolved, covered))
    return {
        "rollouts": shown,
        "trouble": "; ".join(state.problems()) or None,
        "seq": seq,
        **daemons_of(services),
    }


@routes.add("GET", "/v1/rollouts", is_shared=True, on_standby=True)
async def rollouts(services: Services, request: Request) -> wire.Rollouts:
    """List all rollouts, latest first."""
    state = services.state
    now = state.now()
    index = state.index.at(now)
    lines = [serializers.rollout_line(state, index, each, now) for each in index.rollouts.values()]
    lines += [
        serializers.closed_rollout_line(each)
        for each in await state.store.list_closed_rollouts(MAX_CLOSED)
        if each.id not in state.index.rollouts
    ]
    return {"rollouts": sorted(lines, key=lambda each: each["submitted_at"], reverse=True)}


@routes.add("GET", "/v1/rollouts/{r}", is_shared=True, on_standby=True)
async def rollout(services: Services, request: Request) -> wire.Rollout:
    """Show one rollout."""
    state = services.state
    resolved = await resolve_for_reading(state, request.path_params["r"])
    covered = await coverage_of(state, resolved.index, resolved.rollout)
    return serializers.rollout(state, await resolve_for_reading(state, resolved.rollout.id), covered)


@routes.add("GET", "/v1/rollouts/{r}/nodes", is_shared=True, on_standby=True)
async def nodes(services: Services, request: Request[NodesQuery]) -> wire.Nodes:
    """Show the nodes of a rollout, or those that have changed."""
    state, query = services.state, request.input
    resolved = await resolve_for_reading(state, request.path_params["r"])
    # Before the facts and the audit: what is committed meanwhile is then asked for again, and never missed.
    seq, names = state.changes.latest_seq, None
    # A longer read would keep every other query waiting, because the store has one connection for reading.
    if query.changed_after is not None and seq - query.changed_after <= MAX_CHANGED_ENTRIES:
        names = await state.store.list_changed_nodes(resolved.rollout.id, query.changed_after)
        # Again: the rollout may have been deleted, or the index replaced, while the audit was read.
        resolved = await resolve_for_reading(state, resolved.rollout.id)
    if names is not None and len(names) <= FEW_NODES:
        return serializers.nodes(state, resolved, query, seq, names)
    fixed = replace(resolved, index=resolved.index.fork())
    # In a thread, on a fork: ten thousand nodes take longer than the loop may pause.
    return await compute(serializers.nodes, state, fixed, query, seq, names)


@routes.add("GET", "/v1/rollouts/{r}/nodes/{n}", on_standby=True)
async def node(services: Services, request: Request) -> wire.NodeDetail:
    """Show one node of a rollout, with its steps."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    target = resolved.target(request.path_params["n"])
    steps = await services.state.store.load_steps(target.rollout, target.node)
    return {
        **serializers.node(services.state, resolved, target),
        "steps": [
            _step_response(record, visible=may_see_output(record, request.identity)) for record in steps
        ],
        "failure": None if target.failure is None else serializers.failure(target.failure),
    }


@routes.add("GET", "/v1/rollouts/{r}/nodes/{n}/why")
async def why(services: Services, request: Request) -> wire.NodeReason:
    """Explain why a node does not move."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    return serializers.why(services.state, resolved, resolved.target(request.path_params["n"]))


@routes.add("GET", "/v1/rollouts/{r}/failures", is_shared=True, on_standby=True)
async def failures(services: Services, request: Request) -> wire.Failures:
    """List a rollout's unresolved failures: what a vote at proceed names as shown."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    unresolved = resolved.index.unresolved_failures(resolved.rollout.id)
    return {
        "failures": [serializers.failure(each) for each in unresolved[:MAX_NODES_NAMED]],
        "omitted": max(0, len(unresolved) - MAX_NODES_NAMED),
    }


@routes.add("GET", "/v1/rollouts/{r}/plan", on_standby=True)
async def plan(services: Services, request: Request) -> wire_plans.PlanContent:
    """Show a rollout's plan in its canonical form."""
    state = services.state
    found = (await resolve_for_reading(state, request.path_params["r"])).rollout
    content, source = await state.store.load_plan(found.id)
    digest = found.digest
    return {
        "content": shown_plan(content, state.redaction_key, state.settings.show_vars),
        "source": serializers.source(source),
        "digest": digest.whole,
        "hashes": serializers.hashes(digest),
    }


@routes.add("GET", "/v1/locks", is_shared=True, on_standby=True)
async def locks(services: Services, request: Request) -> wire_fleet.Locks:
    """Show every pool's slots and holders, the holds and the freezes."""
    return await fleet_serializers.locks(services.state)


@routes.add("GET", "/v1/settings", on_standby=True)
async def settings(services: Services, request: Request) -> wire_fleet.SettingsSummary:
    """Show the settings' limits, admins and teams."""
    return fleet_serializers.settings(services.state.settings)


@routes.add("GET", "/v1/inventory", is_shared=True)
async def inventory(services: Services, request: Request[PageQuery]) -> wire_fleet.Inventory:
    """Show all known nodes, and the age of each source's answer."""
    return await fleet_serializers.inventory(services.state, request.input)


@routes.add("GET", "/v1/inventory/{n}")
async def inventory_node(services: Services, request: Request) -> wire_fleet.InventoryNodeDetail:
    """Show what each source last reported of a node."""
    name = request.path_params["n"]
    if name not in services.state.index.nodes:
        raise unknown_node(services.state, name)
    return fleet_serializers.inventory_node(services.state, name)


@routes.add("GET", "/v1/openapi.json", on_standby=True)
async def document(services: Services, request: Request) -> wire_fleet.OpenApi:
    """Return this API's OpenAPI document."""
    from rolloutd.control.handlers import ROUTES as ALL

    return await threads.COMPUTATIONS.run(openapi.openapi_document, ALL, services.version)


# -- what handlers share ------------------------------------------------------


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
