"""Handlers of commands on one node."""

from __future__ import annotations

from functools import partial

from machines.model.rollout import Rollout, Target
from rolloutd.commands import rollbacks, rollout_commands
from rolloutd.commands.execution import Decide, UserCommand, execute
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.commands.rollout_commands import Events, Principal
from rolloutd.control import requests, rights
from rolloutd.control.nodes import node_serializers, wire_nodes
from rolloutd.control.rollouts.commands import execute_on_path
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State

routes = RouteTable()

_PATH = "/v1/rollouts/{r}/nodes/{n}"


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
    done = await execute_on_path(services, request, partial(decide, reason=request.input.reason))
    target = done.rollout.target(request.path_params["n"])
    return node_serializers.node(services.state, done.rollout, target)
