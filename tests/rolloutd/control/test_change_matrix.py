"""The matrix of changes and nodes, which is kept between answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from machines.model.events import (
    NodesDiscovered,
    NodesRemoved,
    RolloutCancelled,
    RolloutDeleted,
)
from machines.model.rollout import DAEMON, Failure, FailureCode
from machines.states import Trigger
from rolloutd.control.fleet import change_matrix
from tests.rolloutd.control_environment import PLAN, URL, ControlEnvironment, control_environment


async def ask(inside: ControlEnvironment, **query: Any) -> Any:
    return await inside.request("nora", "get", "/v1/changes", query)


async def test_page_of_changes_counts_all_nodes(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        whole, first = await ask(inside), await ask(inside, limit=1)
        second = await ask(inside, limit=3, after=first["next"])
        (every,), (one,), (rest,) = whole["changes"], first["changes"], second["changes"]
        assert (whole["next"], first["next"], second["next"]) == (None, "p1", None)
        assert one["nodes"] + rest["nodes"] == every["nodes"]
        for key in ("counts", "groups", "percent"):
            assert one[key] == rest[key] == every[key]
        assert every["counts"] == {"done": 1, "pending": 3}


async def test_kept_matrix_answers_like_a_new_one(tmp_path: Path, monkeypatch: Any) -> None:
    """After each step: nodes that change, go and come, rollouts that move, end, leave memory, are deleted."""
    async with control_environment(tmp_path) as inside:
        state, seen = inside.state, []

        async def compare() -> None:
            kept = await ask(inside)
            assert await ask(inside, plan="sysctl") == {
                **kept,
                "changes": [each for each in kept["changes"] if each["plan"] == "sysctl"],
            }
            with monkeypatch.context() as emptied:
                emptied.setattr(inside.kept, "_values", {})
                assert await ask(inside) == kept
            seen.append(kept)

        first = await inside.start(text=PLAN.replace('targets: ""', 'targets: "rack=r1"'))
        await compare()
        await inside.finish(first, "p1")
        await compare()
        moved = replace(state.index.nodes["p2"], labels={**state.index.nodes["p2"].labels, "rack": "r9"})
        await inside.commit(NodesDiscovered((moved,)))
        await compare()
        gone = state.index.nodes["s2"]
        await inside.commit(NodesRemoved((gone.name,)))
        await compare()
        await inside.commit(NodesDiscovered((gone,)))
        await compare()
        await inside.commit(RolloutCancelled(first, DAEMON, "because", inside.clock.now()))
        await compare()
        await inside.restart()
        second = await inside.submit(text=PLAN.replace('targets: ""', 'targets: "rack=r1"'), again=True)
        await compare()
        monkeypatch.setattr(change_matrix, "MAX_KEPT_STATES", 0)
        await compare()
        await inside.commit(RolloutDeleted(first, DAEMON, inside.clock.now()))
        await compare()
        assert [each["rollouts"] for each in seen[-1]["changes"]] == [[second]]
        assert len({str(each) for each in seen}) >= 6, "the steps change the answer"


async def states_by_version(inside: ControlEnvironment) -> dict[str, str]:
    """Return the states of p1, p2, s1 and s2 in each change, the latest change first."""
    changes = (await ask(inside))["changes"]
    return {each["version"]: " ".join(node["state"] for node in each["nodes"]) for each in changes}


async def test_state_says_held_and_unknown(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        failure = Failure("p1#1", "p1", 1, "run.configure", "no answer", 1.0, FailureCode.UNKNOWN)
        await inside.transition(rollout, "p1", Trigger.FAILED, failure=failure)
        await inside.request("adam", "put", "/v1/holds", {"node": "s1", "reason": "disk swap"})
        (states,) = (await states_by_version(inside)).values()
        assert states == "unknown pending held pending"
        await inside.request("adam", "delete", "/v1/holds", {"node": "s1"})
        (change,) = (await ask(inside))["changes"]
        assert change["counts"] == {"unknown": 1, "pending": 3}


async def test_older_change_is_replaced_until_it_returns(tmp_path: Path) -> None:
    """A module goes to another version and back: each node has one version at a time."""
    async with control_environment(tmp_path) as inside:
        first = await inside.start()
        for node in ("p1", "s1"):
            await inside.finish(first, node)
        files = {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n"}
        older = inside.sources.commit(URL, files, ["main"])
        newer = inside.sources.commit(URL, {**files, "new.yml": ""}, [], ["v2"])
        tagged = PLAN.replace("ref: main", "ref: v2")
        second = await inside.start(text=tagged, supersede=True)
        await inside.finish(second, "p1")
        assert await states_by_version(inside) == {
            "v2": "done pending pending pending",
            older[:12]: "replaced never done never",
        }
        changes = (await ask(inside))["changes"]
        assert [(each["pin"], each["percent"]) for each in changes] == [(newer, 25.0), (older, 25.0)]
        await inside.start(supersede=True)
        assert await states_by_version(inside) == {
            older[:12]: "pending pending done pending",
            "v2": "done never never never",
        }


async def test_changes_of_one_version_are_told_apart(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await inside.submit()
        await inside.submit(text=PLAN.replace("undo.yml", "site.yml"), supersede=True)
        changes = (await ask(inside))["changes"]
        assert len({each["pin"] for each in changes}) == 1
        short = changes[0]["pin"][:12]
        assert [each["version"] for each in changes] == [
            f"{short} ({each['change'][:12]})" for each in changes
        ]
