"""Restarts of a service: once for each token, and tokens that come back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.playbook_node import Node


def variables(node: Node) -> dict[str, Any]:
    return {
        "service": "nginx",
        "restart_state_dir": str(node.directory / "tokens"),
        "systemctl_command": str(node.directory / "systemctl"),
    }


def restarts(node: Node) -> list[str]:
    return (node.services / "log").read_text().splitlines()


@pytest.mark.long
async def test_a_service_is_restarted_once_per_token(node: Node) -> None:
    (node.services / "nginx").touch()
    where = variables(node)
    assert await node.check("restart-service.yml", restart_token="CHG-1", **where) == [
        "Say that the service must restart"
    ]
    assert not (node.services / "log").exists()
    for rollout, token in (("r1", "CHG-1"), ("r1", "CHG-1"), ("r2", "CHG-2")):
        await node.play("restart-service.yml", rollout=rollout, restart_token=token, **where)
    assert restarts(node) == ["restart nginx"] * 2
    assert await node.check("restart-service.yml", rollout="r2", restart_token="CHG-2", **where) == []
    await node.play("restart-service-verify.yml", restart_token="CHG-2", **where)
    (node.services / "nginx").unlink()
    await node.fail("restart-service-verify.yml", restart_token="CHG-2", **where)
    assert await node.check("restart-service-undo.yml", rollout="r2", **where) == [
        "Say which services are not",
        "Put back the tokens of before",
    ]
    await node.play("restart-service-undo.yml", rollout="r2", **where)
    assert (node.services / "nginx").exists()
    await node.play("restart-service-verify.yml", restart_token="CHG-1", **where)
    await node.play("restart-service-undo.yml", rollout="r1", **where)
    assert [path.name for path in (node.directory / "tokens").iterdir()] == []


@pytest.mark.long
async def test_restart_killed_after_each_task_is_complete(node: Node) -> None:
    where = variables(node) | {"restart_token": "CHG-1"}
    assert await node.play_killed("restart-service.yml", **where) >= 3
    assert await node.play("restart-service.yml", **where) == 0
    await node.play("restart-service-verify.yml", **where)
    (node.services / "nginx").unlink()
    assert await node.play_killed("restart-service-undo.yml", **where) >= 3
    assert (node.services / "nginx").exists()
    assert [path.name for path in (node.directory / "tokens").iterdir()] == []
