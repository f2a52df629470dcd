"""Values that differ for each target: resolved at submit, voted for, and waited with when they change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from machines.model.plan import GateName, Plan
from machines.states import Trigger
from rolloutd.configuration.target_values import OBJECT_KEY, changed_values, read_field
from rolloutd.control.client import ApiError
from rolloutd.control.plans import review
from rolloutd.engine.background import inventory_refresh
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.runners import RoutedRunners
from rolloutd.ports import DiscoveredNode, Host
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import SOURCE
from tests.machines.builders import fail, reason_of, transition, vote
from tests.rolloutd.control_environment import NODES, PLAN, ControlEnvironment, control_environment
from tests.support.note_change import NoteRunner, Notes, note_installed

VALUES = "{TEAM: {label: team}, HOST: {field: /spec/controlPlaneEndpoint/host}, SIZE: '3'}"


def plan_with(values: str = VALUES) -> str:
    change = f"{{note: {{text: a, values: {values}}}}}"
    return PLAN.replace("{playbook: site.yml}\n  rollback: {playbook: undo.yml}", change)


def give_hosts(inside: ControlEnvironment, **hosts: Any) -> None:
    for node in inside.state.index.nodes:
        host = hosts.get(node, f"{node}.example")
        spec = {} if host is None else {"controlPlaneEndpoint": {"host": host, "port": 6443}}
        inside.state.connections[node] = {OBJECT_KEY: {"spec": spec}}


@pytest.fixture
async def inside(tmp_path: Path) -> AsyncIterator[ControlEnvironment]:
    with note_installed():
        async with control_environment(tmp_path) as made:
            give_hosts(made)
            yield made


async def preview(inside: ControlEnvironment, text: str) -> Any:
    return await inside.request("olga", "post", "/v1/plans/preview", {"file": "p.yaml", "text": text})


async def test_values_of_each_target_are_shown_and_hashed(inside: ControlEnvironment) -> None:
    shown = await preview(inside, plan_with())
    values = {(each["node"], each["name"]): each["value"] for each in shown["values"]}
    assert values["p1", "HOST"] == "p1.example"
    assert values["s2", "TEAM"] == "search"
    assert len(values) == 12
    give_hosts(inside, p1="p1.moved")
    again = await preview(inside, plan_with())
    assert again["digest"] != shown["digest"]
    assert again["hashes"]["scope"] == shown["hashes"]["scope"]


async def test_voters_see_the_values_of_each_target(inside: ControlEnvironment) -> None:
    rollout = await inside.submit(text=plan_with())
    plan = (await inside.request("paul", "get", f"/v1/rollouts/{rollout}/review"))["plan"]
    values = [(each["path"], each["value"]) for each in plan if each["path"].startswith("values.")]
    assert sorted(values) == [
        *(("values.configure.HOST", f"{node}.example ({node})") for node in ("p1", "p2", "s1", "s2")),
        ("values.configure.SIZE", "3 (all targets)"),
        ("values.configure.TEAM", "payments (p1, p2)"),
        ("values.configure.TEAM", "search (s1, s2)"),
    ]


async def test_values_beyond_the_limit_are_named_as_unseen(
    inside: ControlEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review, "MAX_REVIEW_CHARS", 100)
    rollout = await inside.submit(text=plan_with())
    shown = await inside.request("paul", "get", f"/v1/rollouts/{rollout}/review")
    assert "values: more than 100 characters" in shown["unseen"]
    with pytest.raises(ApiError, match="values: more than 100 characters"):
        await inside.vote("olga", rollout, "start")


async def test_missing_value_names_its_targets(inside: ControlEnvironment) -> None:
    give_hosts(inside, p1=None, s2=None)
    with pytest.raises(ApiError) as refused:
        await inside.submit(text=plan_with())
    assert "p1: value HOST is missing (field /spec/controlPlaneEndpoint/host)" in str(refused.value)
    assert "s2: value HOST" in str(refused.value)
    assert "2 targets of 4 without a value" in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{A: 1.10}", "a value is a text; put it in quotes"),
        ("{A: true}", "a value is a text; put it in quotes"),
        ("{A: {label: team, field: /a}}", "this is no expression of a value"),
        ("{A: {field: spec/a}}", "a field is a path"),
        ("{a-b: x}", "the name of a value is"),
        ("{A: {secret: s, key: k}}", "its values cannot name secrets"),
    ],
)
async def test_wrong_expression_is_refused(inside: ControlEnvironment, values: str, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        await preview(inside, plan_with(values))


class SecretRunner(NoteRunner):
    """A runner whose notes may name secrets."""

    async def digest_secret(self, host: Host, name: str, key: str) -> str:
        return f"{host.name}/{name}/{key}"


async def test_secret_is_voted_for_by_keyed_digest(inside: ControlEnvironment) -> None:
    local = FakeRunner(inside.run_host)
    RoutedRunners(inside.state, {"local": local}, {"note": SecretRunner(Notes())})
    text = plan_with("{TOKEN: {secret: api, key: token}}")
    first = await preview(inside, text)
    shown = {each["node"]: each["value"] for each in first["values"]}
    assert shown["p1"].startswith("secret api, key token, digest ")
    assert shown["p1"] != shown["p2"]
    inside.state.redaction_key = b"another key of this daemon, 32 b"
    assert (await preview(inside, text))["digest"] != first["digest"], (
        "no digest that people could guess from"
    )


class Answers:
    """An inventory that reports the nodes as a test has given them."""

    source = "hosts"

    def __init__(self, inside: ControlEnvironment) -> None:
        self._inside = inside

    async def refresh(self) -> Sequence[DiscoveredNode]:
        connections = self._inside.state.connections
        return [
            DiscoveredNode(each.name, "hosts", each.kind, each.labels, dict(connections[each.name]))
            for each in NODES
        ]


async def test_changed_value_waits_until_submitted_again(inside: ControlEnvironment) -> None:
    rollout = await inside.start(text=plan_with())
    inside.observe_all_up()
    refresh = InventoryRefresher(inside.state, [Answers(inside)])
    index, now = inside.state.index, inside.clock.now()
    give_hosts(inside, p1="p1.moved", s1=None)
    await refresh.refresh()
    reason = reason_of(index, rollout, "p1", now)
    assert (reason.code, reason.params["before"], reason.params["now"]) == (
        "values-changed",
        "p1.example",
        "p1.moved",
    )
    assert reason_of(index, rollout, "s1", now).params["now"] == ""
    give_hosts(inside)
    await refresh.refresh()
    assert reason_of(index, rollout, "p1", now).code == "starting"
    give_hosts(inside, p1="p1.moved")
    again = await inside.submit(text=plan_with(), supersede=True)
    assert again != rollout
    await refresh.refresh()
    assert reason_of(index, again, "p1", now).code == "gate-start"


async def test_only_values_of_changed_nodes_are_compared(
    inside: ControlEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []

    def counted(plan: Plan, node: str, *rest: Any) -> Any:
        compared.append(node)
        return changed_values(plan, node, *rest)

    monkeypatch.setattr(inventory_refresh, "changed_values", counted)
    rollout = await inside.start(text=plan_with())
    refresh = InventoryRefresher(inside.state, [Answers(inside)])
    await refresh.refresh()
    assert sorted(compared) == [node.name for node in NODES]  # a rollout that it has not seen before
    compared.clear()
    host = {"host": "p1.moved", "port": 6443}
    inside.state.connections["p1"] = {OBJECT_KEY: {"spec": {"controlPlaneEndpoint": host}}}
    await refresh.refresh()
    await refresh.refresh()
    assert compared == ["p1"]
    assert inside.state.index.changed_values == {(rollout, "p1"): (("HOST", "p1.example", "p1.moved"),)}


async def test_changed_value_of_failed_target_blocks_its_retry(inside: ControlEnvironment) -> None:
    rollout = await inside.start(text=plan_with())
    inside.observe_all_up()
    index = inside.state.index
    failure = fail(index, "p1", rollout=rollout, at=inside.clock.now())
    give_hosts(inside, p1="p1.moved")
    await InventoryRefresher(inside.state, [Answers(inside)]).refresh()
    vote(index, GateName.PROCEED, rollout=rollout, shown=(failure,), at=inside.clock.now())
    transition(index, "p1", Trigger.RETRIED, rollout=rollout, at=inside.clock.now())
    assert reason_of(index, rollout, "p1", inside.clock.now()).code == "values-changed"


async def test_voted_values_reach_the_run(inside: ControlEnvironment) -> None:
    rollout = await inside.start(text=plan_with())
    plan, notes = inside.state.index.rollout(rollout).plan, Notes()
    give_hosts(inside, p1="p1.moved")
    both = RoutedRunners(inside.state, {"local": FakeRunner(inside.run_host)}, {"note": NoteRunner(notes)})
    await CheckMode(inside.state, both).check("p1", SOURCE, plan)
    assert notes.applied[0].params["values"] == {"TEAM": "payments", "HOST": "p1.example", "SIZE": "3"}
    assert changed_values(plan, "p1", {"team": "payments"}, inside.state.connections["p1"]) == (
        ("HOST", "p1.example", "p1.moved"),
    )


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        ("/a/b", "x"),
        ("/a/c~1d", "true"),
        ("/n/1", "2"),
        ("/a", None),
        ("/n/9", None),
        ("/a/b/c", None),
        ("/z", None),
    ],
)
def test_field_is_read_by_its_pointer(pointer: str, found: str | None) -> None:
    assert read_field({"a": {"b": "x", "c/d": True}, "n": [1, 2], "z": None}, pointer) == found
