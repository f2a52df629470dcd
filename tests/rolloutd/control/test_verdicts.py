"""Verdicts at submit: what failed on a class of hosts is refused there until it is cleared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import GateOpened, VerdictRecorded
from machines.model.plan import GateName
from machines.model.rollout import FailureCode
from machines.states import Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.control.client import ApiError
from rolloutd.engine.outcomes import verdict_events
from rolloutd.engine.state import InvariantViolation
from rolloutd.store import open_store
from tests.rolloutd.control.test_configuration import plan_with, run_cli
from tests.rolloutd.control_environment import ControlEnvironment, control_environment

BAD = plan_with("bad", somaxconn=4096)


async def fail_on(
    inside: ControlEnvironment, text: str = BAD, node: str = "p1", code: FailureCode = FailureCode.FAILED
) -> str:
    """Let the content of a plan fail on a node, as the driver does; cancel the rollout and return it."""
    rollout = await inside.start(text=text, again=True)
    await inside.isolate(rollout, node)
    await inside.run_playbook(rollout, node)
    target = inside.state.index.target(rollout, node)
    moved = transition(
        target, Trigger.FAILED, inside.clock.now(), step="verify.0.reachable", text="no answer", code=code
    )
    await inside.commit(moved, *verdict_events(inside.state, target, moved))
    await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "broken"})
    return rollout


async def verdicts(inside: ControlEnvironment) -> list[dict[str, Any]]:
    """Return the verdicts."""
    found: list[dict[str, Any]] = (await inside.request("nora", "get", "/v1/verdicts"))["verdicts"]
    return found


async def refusal(inside: ControlEnvironment, text: str = BAD, **more: Any) -> str:
    """Return why a submit is refused."""
    with pytest.raises(ApiError) as refused:
        await inside.submit(text=text, **more)
    assert refused.value.status == 409
    return str(refused.value)


async def test_same_content_is_refused_with_its_evidence(tmp_path: Path) -> None:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path, compile_plan=compiled)

    async with control_environment(tmp_path, store=sqlite) as inside:
        rollout = await fail_on(inside)
        (found,) = await verdicts(inside)
        assert found["id"] == f"{rollout}.p1.1"
        assert (found["class"], found["node"], found["rollout"]) == ("all", "p1", rollout)
        assert (found["step"], found["text"]) == ("verify.0.reachable", "no answer")
        for more in ({}, {"again": True}, {"supersede": True}):
            text = await refusal(inside, **more)
            assert found["id"] in text
            assert "failed on p1" in text
            assert "verify.0.reachable: no answer" in text
        preview = await inside.request("paul", "post", "/v1/plans/preview", {"file": "p", "text": BAD})
        assert any(found["id"] in warning for warning in preview["warnings"])
        assert await inside.submit(text=plan_with("bad", somaxconn=4097))
        report = await inside.state.store.verify_audit()
        assert report.ok, report


async def test_another_name_or_check_is_the_same_content(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await fail_on(inside)
        assert "failed on p1" in await refusal(inside, plan_with("renamed", somaxconn=4096))


async def test_another_class_is_allowed(tmp_path: Path) -> None:
    async with control_environment(tmp_path, host_class=["team", "rack"]) as inside:
        await fail_on(inside)
        assert [each["class"] for each in await verdicts(inside)] == ["team=payments,rack=r1"]
        text = BAD.replace('targets: ""', 'targets: "team=payments"')
        assert "failed on p1" in await refusal(inside, text)
        assert await inside.submit(text=BAD.replace('targets: ""', 'targets: "team=search"'))


async def test_changed_inventory_variable_is_another_content(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.state.connections["p1"] = {"rmem": 1, "db_password": "old"}
        await fail_on(inside)
        assert "failed on p1" in await refusal(inside)
        inside.state.connections["p1"] = {"rmem": 1, "db_password": "new"}
        assert await inside.submit(text=BAD)


async def test_content_of_a_node_that_is_gone_is_its_change(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await fail_on(inside)
        nodes = {name: each for name, each in inside.state.index.nodes.items() if name != "p1"}
        inside.state.index._nodes = nodes
        assert "failed on p1" in await refusal(inside)
        assert await inside.submit(text=plan_with("bad", somaxconn=1))


@pytest.mark.parametrize("code", sorted(set(FailureCode) - {FailureCode.FAILED, FailureCode.RESTORED_ITSELF}))
async def test_node_not_to_blame_makes_no_verdict(tmp_path: Path, code: FailureCode) -> None:
    async with control_environment(tmp_path) as inside:
        await fail_on(inside, code=code)
        assert await verdicts(inside) == []
        assert await inside.submit(text=BAD)


async def test_failure_before_the_run_makes_no_verdict(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=BAD)
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        target = inside.state.index.target(rollout, "p1")
        moved = transition(target, Trigger.FAILED, inside.clock.now(), step="isolate", text="no")
        assert verdict_events(inside.state, target, moved) == []


async def test_admin_clears_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with control_environment(tmp_path) as inside:
        await fail_on(inside)
        (found,) = await verdicts(inside)
        path = f"/v1/verdicts/{found['id']}/clear"
        with pytest.raises(ApiError) as denied:
            await inside.request("olga", "post", path, {"reason": "it was the cable"})
        assert denied.value.status == 403
        assert await run_cli(inside, "verdicts", "--json") == 0
        assert json.loads(capsys.readouterr().out) == [found]
        await inside.request("adam", "post", path, {"reason": "it was the cable"})
        assert await verdicts(inside) == []
        assert await inside.submit(text=BAD)
        with pytest.raises(ApiError) as unknown:
            await inside.request("adam", "post", path, {"reason": "again"})
        assert unknown.value.status == 404
        events = await inside.state.store.read_audit(event="VerdictCleared")
        assert [json.loads(each.text)["actor"]["name"] for each in events] == ["adam"]


async def test_content_that_passes_clears_its_verdict(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=BAD)
        await inside.isolate(rollout, "p1")
        await inside.run_playbook(rollout, "p1")
        target = inside.state.index.target(rollout, "p1")
        moved = transition(target, Trigger.FAILED, inside.clock.now(), step="verify.0", text="slow")
        await inside.commit(moved, *verdict_events(inside.state, target, moved))
        assert len(await verdicts(inside)) == 1
        await inside.transition(rollout, "p1", Trigger.RETRIED)
        await inside.vote("olga", rollout, "proceed")
        await inside.finish(rollout, "p1")
        assert await verdicts(inside) == []


async def test_override_needs_an_owner_and_an_admin(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await fail_on(inside)
        (found,) = await verdicts(inside)
        with pytest.raises(ApiError) as invalid:
            await inside.submit(text=BAD, override_verdicts=[found["id"]])
        assert invalid.value.status == 400
        body = {"override_verdicts": [found["id"]], "reason": "the switch was broken"}
        rollout = await inside.submit(text=BAD, **body)
        review = await inside.request("olga", "get", f"/v1/rollouts/{rollout}/review")
        assert review["overrides"] == [found]
        opened = GateOpened(rollout, GateName.START, "", inside.clock.now())
        gate = await inside.vote("olga", rollout, "start")
        assert gate["state"] == "waiting"
        assert "an admin's vote is missing" in gate["missing"]
        with pytest.raises(InvariantViolation, match="missing an admin"):
            await inside.commit(opened)
        with pytest.raises(ApiError) as denied:
            await inside.vote("nora", rollout, "start")
        assert denied.value.status == 403
        gate = await inside.vote("adam", rollout, "start")
        assert gate["state"] == "open"
        await inside.commit(opened)
        assert inside.state.index.rollout(rollout).overrides == (found["id"],)


async def test_owner_who_is_an_admin_is_not_enough(tmp_path: Path) -> None:
    async with control_environment(tmp_path, admins=["olga", "oscar"]) as inside:
        await fail_on(inside)
        (found,) = await verdicts(inside)
        rollout = await inside.submit(text=BAD, override_verdicts=[found["id"]], reason="known")
        assert (await inside.vote("olga", rollout, "start"))["state"] == "waiting"
        assert (await inside.vote("oscar", rollout, "start"))["state"] == "open"


async def test_admin_has_no_vote_without_an_override(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit(text=BAD)
        with pytest.raises(ApiError) as denied:
            await inside.vote("adam", rollout, "start")
        assert denied.value.status == 403


async def test_verdict_keeps_the_class_of_its_time(tmp_path: Path) -> None:
    async with control_environment(tmp_path, host_class=["team"]) as inside:
        await fail_on(inside)
        inside.state.settings = inside.state.settings.model_copy(update={"host_class": []})
        assert await inside.submit(text=BAD.replace('targets: ""', 'targets: "team=search"'))
        events = await inside.state.store.read_audit(event=VerdictRecorded.__name__)
        assert json.loads(events[0].text)["fields"]["verdict"]["host_class"] == {"team": "payments"}
