"""Renames, duplicate names, replaced objects and invalid records of nodes that are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from machines.model.node import ConflictKind
from machines.states import Outcome, Phase
from rolloutd.engine.background.inventory_identity import renames, with_known_names
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.errors import Refused
from rolloutd.ports import MACHINE_ID, PROVIDER_ID, DiscoveredNode
from rolloutd.texts.reason_text import describe_conflict
from tests.rolloutd.control_environment import control_environment
from tests.rolloutd.engine.background.test_inventory_trust import (
    ADAM,
    ALL,
    admitted,
    forget_as_a_restart_does,
    reason,
)

Objects = Mapping[str, str]
"""Names by id."""


def nodes_of(objects: Objects) -> list[DiscoveredNode]:
    return [
        DiscoveredNode(name, "netbox", connection={"ansible_host": f"host-{number}"}, id=f"devices/{number}")
        for number, name in objects.items()
    ]


def shown(nodes: Sequence[DiscoveredNode]) -> dict[str, tuple[str, dict[str, str]]]:
    return {node.name: (node.id.removeprefix("devices/"), dict(node.conflicts)) for node in nodes}


CASES: dict[str, tuple[list[Objects], dict[str, tuple[str, dict[str, str]]]]] = {
    "the same": ([{"1": "a", "2": "b"}] * 2, {"a": ("1", {}), "b": ("2", {})}),
    "a rename": ([{"1": "a"}, {"1": "x"}], {"a": ("1", {"renamed": "x"})}),
    "a rename that lasts": ([{"1": "a"}, {"1": "x"}, {"1": "x"}], {"a": ("1", {"renamed": "x"})}),
    "a rename and back": ([{"1": "a"}, {"1": "x"}, {"1": "a"}], {"a": ("1", {})}),
    "two names exchanged": (
        [{"1": "a", "2": "b"}, {"1": "b", "2": "a"}],
        {"a": ("1", {"renamed": "b"}), "b": ("2", {"renamed": "a"})},
    ),
    "a new object of a known name": (
        [{"1": "a"}, {"1": "a", "2": "a"}],
        {"a": ("1", {"name-shared": "devices/1, devices/2"})},
    ),
    "a known object renamed to a known name": (
        [{"1": "a", "2": "b"}, {"1": "a", "2": "a"}],
        {
            "a": ("1", {"name-shared": "devices/1, devices/2"}),
            "b": ("2", {"renamed": "a", "name-shared": "devices/1, devices/2"}),
        },
    ),
    "a new object with the new name of another": (
        [{"1": "a"}, {"1": "x", "2": "x"}],
        {"a": ("1", {"renamed": "x", "name-shared": "devices/1, devices/2"})},
    ),
    "two new objects of one name": (
        [{"1": "a", "2": "a"}],
        {"a": ("", {"name-shared": "devices/1, devices/2"})},
    ),
    "one of two objects renamed away": (
        [{"1": "a", "2": "a"}, {"1": "x", "2": "a"}],
        {"x": ("1", {}), "a": ("2", {})},
    ),
    "another object of the name": ([{"1": "a"}, {"2": "a"}], {"a": ("1", {"identity-changed": "devices/2"})}),
    "a new object for a renamed one": (
        [{"1": "a"}, {"1": "x", "2": "a"}],
        {"a": ("1", {"renamed": "x", "name-shared": "devices/2"})},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_node_keeps_name_by_its_id(case: str) -> None:
    answers, expected = CASES[case]
    nodes: list[DiscoveredNode] = []
    for objects in answers:
        nodes = with_known_names(nodes_of(objects), nodes, {})
    assert shown(nodes) == expected


def test_repeated_answer_keeps_its_objects() -> None:
    answer = [*nodes_of({"1": "a"}), DiscoveredNode("b", "netbox"), DiscoveredNode("c", "netbox")]
    first = with_known_names(answer, [], {})
    assert all(any(node is each for each in answer) for node in with_known_names(answer, first, {}))


def test_accepted_rename_takes_new_name() -> None:
    before = with_known_names(nodes_of({"1": "a"}), [], {})
    doubted = with_known_names(nodes_of({"1": "x"}), before, {})
    after = with_known_names(nodes_of({"1": "x"}), doubted, {}, {"a": ["x"]})
    assert (shown(after), renames(doubted, after)) == ({"x": ("1", {})}, {"a": "x"})


def test_other_rename_than_accepted_is_doubted() -> None:
    before = with_known_names(nodes_of({"1": "a"}), [], {})
    assert shown(with_known_names(nodes_of({"1": "y"}), before, {}, {"a": ["x"]})) == {
        "a": ("1", {"renamed": "y"})
    }


def test_exchanged_names_need_both_accepted() -> None:
    before = with_known_names(nodes_of({"1": "a", "2": "b"}), [], {})
    exchanged = nodes_of({"1": "b", "2": "a"})
    one = with_known_names(exchanged, before, {}, {"a": ["b"]})
    assert shown(one) == {"a": ("1", {"renamed": "b"}), "b": ("2", {"renamed": "a"})}
    both = with_known_names(exchanged, one, {}, {"a": ["b"], "b": ["a"]})
    assert shown(both) == {"b": ("1", {}), "a": ("2", {})}


def test_replaced_object_leaves_connection_of_first() -> None:
    before = with_known_names(nodes_of({"1": "a"}), [], {})
    (node,) = with_known_names(nodes_of({"2": "a"}), before, {})
    assert node.connection["ansible_host"] == "host-1"


def test_invalid_record_leaves_last_valid_one() -> None:
    before = with_known_names(nodes_of({"1": "a", "2": "b"}), [], {})
    after = with_known_names(nodes_of({"2": "b"}), before, {"a": "its address is none", "z": "no label"})
    assert shown(after) == {"a": ("1", {"invalid": "its address is none"}), "b": ("2", {})}


@pytest.mark.parametrize("key", [PROVIDER_ID, MACHINE_ID])
def test_source_without_ids_knows_machines(key: str) -> None:
    def node(name: str, value: str) -> DiscoveredNode:
        return DiscoveredNode(name, "kubernetes/ams", connection={key: value})

    before = with_known_names([node("a", "m1")], [], {})
    (renamed,) = with_known_names([node("x", "m1")], before, {})
    assert (renamed.name, renamed.conflicts) == ("a", {"renamed": "x"})
    # An id that clones share is the id of none of them.
    clones = with_known_names([node("a", "m1"), node("b", "m1")], before, {})
    assert [(each.name, each.conflicts) for each in clones] == [("a", {}), ("b", {})]


def test_former_clone_is_no_replaced_object() -> None:
    def node(name: str, value: str) -> DiscoveredNode:
        return DiscoveredNode(name, "hosts", connection={MACHINE_ID: value}, id=f"{MACHINE_ID}/{value}")

    first = node("d", "m2")
    clones = with_known_names([first, node("e", "m2")], [], {})
    alone = with_known_names([first], clones, {"e": "its address is none"})
    both = with_known_names([first, node("e", "m3")], alone, {})
    assert [(each.name, each.id, each.conflicts) for each in both] == [
        ("d", f"{MACHINE_ID}/m2", {}),
        ("e", f"{MACHINE_ID}/m3", {}),
    ]


def test_provider_id_that_comes_later_is_no_replacement() -> None:
    machine = {MACHINE_ID: "m1"}
    before = with_known_names([DiscoveredNode("a", "k", connection=machine)], [], {})
    later = DiscoveredNode("a", "k", connection=machine | {PROVIDER_ID: "aws:///i-1"})
    assert with_known_names([later], before, {})[0].conflicts == {}


# -- what becomes of the nodes -------------------------------------------------------


@dataclass
class ObjectSource:
    """A source with ids: `names` by id, each with the labels of the node of that number."""

    names: dict[str, str]
    source: str = "netbox"
    addresses: dict[str, str] = field(default_factory=dict)

    async def refresh(self) -> Sequence[DiscoveredNode]:
        return list(self._nodes())

    def _nodes(self) -> Iterator[DiscoveredNode]:
        for number, name in self.names.items():
            address = self.addresses.get(number, f"10.0.0.{number}")
            labels = list(ALL.values())[(int(number) - 1) % len(ALL)]
            yield DiscoveredNode(
                name, self.source, labels=labels, connection={"ansible_host": address}, id=f"devices/{number}"
            )


FLEET = {str(number): name for number, name in enumerate(ALL, 1)}
P1 = next(number for number, name in FLEET.items() if name == "p1")


@pytest.mark.parametrize("change", ["rename", "duplicate", "invalid"])
async def test_node_in_flight_stays_and_is_quarantined(tmp_path: Path, change: str) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        match change:
            case "rename":
                netbox.names[P1] = "p1-new"
            case "duplicate":
                netbox.names["9"] = "p1"
            case "invalid":
                netbox.addresses[P1] = "no address"
        await refresher.refresh()
        kind = {"rename": "renamed", "duplicate": "name-shared", "invalid": "invalid"}[change]
        for _ in range(2):
            assert inside.phase(rollout, "p1") is Phase.MAINTAINING
            assert set(inside.state.index.nodes) == set(ALL)
            assert inside.state.host("p1").address == f"10.0.0.{P1}"
            assert "p2" not in admitted(inside), "its slot is taken"
            (conflict,) = inside.state.index.nodes["p1"].conflicts
            assert conflict.kind == kind
            assert "netbox: " in describe_conflict(conflict.kind, conflict.about, conflict.values)
            # The next daemon knows it before the source answers.
            forget_as_a_restart_does(inside.state)
            refresher = InventoryRefresher(inside.state, [netbox])
            await refresher._restore()
            await refresher._commit_results()
        netbox.names, netbox.addresses = dict(FLEET), {}
        await refresher.refresh()
        assert not inside.state.index.nodes["p1"].conflicts


async def test_pending_node_with_invalid_record_does_not_leave(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        rollout = await inside.start()
        netbox.addresses[P1] = "no address"
        await refresher.refresh()
        assert inside.phase(rollout, "p1") is Phase.PENDING
        assert reason(inside, rollout, "p1").code == "quarantined"
        assert "p1: ansible_host" in inside.state.sources["netbox"].error


@pytest.mark.parametrize("is_done", [False, True])
async def test_renamed_node_keeps_its_place(tmp_path: Path, is_done: bool) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        rollout = await inside.start()
        if is_done:
            await inside.finish(rollout, "p1")
        before = inside.state.index.target(rollout, "p1")
        netbox.names[P1] = "z1"
        await refresher.refresh()
        await refresher.pin_identity("p1", ADAM, "renamed")
        assert set(inside.state.index.nodes) == {"z1", *ALL} - {"p1"}
        target = inside.state.index.target(rollout, "z1")
        assert (target.wave, target.position, target.team) == (before.wave, before.position, before.team)
        assert not target.joined
        assert target.outcome is (Outcome.ALREADY_CURRENT if is_done else None)
        old = inside.state.index.target(rollout, "p1")
        assert old.outcome is (Outcome.CHANGED if is_done else Outcome.LEFT)
        assert not inside.state.index.nodes["z1"].conflicts


async def test_rename_of_busy_node_is_not_accepted(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        netbox.names[P1] = "z1"
        await refresher.refresh()
        with pytest.raises(Refused, match="accept its new name when"):
            await refresher.pin_identity("p1", ADAM, "renamed")
        assert inside.state.index.nodes["p1"].conflicts[0].kind is ConflictKind.RENAMED


async def test_replaced_object_counts_once_accepted(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        del netbox.names[P1]
        netbox.names["5"] = "p1"  # a number with the labels of p1
        await refresher.refresh()
        (conflict,) = inside.state.index.nodes["p1"].conflicts
        assert (conflict.kind, conflict.about) == (ConflictKind.IDENTITY_CHANGED, "id")
        assert inside.state.host("p1").address == f"10.0.0.{P1}"
        await refresher.pin_identity("p1", ADAM, "a new server")
        assert inside.state.host("p1").address == "10.0.0.5"
        assert not inside.state.index.nodes["p1"].conflicts


async def test_rename_is_recognized_without_stored_answer(tmp_path: Path) -> None:
    """As after a crash between the commit of the nodes and the write of the answer."""
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        await InventoryRefresher(inside.state, [netbox]).refresh()
        (answer,) = await inside.state.store.load_source_answers()
        names = [node.name for node in answer.nodes]
        await inside.state.store.save_source_answer(replace(answer, nodes=()), names)
        forget_as_a_restart_does(inside.state)
        netbox.names[P1] = "z1"
        refresher = InventoryRefresher(inside.state, [netbox])
        refresher._is_restored = True
        await refresher.refresh()
        assert inside.state.index.nodes["p1"].conflicts[0].kind is ConflictKind.RENAMED


async def test_node_removed_in_flight_is_recognized_by_its_new_name(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        del netbox.names[P1]
        await refresher.refresh()
        assert inside.state.index.nodes["p1"].conflicts[0].kind is ConflictKind.REMOVED_IN_FLIGHT
        netbox.names[P1] = "z1"
        await refresher.refresh()
        assert set(inside.state.index.nodes) == set(ALL)
        assert [each.kind for each in inside.state.index.nodes["p1"].conflicts] == [ConflictKind.RENAMED]
