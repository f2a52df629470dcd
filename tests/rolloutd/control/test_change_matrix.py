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
from machines.model.rollout import DAEMON
from rolloutd.control.fleet import change_matrix
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment


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
            matrix, state.change_matrix = state.change_matrix, None
            assert await ask(inside) == kept
            state.change_matrix = matrix
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
