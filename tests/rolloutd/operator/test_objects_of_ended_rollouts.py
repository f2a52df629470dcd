"""What becomes of an object whose rollout was deleted, or is that of a person, after a restart."""

from __future__ import annotations

from pathlib import Path

from rolloutd.operator.objects import RESOURCE
from tests.rolloutd.operator.test_controller import fleet, validate_status


async def test_object_of_deleted_rollout_submits_nothing(tmp_path: Path) -> None:
    """By a person, or by the retention after a year: an old plan must not begin again with the daemon."""
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        [rollout] = seen.rollouts()
        await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "old"})
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


async def test_status_that_names_rollout_of_others_is_ignored(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        rollout = await seen.inside.submit("olga")
        thing = seen.apply(namespace="others")
        edited = {**thing, "status": {"rollout": rollout}}
        seen.kubernetes.objects.update(RESOURCE, thing, edited, manager="mallory", subresource="status")
        await seen.act()
        assert seen.condition("Accepted", namespace="others")["reason"] == "Refused"
        assert "state" not in seen.status(namespace="others")
