"""Trains over the socket: who makes and approves one, and what cannot be together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rolloutd.commands import trains
from rolloutd.control.client import ApiError, api_path
from rolloutd.control.response_text import describe_train
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

PAYMENTS_PLAN = PLAN.replace("name: sysctl, owner: infra", "name: driver, owner: payments")

ADD = {"rollouts": ["sysctl", "driver"], "reason": "kernel week"}


def train_requests(*rollouts: str) -> dict[tuple[str, str], tuple[str, str, Any]]:
    """Return who asks what of each route of trains."""
    path, reason = "/v1/trains/t", {"reason": "because"}
    shown = {"rollouts": list(rollouts), "wait_s": 3600.0}
    return {
        ("PUT", "/v1/trains/{t}"): ("olga", path, {**reason, "rollouts": list(rollouts)}),
        ("POST", "/v1/trains/{t}/approve"): ("olga", f"{path}/approve", {**reason, **shown}),
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
    """Make the train, or add to it as it is now."""
    known = trains.find_train(env.state.index, "t")
    shown = None if known is None else {"rollouts": known.rollouts, "wait_s": known.wait_s}
    return await env.request(who, "put", "/v1/trains/t", {**ADD, "shown": shown, **more})


async def approve(env: ControlEnvironment, who: str, read: Any, **more: Any) -> Any:
    """Approve the train as it was read."""
    body = {"reason": "fine", "rollouts": read["rollouts"], "wait_s": read["wait_s"]}
    return await env.request(who, "post", f"/v1/trains/{read['name']}/approve", body | more)


async def test_train_of_others_waits_for_their_approval(env: ControlEnvironment) -> None:
    train = await add(env, "olga")
    assert (train["approved"], train["state"], len(train["missing"])) == (False, "waiting", 1)
    assert env.state.index.train_of(train["rollouts"][0]) is None
    train = await approve(env, "paul", train)
    assert (train["approved"], train["state"], train["nodes_shared"]) == (True, "active", 4)
    assert (train["outages_saved"], train["outages_ahead"]) == (0, 4)
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
    with pytest.raises(ApiError, match="1 open rollout; give 2 to 10"):
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


async def test_longer_wait_asks_for_approval_again(env: ControlEnvironment) -> None:
    """Nodes of the others stay isolated for that long."""
    await add(env, "adam", wait_s=600.0)
    train = await add(env, "olga", wait_s=600_000.0)
    assert (train["wait_s"], train["missing"]) == (600_000.0, train["rollouts"][1:])
    assert (await add(env, "adam"))["missing"] == []


async def test_approval_of_another_train_than_was_read_refused(env: ControlEnvironment) -> None:
    """Paul read two rollouts; olga adds a third and lets nodes wait longer before he approves."""
    read = await add(env, "olga")
    third = await env.submit("olga", text=PLAN.replace("name: sysctl", "name: third"))
    grown = await add(env, "olga", rollouts=["third"], wait_s=7200.0)
    for more in ({}, {"rollout": read["rollouts"][1]}):
        with pytest.raises(ApiError) as refused:
            await approve(env, "paul", read, **more)
        assert refused.value.code == "other-train"
        assert str(refused.value) == f"train t: {third} was added, its wait is 2h, not 1h; read it again"
    with pytest.raises(
        ApiError, match=f"train t: its order is {', '.join(grown['rollouts'])}; read it again"
    ):
        await approve(env, "paul", grown, rollouts=grown["rollouts"][::-1])
    with pytest.raises(ApiError, match="train t: x-1 is not in it; read it again"):
        await approve(env, "paul", grown, rollouts=[*grown["rollouts"], "x-1"])
    assert (await approve(env, "paul", grown))["approved"]


async def test_adding_to_another_train_than_was_read_refused(env: ControlEnvironment) -> None:
    """Adam read two rollouts; olga adds a third before he adds a fourth, which would approve the third."""
    read = await add(env, "olga")
    third = await env.submit("olga", text=PLAN.replace("name: sysctl", "name: third"))
    await env.submit("olga", text=PLAN.replace("name: sysctl", "name: fourth"))
    grown = await add(env, "olga", rollouts=["third"])
    shown = {"rollouts": read["rollouts"], "wait_s": read["wait_s"]}
    with pytest.raises(ApiError, match=f"^train t: {third} was added; read it again$") as refused:
        await add(env, "adam", rollouts=["fourth"], shown=shown)
    assert refused.value.code == "other-train"
    with pytest.raises(ApiError, match=r"sysctl-.* was added, .*driver.* was added"):
        await add(env, "adam", rollouts=["fourth"], shown=None)
    assert await env.request("nora", "get", "/v1/trains/t") == grown
    assert len((await add(env, "adam", rollouts=["fourth"]))["rollouts"]) == 4


async def test_adding_to_train_that_is_gone_refused(env: ControlEnvironment) -> None:
    shown = {"rollouts": ["x-1", "x-2"], "wait_s": 3600.0}
    with pytest.raises(ApiError, match="t: no such train"):
        await add(env, "adam", shown=shown)


async def test_approval_that_names_no_rollouts_refused(env: ControlEnvironment) -> None:
    await add(env, "olga")
    with pytest.raises(ApiError, match="rollouts: Field required; wait_s: Field required"):
        await env.request("paul", "post", "/v1/trains/t/approve", {"reason": "fine"})


def plan_of(name: str, owner: str = "infra", *, joins: bool = True) -> str:
    """Return a plan that says whether its rollout joins a train."""
    spec = "spec:\n  train: true" if joins else "spec:"
    return PLAN.replace("name: sysctl, owner: infra", f"name: {name}, owner: {owner}").replace("spec:", spec)


async def test_plans_that_say_train_form_one(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as env:
        kernel = await env.submit("olga", text=plan_of("kernel"))
        assert not env.state.index.trains
        alone = await env.submit("olga", text=plan_of("alone", joins=False))
        driver = await env.submit("oscar", text=plan_of("driver"))
        (train,) = (await env.request("nora", "get", "/v1/trains"))["trains"]
        assert (train["rollouts"], train["approved"], train["state"]) == ([kernel, driver], True, "active")
        assert (train["nodes_shared"], train["outages_saved"], train["missing"]) == (4, 0, [])
        certs = await env.submit("paul", text=plan_of("certs", "payments"))
        grown = await env.request("nora", "get", f"/v1/trains/{train['name']}")
        assert grown["rollouts"] == [kernel, driver, certs]
        assert (grown["approved"], grown["missing"]) == (False, [kernel, driver])
        assert env.state.index.train_of(alone) is None
        approved = await approve(env, "olga", grown)
        assert (approved["approved"], approved["state"]) == (True, "active")


async def test_status_shows_train_of_rollout(env: ControlEnvironment) -> None:
    assert (await env.request("nora", "get", "/v1/rollouts/sysctl"))["train"] is None
    train = await add(env, "olga")
    shown = await env.request("nora", "get", f"/v1/rollouts/{train['rollouts'][1]}")
    driver = train["rollouts"][1]
    expected = {"name": "t", "rollouts": train["rollouts"], "state": "waiting", "outages_saved": 0}
    assert shown["train"] == {**expected, "missing": [driver]}
    assert describe_train(shown) == f"train t (waiting): 2 of 2; rolloutctl approve {driver} train"


async def test_vote_of_one_rollout_approves_it_alone(env: ControlEnvironment) -> None:
    read = await add(env, "olga")
    driver = read["rollouts"][1]
    with pytest.raises(ApiError, match=f"olga may not approve train t for {driver}; ask an owner"):
        await approve(env, "olga", read, rollout=driver)
    train = await approve(env, "paul", read, rollout="driver")
    assert (train["missing"], train["approved"]) == ([], True)
    with pytest.raises(ApiError, match="nosuch: no such rollout"):
        await approve(env, "paul", read, rollout="nosuch")


@pytest.mark.parametrize("name", ["a b", "-x", "a" * 101, "a\x1bb", "ä"])
async def test_name_of_train_with_other_characters_refused(env: ControlEnvironment, name: str) -> None:
    with pytest.raises(ApiError, match="not a name; use up to 100 letters"):
        await env.request("olga", "put", api_path("trains", name), ADD)
    assert not env.state.index.trains


async def test_plan_of_other_isolator_stays_alone(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as env:
        kernel = await env.submit("olga", text=plan_of("kernel"))
        other = plan_of("driver").replace('do: "true"', 'do: "false"')
        previewed = await preview(env, other)
        assert [(each["rollout"], each["joins"]) for each in previewed] == [(kernel, False)]
        assert "isolator command has other parameters" in previewed[0]["problem"]
        await env.submit("olga", text=other)
        assert not env.state.index.trains


async def test_superseding_plan_takes_place_in_train(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as env:
        kernel = await env.submit("olga", text=plan_of("kernel"))
        driver = await env.submit("olga", text=plan_of("driver"))
        newer = plan_of("kernel").replace("soak: 10m", "soak: 20m")
        again = await env.submit("olga", text=newer, supersede=True)
        (train,) = env.state.index.trains
        assert train.rollouts == (kernel, again, driver)
        assert train.is_approved


async def test_preview_offers_train_for_shared_nodes(env: ControlEnvironment) -> None:
    offered = await preview(env, plan_of("third", joins=False))
    found = [(each["rollout"].rpartition("-")[0], each["nodes_shared"], each["joins"]) for each in offered]
    assert found == [("sysctl", 4, False), ("driver", 4, False)]


async def test_ended_train_makes_room_for_another(
    env: ControlEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trains, "MAX_TRAINS", 1)
    await add(env, "adam")
    await env.submit("olga", text=PLAN.replace("name: sysctl", "name: third"))
    await env.submit("olga", text=PLAN.replace("name: sysctl", "name: fourth"))
    more = {"rollouts": ["third", "fourth"], "reason": "next week"}
    with pytest.raises(ApiError, match="the maximum of 1 is reached"):
        await env.request("adam", "put", "/v1/trains/next", more)
    for name in ("sysctl", "driver"):
        await env.request("adam", "post", f"/v1/rollouts/{name}/cancel", {"reason": "no"})
    assert (await env.request("nora", "get", "/v1/trains/t"))["state"] == "ended"
    await env.request("adam", "put", "/v1/trains/next", more)
    assert [each.name for each in env.state.index.trains] == ["next"]


async def preview(env: ControlEnvironment, text: str) -> Any:
    """Return what the preview of a plan says of trains."""
    body = {"file": "plan.yml", "text": text}
    return (await env.request("olga", "post", "/v1/plans/preview", body))["trains"]


async def test_removed_train_is_gone(env: ControlEnvironment) -> None:
    await add(env, "adam")
    await env.request("paul", "delete", "/v1/trains/t", {"reason": "no"})
    with pytest.raises(ApiError, match="t: no such train"):
        await env.request("nora", "get", "/v1/trains/t")
    assert (await env.request("nora", "get", "/v1/trains"))["trains"] == []
