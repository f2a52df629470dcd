"""The nodes of a rollout: all, and those that changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import RolloutDeleted
from machines.model.rollout import DAEMON, Failure, FailureCode
from machines.states import Trigger
from rolloutd.control.client import ApiError
from rolloutd.control.nodes import handlers as node_queries
from rolloutd.engine.state import State
from tests.rolloutd.control_environment import control_environment


class DeletingStore:
    """A store in which a rollout is deleted while its changes are read."""

    def __init__(self, state: State, rollout: str) -> None:
        self._inner, self._state, self._rollout = state.store, state, rollout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def list_changed_nodes(self, rollout: str, after: int) -> frozenset[str]:
        deleted = RolloutDeleted(rollout, DAEMON, self._state.now())
        await self._state.commit([deleted], cause="delete")
        return await self._inner.list_changed_nodes(rollout, after)


async def test_rollout_deleted_while_its_changes_are_read_is_404(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "because"})
        store: Any = DeletingStore(inside.state, rollout)
        inside.state.store = store
        with pytest.raises(ApiError) as unknown:
            await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes?changed_after=0")
        assert (unknown.value.status, unknown.value.code) == (404, "not-found")


async def test_why_and_nodes_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        before = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes")
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        listed = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes"))["nodes"]
        path = f"/v1/rollouts/{rollout}/nodes?changed_after="
        changed = await inside.request("nora", "get", f"{path}{before['seq']}")
        assert changed["nodes"] == [node for node in listed if node["node"] == "p1"]
        assert (await inside.request("nora", "get", f"{path}{changed['seq']}"))["nodes"] == []
        with monkeypatch.context() as patched:
            patched.setattr(node_queries, "MAX_CHANGED_ENTRIES", 0)
            everything = await inside.request("nora", "get", f"{path}{before['seq']}")
            assert everything["nodes"] == listed, "the entries are too many to read"
        for node in listed:
            why = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes/{node['node']}/why")
            assert (why["isolated"], why["outcome"]) == (node["isolated"], node["outcome"])
            assert why["reason"] == node["reason"]
        assert {node["node"]: node["phase"] for node in listed}["p1"] == "isolating"
        status = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert [each["node"] for each in status["in_flight"]] == ["p1"]
        assert status["state"] == "running"


async def test_nodes_are_filtered_page_by_page(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)

        async def names(query: str) -> list[str]:
            answer = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes?{query}")
            return [node["node"] for node in answer["nodes"]]

        assert await names("selector=team%3Dpayments") == ["p1", "p2"]
        assert await names("phase=isolating,failed") == ["p1"]
        assert await names("phase=pending&pool=team/search") == ["s1", "s2"]
        assert await names("selector=team%21%3Dpayments&phase=isolating") == []
        # `after` may name a node that the filter leaves out.
        assert await names("phase=pending&after=p1&limit=2") == ["s1", "p2"]
        for wrong in ("selector=team+in", "phase=lost", "phase=", "selector=%28"):
            with pytest.raises(ApiError) as refused:
                await names(wrong)
            assert refused.value.status == 400


def reasons_of_failures(answer: Any) -> Iterator[dict[str, Any]]:
    """Yield each mapping in an answer that says how a node failed."""
    if isinstance(answer, dict):
        if "message" in answer and "step" in answer:
            yield answer
        for value in answer.values():
            yield from reasons_of_failures(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from reasons_of_failures(value)


@pytest.mark.parametrize("code", list(FailureCode))
async def test_failure_has_its_code_wherever_it_is_shown(tmp_path: Path, code: FailureCode) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        await inside.run_playbook(rollout, "p1")
        failure = Failure("p1#1", "p1", 1, "run.configure", "broken", inside.clock.now(), code)
        await inside.transition(rollout, "p1", Trigger.FAILED, failure=failure)
        path = f"/v1/rollouts/{rollout}"
        shown = 0
        for asked in (path, "/v1/status", *(f"{path}/{each}" for each in ("nodes", "failures"))):
            for found in reasons_of_failures(await inside.request("nora", "get", asked)):
                assert found["code"] == code, f"{asked}: {found}"
                shown += 1
        for node in ("p1", "p2"):
            for asked in (f"{path}/nodes/{node}", f"{path}/nodes/{node}/why"):
                for found in reasons_of_failures(await inside.request("nora", "get", asked)):
                    assert found["code"] == code, f"{asked}: {found}"
                    shown += 1
        assert shown >= 6
