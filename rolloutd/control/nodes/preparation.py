"""Handlers of preparation: how far nodes are, what they remember of it, and which artifacts they carry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from machines.facts.preparations import duration_s
from machines.model.node import Node
from machines.model.preparation import (
    CLEANUP,
    LOCALHOST,
    PREPARED,
    Preparation,
    PreparationState,
    PrepareKind,
)
from machines.model.rollout import Rollout
from machines.states import Outcome, Phase
from rolloutd.commands.resolve import ResolvedRollout, resolve_for_reading
from rolloutd.commands.rollout_commands import unknown_node
from rolloutd.control import requests, rights
from rolloutd.control.formats import fill
from rolloutd.control.nodes import wire_nodes
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.errors import RolloutdError
from rolloutd.ports import Checkpoint

NODE_TIMEOUT_S = 15.0
"""Limit of one node: a person waits."""

MAX_NODES_AT_ONCE = 50
"""Nodes that are read at once, so that the daemon's own steps find free connections."""

_Found = Mapping[tuple[str, str], Checkpoint] | str
"""The checkpoints of a node, or why they could not be read."""

routes = RouteTable()


@routes.add("GET", "/v1/rollouts/{r}/prepare")
async def prepare(services: Services, request: Request) -> wire_nodes.Preparations:
    """Show the prepare stages of a rollout on each of its nodes."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    return {
        "rollout": resolved.rollout.id,
        "preparations": list(_preparations(resolved, services.state.now())),
    }


@routes.add("GET", "/v1/nodes/{n}/checkpoints", access=rights.ANY_TEAM_MEMBER, is_heavy=True)
async def node_checkpoints(services: Services, request: Request) -> wire_nodes.NodeCheckpoints:
    """Read what a node remembers of prepare stages."""
    node = request.path_params["n"]
    if node not in services.state.index.nodes:
        raise unknown_node(services.state, node)
    return _node(node, (await _read(services, [node]))[node])


@routes.add("GET", "/v1/rollouts/{r}/checkpoints", access=rights.ANY_TEAM_MEMBER, is_heavy=True)
async def rollout_checkpoints(services: Services, request: Request) -> wire_nodes.RolloutCheckpoints:
    """Read what the nodes of a rollout remember of its plan's prepare stages."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    found = await _read(services, _present_nodes(services, resolved))
    plan = resolved.rollout.plan.name
    nodes = [_node(node, _of_plan(each, plan)) for node, each in found.items()]
    return {"rollout": resolved.rollout.id, "nodes": nodes}


@routes.add("GET", "/v1/rollouts/{r}/artifacts", access=rights.ANY_TEAM_MEMBER, is_heavy=True)
async def artifact_report(
    services: Services, request: Request[requests.ArtifactReportQuery]
) -> wire_nodes.ArtifactReport:
    """Compare the artifacts that a rollout's nodes carry with the manifest, by site."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    found = await _read(services, _present_nodes(services, resolved))
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name, each in found.items():
        if isinstance(each, str):
            continue
        node = services.state.index.nodes[name]
        site = node.labels.get(request.input.by, "")
        for artifact, expected, carried in _compare(resolved.rollout, node, each):
            groups.setdefault((site, artifact, expected, carried), []).append(name)
    return {
        "rollout": resolved.rollout.id,
        "artifacts": [
            {"site": key[0], "name": key[1], "expected": key[2], "found": key[3], "nodes": nodes}
            for key, nodes in sorted(groups.items())
        ],
        "unreadable": [name for name, each in found.items() if isinstance(each, str)],
    }


def _preparations(resolved: ResolvedRollout, now: float) -> Iterable[wire_nodes.Preparation]:
    """Yield the builds, then the stages of each node."""
    index, rollout = resolved.index, resolved.rollout
    known = index.preparations(rollout.id)
    if known is None:
        return
    for stage in rollout.prepare_stages:
        if stage.kind is PrepareKind.BUILD:
            yield _preparation(stage.host or LOCALHOST, stage.name, known.build_row(stage), "", now)
    targets = (each for each in index.targets(rollout.id) if each.outcome is not Outcome.LEFT)
    for target in sorted(targets, key=lambda each: each.position):
        node = index.nodes.get(target.node)
        for stage in () if node is None else known.stages_for(node):
            is_awaited = bool(stage.built_by) and stage.built_by not in rollout.built
            content = "" if node is None or is_awaited else known.content(stage, node)
            row = known.rows.get((target.node, stage.name))
            # What was done with another content, before the last build, is to be done again.
            is_current = row is not None and (row.state not in PREPARED or row.content == content)
            if is_current or target.phase is Phase.PENDING:
                is_forced, shown = stage.is_forced_on(target.node), row if is_current else None
                yield _preparation(target.node, stage.name, shown, content, now, is_forced=is_forced)
        if (cleanup := known.rows.get((target.node, CLEANUP))) is not None:
            yield _preparation(target.node, CLEANUP, cleanup, "", now)


def _preparation(
    node: str, stage: str, row: Preparation | None, content: str, now: float, *, is_forced: bool = False
) -> wire_nodes.Preparation:
    if row is None:
        row = Preparation("", node, stage, 0, PreparationState.WAITING, content, 0.0, 0.0)
    seconds = round(duration_s(row, now), 1)
    return fill(
        wire_nodes.Preparation,
        row,
        node=node,
        content=row.content or content,
        seconds=seconds,
        forced=is_forced,
    )


def _present_nodes(services: Services, resolved: ResolvedRollout) -> list[str]:
    known = services.state.index.nodes
    return [target.node for target in resolved.index.targets(resolved.rollout.id) if target.node in known]


async def _read(services: Services, nodes: Sequence[str]) -> dict[str, _Found]:
    slots = asyncio.Semaphore(MAX_NODES_AT_ONCE)

    async def read(node: str) -> _Found:
        try:
            async with slots:
                host = services.state.host(node)
                found = await services.checkpoints.read(host, timeout_s=NODE_TIMEOUT_S) or {}
                return {key: each for key, each in found.items() if each.content}
        except (RolloutdError, TimeoutError) as error:
            return str(error)

    return dict(zip(nodes, await asyncio.gather(*map(read, nodes)), strict=True))


def _of_plan(found: _Found, plan: str) -> _Found:
    return found if isinstance(found, str) else {key: each for key, each in found.items() if key[0] == plan}


def _compare(
    rollout: Rollout, node: Node, found: Mapping[tuple[str, str], Checkpoint]
) -> Iterable[tuple[str, str, str]]:
    """Yield the name and the digests, expected and found, of each artifact that the node should have."""
    for stage in rollout.prepare_stages:
        if stage.applies_to(node):
            checkpoint = found.get((rollout.plan.name, stage.name))
            for artifact in stage.artifacts_for(node):
                carried = checkpoint.artifacts.get(artifact.name) if checkpoint else None
                yield artifact.name, artifact.sha256, carried.sha256 if carried else ""


def _node(node: str, found: _Found) -> wire_nodes.NodeCheckpoints:
    if isinstance(found, str):
        return {"node": node, "text": found, "checkpoints": []}
    return {"node": node, "text": "", "checkpoints": [_checkpoint(found[key]) for key in sorted(found)]}


def _checkpoint(checkpoint: Checkpoint) -> wire_nodes.NodeCheckpoint:
    artifacts = [
        fill(wire_nodes.CarriedArtifact, each, name=name)
        for name, each in sorted(checkpoint.artifacts.items())
    ]
    return fill(wire_nodes.NodeCheckpoint, checkpoint, artifacts=artifacts)
