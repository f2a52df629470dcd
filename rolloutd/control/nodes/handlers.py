"""Handlers of nodes: queries, open to every caller, and commands on one node."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from machines.model.rollout import Rollout, Target
from machines.model.step_record import StepRecord
from rolloutd.commands import rollbacks, rollout_commands
from rolloutd.commands.execution import Decide, Events, Principal, UserCommand, execute, resolve_live
from rolloutd.commands.resolve import ResolvedRollout, resolve_for_reading
from rolloutd.control import requests, rights
from rolloutd.control.formats import fill
from rolloutd.control.nodes import node_serializers, wire_nodes
from rolloutd.control.nodes.logs import may_see_output
from rolloutd.control.requests import MAX_NODES_NAMED, NodesQuery
from rolloutd.control.responses import Encoded, encode_rows
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State
from rolloutd.engine.tasks import FEW_ROWS

routes = RouteTable()

MAX_CHANGED_ENTRIES = 10_000
"""Audit entries that are read for the nodes that changed; after more of them all nodes are shown."""


_PATH = "/v1/rollouts/{r}/nodes/{n}"


@routes.add("GET", "/v1/rollouts/{r}/nodes", is_shared=True, on_standby=True)
async def nodes(services: Services, request: Request[NodesQuery]) -> Encoded[wire_nodes.Nodes]:
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
    rows = len(resolved.index.targets_by_node(resolved.rollout.id)) if names is None else len(names)
    if rows > FEW_ROWS:
        # In a thread, on a fork: ten thousand nodes take longer than the loop may pause.
        resolved = replace(resolved, index=resolved.index.fork())
    return await encode_rows(rows, node_serializers.nodes, state, resolved, query, seq, names)


@routes.add("GET", "/v1/rollouts/{r}/nodes/{n}", on_standby=True)
async def node(services: Services, request: Request) -> wire_nodes.NodeDetail:
    """Show one node of a rollout, with its steps."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    target = resolved.target(request.path_params["n"])
    steps = await services.state.store.load_steps(target.rollout, target.node)
    return {
        **node_serializers.node(services.state, resolved, target),
        "steps": [
            _step_response(record, visible=may_see_output(record, request.identity)) for record in steps
        ],
        "failure": None if target.failure is None else node_serializers.failure(target.failure),
    }


@routes.add("GET", "/v1/rollouts/{r}/nodes/{n}/why")
async def why(services: Services, request: Request) -> wire_nodes.NodeReason:
    """Explain why a node does not move."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    return node_serializers.node_reason(services.state, resolved, resolved.target(request.path_params["n"]))


@routes.add("GET", "/v1/rollouts/{r}/failures", is_shared=True, on_standby=True)
async def failures(services: Services, request: Request) -> wire_nodes.Failures:
    """List a rollout's unresolved failures: what a vote at proceed names as shown."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    unresolved = resolved.index.unresolved_failures(resolved.rollout.id)
    return {
        "failures": [node_serializers.failure(each) for each in unresolved[:MAX_NODES_NAMED]],
        "omitted": max(0, len(unresolved) - MAX_NODES_NAMED),
    }


def _step_response(record: StepRecord, *, visible: bool) -> wire_nodes.Step:
    return fill(wire_nodes.Step, record, output=record.output if visible else None)


@routes.add("POST", f"{_PATH}/advance", access=rights.PLAN_OR_NODE_OWNER, operation="advance")
async def advance(services: Services, request: Request[requests.ReasonBody]) -> wire_nodes.Node:
    """Move a waiting node to the front of its wave."""
    return await _command_node(services, request, rollout_commands.advance)


@routes.add("POST", f"{_PATH}/retry", access=rights.PLAN_OWNER, operation="retry")
async def retry(services: Services, request: Request[requests.ReasonBody]) -> wire_nodes.Node:
    """Retry a failed node."""
    return await _command_node(services, request, rollout_commands.retry)


@routes.add("POST", f"{_PATH}/rollback", access=rights.PLAN_OWNER, operation="rollback")
async def rollback(services: Services, request: Request[requests.ReasonBody]) -> wire_nodes.Node:
    """Run the rollback playbook on a failed node, or order that of a changed one."""

    async def decide(state: State, who: Principal, rollout: Rollout, target: Target, reason: str) -> Events:
        later = await state.store.find_later_changes(rollout.id)
        return rollbacks.roll_back_nodes(state, who, rollout, [target], reason, later)

    return await _command_node(services, request, decide)


@routes.add("POST", f"{_PATH}/skip", access=rights.PLAN_OWNER, operation="skip")
async def skip(services: Services, request: Request[requests.SkipNode]) -> wire_nodes.Node:
    """Leave a node out of a rollout."""
    command = partial(rollout_commands.skip, isolation_choice=request.input.put_back)
    return await _command_node(services, request, command)


@routes.add("POST", "/v1/nodes/{n}/return", access=rights.ISOLATION_OWNER)
async def return_node(services: Services, request: Request[requests.OptionalReasonBody]) -> wire_nodes.Node:
    """Return a node to service that was left isolated."""
    state, node = services.state, request.path_params["n"]
    reason = request.input.reason or requests.NO_REASON
    target = rollout_commands.isolated_target(state, node)
    decide = partial(rollout_commands.return_node, node=node, reason=reason)
    await execute(state, request.identity, UserCommand(f"return: {reason}", decide))
    rollout = ResolvedRollout(state.index, state.index.rollout(target.rollout), live=True)
    return node_serializers.node(state, rollout, rollout.target(node))


async def _command_node(
    services: Services, request: Request[requests.ReasonBody], decide: Decide
) -> wire_nodes.Node:
    path, decide = request.path_params, partial(decide, reason=request.input.reason)
    resolved = await resolve_live(services.state, path["r"])
    command = UserCommand(request.cause, decide, resolved, path["n"])
    done = await execute(services.state, request.identity, command)
    target = done.rollout.target(path["n"])
    return node_serializers.node(services.state, done.rollout, target)
