"""Trains over the socket: who makes and approves one, and what cannot be together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import ApiError
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

PAYMENTS_PLAN = PLAN.replace("name: sysctl, owner: infra", "name: driver, owner: payments")

ADD = {"rollouts": ["sysctl", "driver"], "reason": "kernel week"}


def train_requests(*rollouts: str) -> dict[tuple[str, str], tuple[str, str, Any]]:
    """Return who asks what of each route of trains."""
    path, reason = "/v1/trains/t", {"reason": "because"}
    return {
        ("PUT", "/v1/trains/{t}"): ("olga", path, {**reason, "rollouts": list(rollouts)}),
        ("POST", "/v1/trains/{t}/approve"): ("olga", f"{path}/approve", reason),
        ("GET", "/v1/trains/{t}"): ("nora", path, None),
        ("GET", "/v1/trains"): ("nora", "/v1/trains", None),
        ("DELETE", "/v1/trains/{t}"): ("olga", path, reason),
    }


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[ControlEnvironment]:
    """Return a daemon with a rollout of infra and one of payments."""
    async with control_environment(tmp_path) as inside:
        await inside.submit("olga")
        await inside.submit("paul", text=PAYMENTS_PLAN)
        yield inside


async def add(env: ControlEnvironment, who: str, **more: Any) -> Any:
    """Make the train."""
    return await env.request(who, "put", "/v1/trains/t", ADD | more)


async def test_train_of_others_waits_for_their_approval(env: ControlEnvironment) -> None:
    train = await add(env, "olga")
    assert (train["approved"], train["state"], len(train["missing"])) == (False, "waiting", 1)
    assert env.state.index.train_of(train["rollouts"][0]) is None
    train = await env.request("paul", "post", "/v1/trains/t/approve", {"reason": "fine"})
    assert (train["approved"], train["state"], train["nodes_shared"]) == (True, "active", 4)
    assert env.state.index.train_of(train["rollouts"][0]) is not None


async def test_admin_approves_train_at_once(env: ControlEnvironment) -> None:
    train = await add(env, "adam")
    assert train["approved"]
    assert await env.request("nora", "get", "/v1/trains/t") == train


async def test_stranger_may_not_make_train(env: ControlEnvironment) -> None:
    with pytest.raises(ApiError, match="may not make train t; ask an owner of its rollouts"):
        await add(env, "ida")
    assert not env.state.index.trains


async def test_train_of_one_refused(env: ControlEnvironment) -> None:
    with pytest.raises(ApiError, match="1 rollouts; give 2 to 10"):
        await add(env, "olga", rollouts=["sysctl"])


async def test_rollout_is_in_one_train_only(env: ControlEnvironment) -> None:
    await add(env, "adam")
    with pytest.raises(ApiError, match="it is in train t; remove that train first"):
        await env.request("adam", "put", "/v1/trains/other", ADD)


async def test_other_isolator_of_same_kind_refused(env: ControlEnvironment) -> None:
    other = PLAN.replace("name: sysctl", "name: third").replace('do: "true"', 'do: "false"')
    await env.submit("olga", text=other)
    with pytest.raises(ApiError, match="its isolator command has other parameters than that of sysctl"):
        await add(env, "adam", rollouts=["sysctl", "third"])


async def test_longer_train_asks_for_approval_again(env: ControlEnvironment) -> None:
    await add(env, "adam")
    await env.submit("olga", text=PLAN.replace("name: sysctl", "name: third"))
    train = await add(env, "olga", rollouts=["third"])
    assert len(train["rollouts"]) == 3
    assert len(train["missing"]) == 1


async def test_removed_train_is_gone(env: ControlEnvironment) -> None:
    await add(env, "adam")
    await env.request("paul", "delete", "/v1/trains/t", {"reason": "no"})
    with pytest.raises(ApiError, match="t: no such train"):
        await env.request("nora", "get", "/v1/trains/t")
    assert (await env.request("nora", "get", "/v1/trains"))["trains"] == []
