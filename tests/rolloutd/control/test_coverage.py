"""Mixed fleets: what a plan leaves out is shown to voters, and refused at submit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import NodesDiscovered
from machines.model.node import NodeKind
from rolloutd.control.client import ApiError
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.rollouts.coverage import coverage_of
from tests.rolloutd.control_environment import NODES, PLAN, control_environment

MIXED = tuple(replace(n, kind=NodeKind.KUBERNETES) if n.name in ("p1", "s1") else n for n in NODES)
TRAFFIC = "traffic: [{kubernetes: {pods: kind=job}}]"


def file_with(isolate: str, verify: str = "reachable: {}") -> dict[str, Any]:
    text = PLAN.replace(
        'isolate: [{command: {do: "true", undo: "true"}}]', f"{TRAFFIC}\n  isolate: [{isolate}]"
    )
    assert text != PLAN
    return {"file": "plan.yaml", "text": text.replace("{reachable: {}}", f"{{{verify}}}")}


async def test_node_without_isolator_shown_and_refused(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=MIXED) as inside:
        file = file_with("{kubernetes: {}}")
        shown = await inside.request("olga", "post", "/v1/plans/preview", file)
        missed = "2 nodes: p2, s2"
        assert shown["not_isolated"] == [f"{missed} (no isolator applies, so they cannot start)"]
        assert shown["not_probed"] == [f"client traffic on {missed} (no traffic probe applies)"]
        cannot_start = {each["node"]: each["cannot_start"] for each in shown["targets"]}
        assert cannot_start["p2"]["code"] == "no-isolator"
        with pytest.raises(ApiError) as refused:
            await inside.request("olga", "post", "/v1/plans/submit", file)
        assert "no item applies to 2 of 4 nodes: p2, s2" in str(refused.value.body["errors"])


async def test_word_for_nodes_in_service_is_accepted_and_shown(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=MIXED) as inside:
        file = file_with("{kubernetes: {}}, {none: {where: kind=host}}")
        rollout = (await inside.request("olga", "post", "/v1/plans/submit", file))["rollout"]
        status = await inside.request("olga", "get", f"/v1/rollouts/{rollout}")
        assert status["not_isolated"] == ["2 nodes: p2, s2 (the plan says that they stay in service)"]


async def test_plan_without_isolator_says_so(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace('isolate: [{command: {do: "true", undo: "true"}}]', "isolate: []")
        shown = await inside.request("olga", "post", "/v1/plans/preview", {"file": "plan.yaml", "text": text})
        assert shown["not_isolated"] == ["all nodes (the plan has no isolator)"]


async def test_node_without_check_is_refused(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=MIXED) as inside:
        file = file_with("{none: {}}", verify="reachable: {where: kind=kubernetes}")
        with pytest.raises(ApiError) as refused:
            await inside.request("olga", "post", "/v1/plans/submit", file)
        assert [each["path"] for each in refused.value.body["errors"]] == ["spec.verify"]


async def test_coverage_follows_nodes_and_targets(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=MIXED) as inside:
        text = file_with("{command: {do: x, undo: y, where: team=payments}}, {none: {where: team=search}}")
        rollout = await inside.submit(text=text["text"].replace(TRAFFIC, ""))
        state, kept = inside.state, KeptAnswers()
        first = await coverage_of(state, kept, state.index, state.index.rollout(rollout))
        assert await coverage_of(state, kept, state.index, state.index.rollout(rollout)) is first
        p1 = state.index.nodes["p1"]
        await inside.commit(NodesDiscovered((replace(p1, labels={**p1.labels, "team": "search"}),)))
        second = await coverage_of(state, kept, state.index, state.index.rollout(rollout))
        assert (len(first.not_isolated), len(second.not_isolated)) == (1, 1)
        assert first.not_isolated != second.not_isolated
