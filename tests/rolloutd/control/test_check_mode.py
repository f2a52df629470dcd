"""What check mode reports over the API: the impact of a plan, drift, and which node has which change."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines.model.events import DriftRecorded, RolloutCancelled, RolloutEnded
from machines.model.rollout import Actor, ActorKind
from machines.states import Phase
from rolloutd.control.client import ApiError
from tests.contracts.fakes.runner import Script
from tests.rolloutd.control_environment import PLAN, control_environment

FILE = {"file": "plan.yaml", "text": PLAN}
OLGA = Actor(ActorKind.PERSON, "olga", 1001)


async def test_impact_lists_nodes_that_would_change(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.run_host.compliant = {"p1", "s2"}
        inside.run_host.scripts = {"site.yml": Script.CHANGE}
        lines = await inside.stream_lines("/v1/plans/impact", who="olga", method="POST", body=FILE)
        assert {line["node"]: line["compliance"] for line in lines} == {
            "p1": "compliant",
            "s2": "compliant",
            "p2": "would-change",
            "s1": "would-change",
        }
        assert [line["changes"] for line in lines if line["node"] == "p2"] == [
            [{"task": "write the file", "diff": None}]
        ]
        assert (inside.run_host.started_runs, inside.run_host.runs) == ([], {})
        assert await inside.request("nora", "get", "/v1/rollouts") == {"rollouts": []}


async def test_impact_of_failed_check_is_unknown(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"site.yml": Script.FAIL}
        lines = await inside.stream_lines("/v1/plans/impact", who="olga", method="POST", body=FILE)
        assert {line["compliance"] for line in lines} == {"unknown"}
        assert lines[0]["problem"].startswith('task "install package" failed on ')


async def test_impact_is_for_plan_owner_only(tmp_path: Path) -> None:
    """Check mode executes the playbook: a member of another team may not have it run."""
    async with control_environment(tmp_path) as inside:
        with pytest.raises(ApiError) as refused:
            await inside.stream_lines("/v1/plans/impact", who="paul", method="POST", body=FILE)
        assert (refused.value.status, inside.run_host.runs) == (403, {})


async def test_drift_is_recorded_until_it_is_gone(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        inside.run_host.scripts = {"site.yml": Script.CHANGE}
        path, found = f"/v1/rollouts/{rollout}/drift", []
        for compliant in (set[str](), set[str](), {"p1"}):
            inside.run_host.compliant = compliant
            inside.clock.advance(60)
            lines = await inside.stream_lines(path, who="olga", method="POST", body={})
            status = await inside.request("olga", "get", f"/v1/rollouts/{rollout}")
            why = await inside.request("olga", "get", f"/v1/rollouts/{rollout}/nodes/p1/why")
            found.append(([line["node"] for line in lines], status["drifted"], why["reason"]))
        drifted = found[0][2]
        assert (drifted["code"], drifted["params"]) == ("drifted", {"tasks": ["write the file"]})
        assert found == [(["p1"], 1, drifted), (["p1"], 1, drifted), (["p1"], 0, None)], "since when stays"
        audit = await inside.request("olga", "get", f"/v1/audit?rollout={rollout}")
        recorded = [line["entry"] for line in audit["entries"] if line["entry"]["event"] == "DriftRecorded"]
        assert sorted(len(entry["fields"]["tasks"]) for entry in recorded) == [0, 1]
        assert inside.run_host.started_runs == []


async def test_changes_count_nodes_across_rollouts(tmp_path: Path) -> None:
    """The first rollout changed p1; its successor with the same change waits, and s2 was never a target."""
    text = PLAN.replace('targets: ""', 'targets: "rack=r1"')
    async with control_environment(tmp_path) as inside:
        first = await inside.start(text=text)
        await inside.finish(first, "p1")
        await inside.commit(RolloutCancelled(first, OLGA, "because", inside.clock.now()))
        await inside.restart()
        second = await inside.submit(text=text, again=True)
        (change,) = (await inside.request("nora", "get", "/v1/changes"))["changes"]
        assert (change["plan"], change["rollouts"]) == ("sysctl", [second, first])
        states = {node["node"]: node["state"] for node in change["nodes"]}
        assert states == {"p1": "done", "p2": "never", "s1": "pending", "s2": "never"}
        assert (change["percent"], change["never"]) == (25.0, ["p2", "s2"])
        groups = {group["group"]: group["percent"] for group in change["groups"]}
        assert (groups["team/payments"], groups["team/search"], groups["rack/r1"]) == (50.0, 0.0, 50.0)
        assert (await inside.request("nora", "get", "/v1/changes", {"plan": "other"}))["changes"] == []


async def test_unknown_compliance_is_not_drift(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        inside.run_host.scripts = {"site.yml": Script.FAIL}
        path = f"/v1/rollouts/{rollout}/drift"
        lines = await inside.stream_lines(path, who="olga", method="POST", body={})
        assert [line["compliance"] for line in lines] == ["unknown"]
        assert inside.state.index.target(rollout, "p1").drift is None


async def test_drift_of_ended_rollout_is_recorded(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        all_canaries = '  canary: {select: "", max_parallel: 9}'
        rollout = await inside.start(text=PLAN.replace("  soak: 10m", all_canaries))
        for target in list(inside.state.index.targets(rollout)):
            await inside.finish(rollout, target.node)
        await inside.commit(RolloutEnded(rollout, inside.clock.now()))
        await inside.restart()
        assert rollout not in inside.state.index.rollouts
        inside.run_host.scripts = {"site.yml": Script.CHANGE}
        inside.run_host.compliant = {"p1", "p2", "s1"}
        await inside.stream_lines(f"/v1/rollouts/{rollout}/drift", who="olga", method="POST", body={})
        nodes = (await inside.request("olga", "get", f"/v1/rollouts/{rollout}/nodes"))["nodes"]
        assert [node["node"] for node in nodes if node["reason"] is not None] == ["s2"]


async def test_drifted_node_is_not_taken_over(tmp_path: Path) -> None:
    """A new digest with the same change leaves finished nodes alone, but not one that lost the change."""
    for drifted, phase in ((False, Phase.DONE), (True, Phase.PENDING)):
        async with control_environment(tmp_path / str(drifted)) as inside:
            rollout = await inside.start()
            await inside.finish(rollout, "p1")
            if drifted:
                await inside.commit(DriftRecorded(rollout, "p1", inside.clock.now(), ("set the limit",)))
            text = PLAN.replace("soak: 10m", "soak: 11m")
            assert inside.phase(await inside.submit(text=text, supersede=True), "p1") is phase
