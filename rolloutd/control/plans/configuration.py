"""Handlers of configurations: the records of a node, what a plan would change on each node, and verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial

from machines.model.configuration import ConfigurationRecord, NodeConfiguration
from machines.model.target_plan import plan_with_values
from rolloutd.commands import submit, verdicts
from rolloutd.commands.execution import UserCommand, execute
from rolloutd.commands.rollout_commands import unknown_node
from rolloutd.concurrency import threads
from rolloutd.configuration.documents import differences, intended_configuration, shown_document
from rolloutd.control import requests, rights
from rolloutd.control.formats import fill, format_timestamp
from rolloutd.control.plans import plan_serializers, wire_plans
from rolloutd.control.plans.handlers import read_plan
from rolloutd.control.plans.source_review import MAX_REVIEW_CHARS
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State
from rolloutd.errors import NotFound
from rolloutd.ports import JSON, NodeConfigurations
from rolloutd.texts.formats import MAX_VALUE_CHARS, cut_value

routes = RouteTable()


@routes.add("GET", "/v1/nodes/{n}/configuration", on_standby=True)
async def node_configuration(services: Services, request: Request) -> wire_plans.NodeConfiguration:
    """Show what runs gave to a node: current, previous and invalid."""
    state = services.state
    stored, records = await _load(state, request.path_params["n"])
    return {
        "current": _record(state, stored, records.current),
        "previous": _record(state, stored, records.previous),
        "invalid": _record(state, stored, records.invalid),
    }


@routes.add("GET", "/v1/nodes/{n}/configuration/diff", on_standby=True)
async def configuration_diff(
    services: Services, request: Request[requests.ConfigurationDiffQuery]
) -> wire_plans.NodeDifference:
    """Show the values that differ between two records of a node."""
    query = request.input
    node = request.path_params["n"]
    stored, records = await _load(services.state, node)
    before, after = getattr(records, query.before), getattr(records, query.after)
    for name, record in ((query.before, before), (query.after, after)):
        if record is None:
            raise NotFound(f"{node}: no {name} configuration; see rolloutctl config {node}")
    documents = stored.documents[before.content], stored.documents[after.content]
    state = services.state
    found = differences(*documents, state.redaction_key, state.settings.show_vars)
    return {
        "node": node,
        "before": query.before,
        "after": query.after,
        "differences": [fill(wire_plans.ValueDifference, each) for each in found],
    }


@routes.add("POST", "/v1/plans/diff", access=rights.ANY_TEAM_MEMBER)
async def plan_diff(
    services: Services, request: Request[requests.PlanWithUpload]
) -> wire_plans.PlanDifferences:
    """Show what a plan would change on which nodes, grouped by equal differences."""
    body = request.input
    state = services.state
    draft = await submit.resolve_plan(state, services.sources, await read_plan(body), body.upload)
    nodes = [target.node for target in draft.targets]
    stored = await state.store.load_configurations(nodes)
    # In a thread: a fleet's documents take seconds.
    return await threads.COMPUTATIONS.run(
        _group_differences, draft, stored, {node: state.connections.get(node, {}) for node in nodes}, state
    )


@routes.add("GET", "/v1/verdicts", on_standby=True)
async def list_verdicts(services: Services, request: Request) -> wire_plans.Verdicts:
    """List the contents that failed on a class of hosts, with the evidence."""
    return {
        "verdicts": [plan_serializers.verdict(each) for each in await services.state.store.load_verdicts()]
    }


@routes.add("POST", "/v1/verdicts/{v}/clear", access=rights.VERDICT_ADMIN)
async def clear_verdict(
    services: Services, request: Request[requests.ReasonBody]
) -> wire_plans.ClearedVerdict:
    """Clear a verdict, so that its content may be submitted again."""
    state, verdict, reason = services.state, request.path_params["v"], request.input.reason
    decide = partial(verdicts.clear, verdict=verdict, reason=reason)
    await execute(state, request.identity, UserCommand(f"verdict cleared: {reason}", decide))
    return {"id": verdict}


def _group_differences(
    draft: submit.ResolvedPlan,
    stored: NodeConfigurations,
    variables: Mapping[str, Mapping[str, JSON]],
    state: State,
) -> wire_plans.PlanDifferences:
    groups: dict[str, wire_plans.DifferenceGroup] = {}
    source, key, allowed = draft.pinned.to_record(), state.redaction_key, state.settings.show_vars
    for node, connection in variables.items():
        current = stored.records.get(node, NodeConfiguration()).current
        found: tuple[wire_plans.ValueDifference, ...] = ()
        if current is not None:
            intended = intended_configuration(
                plan_with_values(draft.plan, node), source, connection, key, allowed
            )
            values = differences(stored.documents[current.content], intended, key, allowed)
            found = tuple(fill(wire_plans.ValueDifference, each) for each in values)
        kind: wire_plans.DifferenceKind = "new" if current is None else "changed" if found else "same"
        group = groups.setdefault(
            f"{kind} {found!r}", {"nodes": [], "state": kind, "differences": list(found), "not_shown": 0}
        )
        group["nodes"].append(node)
    largest_first = sorted(groups.values(), key=lambda group: -len(group["nodes"]))
    _limit_differences(largest_first)
    return {"groups": largest_first}


def _limit_differences(groups: Iterable[wire_plans.DifferenceGroup]) -> None:
    """Cut long values, and leave out what is beyond the limit of a review."""
    left = MAX_REVIEW_CHARS
    for group in groups:
        shown: list[wire_plans.ValueDifference] = []
        for each in group["differences"]:
            before, after = _cut(each["before"]), _cut(each["after"])
            left -= len(each["name"]) + len(str(before)) + len(str(after))
            if left >= 0:
                shown.append({"name": each["name"], "before": before, "after": after})
        group["not_shown"] = len(group["differences"]) - len(shown)
        group["differences"] = shown


def _cut(value: JSON) -> JSON:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= MAX_VALUE_CHARS else cut_value(text)


async def _load(state: State, node: str) -> tuple[NodeConfigurations, NodeConfiguration]:
    """Return the stored configurations of a node, also of one that is gone; raises NotFound."""
    stored = await state.store.load_configurations((node,))
    if node not in stored.records and node not in state.index.nodes:
        raise unknown_node(state, node)
    return stored, stored.records.get(node, NodeConfiguration())


def _record(
    state: State, stored: NodeConfigurations, record: ConfigurationRecord | None
) -> wire_plans.ConfigurationRecord | None:
    if record is None:
        return None
    return {
        "content": record.content,
        "change": stored.changes.get(record.rollout, ""),
        "rollout": record.rollout,
        "at": format_timestamp(record.at),
        "values": shown_document(
            stored.documents[record.content], state.redaction_key, state.settings.show_vars
        ),
        "evidence": {"step": record.step, "text": record.text} if record.step else None,
    }
