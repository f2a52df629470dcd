"""What becomes of objects whose rollouts have ended or are removed, also during a slow submit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rolloutd.operator.controller import STATUS_INTERVAL_S
from rolloutd.operator.objects import RESOURCE
from tests.rolloutd.control_environment import PLAN, URL
from tests.rolloutd.operator.test_controller import Fleet, fleet, validate_status


async def apply_and_cancel(seen: Fleet) -> str:
    """Let an object have a rollout, and cancel it; return its id."""
    seen.apply()
    await seen.act()
    [rollout] = seen.rollouts()
    await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "old"})
    return rollout


async def test_object_of_deleted_rollout_submits_nothing(tmp_path: Path) -> None:
    """By a person, or by the retention after a year: an old plan must not begin again with the daemon."""
    async with fleet(tmp_path) as seen:
        rollout = await apply_and_cancel(seen)
        await seen.inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        for _ in range(2):
            await seen.act()
            seen.restart()
            await seen.act()
            accepted = seen.condition("Accepted")
            assert (accepted["status"], accepted["reason"], seen.rollouts()) == ("False", "Deleted", [])
            assert seen.status()["rollout"] == rollout
            validate_status(seen.status())


async def test_cancelled_rollout_of_person_is_not_submitted_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        rollout = await seen.inside.submit("olga")
        seen.apply()
        await seen.act()
        await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "stop"})
        await seen.act()
        seen.restart()
        await seen.act()
        assert (seen.status()["state"], seen.rollouts()) == ("cancelled", [])


async def test_status_keeps_its_rollout_while_that_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path) as seen:
        rollout = await apply_and_cancel(seen)
        await seen.inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        await seen.act()
        seen.restart()
        await seen.pass_over()
        store = seen.inside.state.store
        search = store.list_closed_rollouts

        async def searched_during_pass(limit: int) -> object:
            await seen.pass_over()
            return await search(limit)

        monkeypatch.setattr(store, "list_closed_rollouts", searched_during_pass)
        await seen.controller.submit_due()
        assert seen.condition("Accepted")["reason"] == "Deleted"


async def test_status_that_names_rollout_of_others_is_ignored(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        rollout = await seen.inside.submit("olga")
        thing = seen.apply(namespace="others")
        edited = {**thing, "status": {"rollout": rollout}}
        seen.kubernetes.objects.update(RESOURCE, thing, edited, manager="mallory", subresource="status")
        await seen.act()
        assert seen.condition("Accepted", namespace="others")["reason"] == "Refused"
        assert "state" not in seen.status(namespace="others")


async def test_silent_git_server_delays_no_removal_and_no_status(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        [rollout] = seen.rollouts()
        url = "https://git.example.org/silent.git"
        seen.inside.sources.answers[url] = asyncio.Event()
        seen.apply("other", plan=PLAN.replace(URL, url).replace("name: sysctl", "name: other"))
        await seen.pass_over()
        submitting = asyncio.create_task(seen.controller.submit_due())
        await asyncio.sleep(0)
        await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/pause", {"reason": "look"})
        seen.at += STATUS_INTERVAL_S
        await seen.pass_over()
        assert seen.status()["state"] == "paused"
        assert seen.condition("Accepted", "other")["reason"] == "Pending"
        seen.remove()
        await seen.pass_over()
        assert seen.rollouts() == []
        seen.inside.sources.answers[url].set()
        await submitting


async def test_silent_git_server_delays_no_status_after_start(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        url = "https://git.example.org/silent.git"
        seen.inside.sources.answers[url] = asyncio.Event()
        seen.apply("a", plan=PLAN.replace(URL, url).replace("name: sysctl", "name: other"))
        seen.restart()
        await seen.pass_over()
        silent, known = seen.controller._known.values()
        submitting = asyncio.create_task(seen.controller.submit_due())
        async with asyncio.timeout(10):
            while not known.rollout:
                await asyncio.sleep(0)
        assert (silent.obj.name, silent.rollout) == ("a", "")
        seen.inside.sources.answers[url].set()
        await submitting


async def test_ended_rollout_is_read_once_in_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the store alone after a day, and each event of other rollouts begins a pass."""
    async with fleet(tmp_path) as seen:
        rollout = await apply_and_cancel(seen)
        await seen.act()
        await seen.inside.restart()
        assert rollout not in seen.inside.state.index.rollouts
        seen.restart()
        reads: list[str] = []
        load = seen.inside.state.store.load_rollout

        async def counted(name: str) -> object:
            reads.append(name)
            return await load(name)

        monkeypatch.setattr(seen.inside.state.store, "load_rollout", counted)
        for _ in range(3):
            await seen.act(1.0)
        assert len(reads) == 1
