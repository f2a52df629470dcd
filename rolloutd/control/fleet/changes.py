"""Handler of the matrix of changes and nodes, across rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from machines.facts.index import Index
from machines.model.rollout import Target
from rolloutd.control import requests
from rolloutd.control.fleet import wire_fleet
from rolloutd.control.fleet.change_matrix import NEVER, ChangeCounts, ChangeKey, ChangeMatrix
from rolloutd.control.fleet.fleet_serializers import names_in_order, page_of_names
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.tasks import compute
from rolloutd.errors import NotFound
from rolloutd.texts.formats import short_hash
from rolloutd.texts.versions import Version, version_of

routes = RouteTable()

MAX_CLOSED = 50
"""Closed rollouts that are read, the latest: each may have ten thousand nodes."""


@routes.add("GET", "/v1/changes", is_shared=True, on_standby=True)
async def changes(services: Services, request: Request[requests.ChangesQuery]) -> wire_fleet.Changes:
    """Show which node has which change, across rollouts."""
    state, query = services.state, request.input
    matrix = services.kept.of(ChangeMatrix)
    index, found, closed = state.index.fork(), dict[ChangeKey, list[str]](), dict[str, Sequence[Target]]()
    for rollout in reversed([*index.rollouts.values()]):
        if query.plan in (None, rollout.plan.name):
            found.setdefault((rollout.plan.name, rollout.digest.change), []).append(rollout.id)
    for each in await state.store.list_closed_rollouts(MAX_CLOSED):
        if query.plan in (None, each.name) and each.id not in index.rollouts:
            key = each.name, each.digest.change
            found.setdefault(key, []).append(each.id)
            if not matrix.has_closed(key, each.id):
                closed[each.id] = await state.store.load_targets(each.id)
    versions: dict[str, Version] = {}
    for key, rollouts in found.items():
        if not matrix.has_version(key, rollouts[0]):
            # A rollout that was deleted meanwhile is shown by its hash.
            with suppress(NotFound):
                versions[rollouts[0]] = version_of(*await state.store.load_plan(rollouts[0]))
    names = partial(names_in_order, services.kept, index)
    # In a thread, on a fork: ten thousand targets take longer than the loop may pause.
    return await compute(_answer, matrix, index, found, closed, versions, query, names)


def _answer(
    matrix: ChangeMatrix,
    index: Index,
    found: Mapping[ChangeKey, Sequence[str]],
    closed: Mapping[str, Sequence[Target]],
    versions: Mapping[str, Version],
    query: requests.ChangesQuery,
    names: Any,
) -> wire_fleet.Changes:
    with matrix.lock:
        counted = matrix.update(index, found, closed, versions, query.plan)
        shown, next_after = page_of_names(names(), query)
        named = {key: _version(key, counts) for key, counts in counted.items()}
        times = Counter((key[0], each.text) for key, each in named.items())
        lines = []
        for key, counts in counted.items():
            version, short = named[key], short_hash(key[1])
            # The plan has changed since, and not its source.
            is_ambiguous = times[key[0], version.text] > 1 and version.text != short
            text = f"{version.text} ({short})" if is_ambiguous else version.text
            lines.append(_change_line(key, counts, Version(text, version.pin), shown))
    return {"changes": lines, "next": next_after}


def _version(key: ChangeKey, change: ChangeCounts) -> Version:
    """Return what the latest rollout of a change brings."""
    latest = next(iter(change.rollouts.values()))
    return latest.version or Version(short_hash(key[1]), key[1])


def _change_line(
    key: ChangeKey, change: ChangeCounts, version: Version, names: Sequence[str]
) -> wire_fleet.Change:
    return {
        "plan": key[0],
        "change": key[1],
        "version": version.text,
        "pin": version.pin,
        "rollouts": list(change.rollouts),
        "percent": _percent(change.counts),
        "counts": {state: number for state, number in change.counts.items() if number},
        "nodes": [{"node": node, "state": change.states[node]} for node in names],
        "groups": [
            {
                "group": group,
                "total": counts.total(),
                "done": counts["done"],
                "percent": _percent(counts),
            }
            for group, counts in sorted(change.group_counts.items())
        ],
        "never": [node for node in names if change.states[node] == NEVER],
    }


def _percent(counts: Mapping[wire_fleet.ChangeState, int]) -> float:
    """Return the percentage of nodes that have the change, of all known nodes that were not skipped."""
    to_change = sum(counts.values()) - counts.get("skipped", 0)
    return round(100.0 * counts.get("done", 0) / to_change, 2) if to_change else 0.0
