"""A pass over what differs finds what a pass over all nodes finds, and judges no other node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines.model.node import Node, NodeKind
from machines.model.selector import parse_selector
from rolloutd.engine.background import inventory_comparison
from rolloutd.engine.background.inventory_comparison import FleetAnswers, FleetChange, compare_fleet
from rolloutd.engine.background.inventory_conflicts import id_key, reconcile
from rolloutd.engine.background.inventory_differences import ComparedInventory
from rolloutd.engine.background.inventory_identity import own_id, with_known_names
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.ports import JSON, DiscoveredNode
from tests.rolloutd.control_environment import control_environment
from tests.rolloutd.engine.background.test_inventory_trust import ALL, Source

KINDS = {"hosts": NodeKind.HOST, "ams": NodeKind.KUBERNETES, "ber": NodeKind.KUBERNETES}
SLOTS = 6
NAMES = ("n1", "n2", "n3", "n4", "web", "db", "all", "!n1")
ADDRESSES: tuple[JSON, ...] = ("10.0.0.1", "10.0.0.2", {"__ansible_unsafe": "10.0.0.1"}, "n1", "")
VALUES: dict[str, tuple[JSON, ...]] = {
    "ansible_host": ADDRESSES,
    "ansible_ssh_host": ADDRESSES,
    "ansible_port": (22, 2222),
    "provider_id": ("aws:///1", "aws:///2", {"__ansible_unsafe": "aws:///1"}),
    "machine_id": ("m1", "m2"),
    "host_key": ("k1", "k2"),
    "group_names": (["web"], ["db", "n2"]),
    "api_token": ("secret 1", "secret 2"),
}
LABELS = {"team": ("a", "b"), "rack": ("r1", "r2"), "status": ("offline",)}
RECORD = st.builds(
    DiscoveredNode,
    st.sampled_from(NAMES),
    st.just(""),
    labels=st.fixed_dictionaries({}, optional={key: st.sampled_from(each) for key, each in LABELS.items()}),
    connection=st.fixed_dictionaries(
        {}, optional={key: st.sampled_from(each) for key, each in VALUES.items()}
    ),
    id=st.sampled_from(("", "", "uid/1", "uid/2")),
)
EDIT = st.tuples(
    st.sampled_from(tuple(KINDS)),
    st.integers(0, SLOTS - 1),
    st.none() | st.sampled_from(("again", "invalid", "invalid")) | RECORD,
)
WRITES = ("all", "all", "none", "no removals", "no nodes", "unpin", "forget a source")
STEP = st.tuples(st.lists(EDIT, max_size=4), st.sampled_from(WRITES), st.booleans(), st.booleans())


class Fleet:
    """What is known of a fleet, and the answers that its sources give one after the other."""

    def __init__(self) -> None:
        self.slots: dict[str, dict[int, DiscoveredNode]] = {source: {} for source in KINDS}
        self.invalid: set[tuple[str, int]] = set()
        self.answers: dict[str, Sequence[DiscoveredNode] | None] = dict.fromkeys(KINDS)
        self.canonical_names: Mapping[tuple[str, str], str] = {}
        self.known: dict[str, Node] = {}
        self.connections: dict[str, Mapping[str, Any]] = {}
        self.now = 0.0

    def edit(self, source: str, slot: int, record: DiscoveredNode | str | None) -> None:
        slots = self.slots[source]
        if record == "invalid":
            self.invalid.add((source, slot))
            return
        self.invalid.discard((source, slot))
        if isinstance(record, DiscoveredNode):
            own = record.id or own_id(record)  # as a reader gives it
            slots[slot] = replace(record, source=source, kind=KINDS[source], id=own)
        elif record is None:
            slots.pop(slot, None)
        elif slot in slots:
            slots[slot] = replace(slots[slot])  # the source says the same in another object

    def answer(self, source: str, *, is_reversed: bool, is_accepted: bool) -> None:
        """Let a source answer; its nodes get the names that a pass over all of them gives."""
        slots = self.slots[source]
        reported = [record for slot, record in slots.items() if (source, slot) not in self.invalid]
        if is_reversed:
            reported.reverse()
        invalid = {
            record.name: "not valid" for slot, record in slots.items() if (source, slot) in self.invalid
        }
        answered = self.answers[source] or ()
        before = [*answered, *self.removed_in_flight(source)]
        accepted = {
            node.name: frozenset(node.conflicts.values())
            for node in answered
            if is_accepted and node.conflicts
        }
        nodes = with_known_names(reported, before, invalid, accepted)
        copies = [replace(each) for each in reported], [replace(each) for each in before]
        assert by_name(nodes) == by_name(with_known_names(*copies, invalid, accepted))
        self.answers[source] = nodes

    def removed_in_flight(self, source: str) -> Sequence[DiscoveredNode]:
        """Return what the fleet still has of a source alone that its answer has not."""
        names = {
            self.canonical_names.get((source, node.name), node.name) for node in self.answers[source] or ()
        }
        return [
            DiscoveredNode(
                *(node.name, source, node.kind, node.labels),
                self.connections.get(node.name, {}),
                node.identity.get(id_key(source), ""),
            )
            for node in self.known.values()
            if node.name not in names and node.sources == (source,)
        ]

    def compare(self, last: ComparedInventory) -> FleetChange:
        expectations = {"ams": {"hosts": parse_selector("rack=r1")}}
        return compare_fleet(
            FleetAnswers(
                dict(self.answers),
                expectations,
                dict(self.known),
                self.connections,
                ("team", "rack"),
                self.now,
                b"k" * 32,
            ),
            last,
        )

    def write(self, change: FleetChange, how: str) -> ComparedInventory:
        """Write a change, or a part of it; return what the next comparison continues from."""
        if how == "none":
            return change.compared
        if how != "no nodes":
            self.known |= {node.name: node for node in change.changed}
            self.connections |= change.connections
        if how != "no removals":
            for name in change.removed:
                self.known.pop(name, None)
                self.connections.pop(name, None)
        if how == "unpin":
            self.known = {name: replace(node, identity={}) for name, node in self.known.items()}
        if how == "forget a source":
            self.answers["ber"] = None
        return (
            change.compared
            if how == "no nodes"
            else change.compared.after_write(change.changed, change.final)
        )


def by_name(nodes: Sequence[DiscoveredNode]) -> dict[str, DiscoveredNode]:
    assert len({node.name for node in nodes}) == len(nodes)
    return {node.name: node for node in nodes}


def found(change: FleetChange) -> dict[str, Any]:
    compared = change.compared
    return {
        "changed": change.changed,
        "stored": change.stored,
        "removed": change.removed,
        "connections": change.connections,
        "rejected": change.rejected,
        "canonical": change.canonical_names,
        "reports": compared.reports,
        "own names": compared.canonical_names,
        "reported names": compared.reported_names,
        "refused": compared.refused,
        "groups": compared.foreign_groups,
        "unsettled": compared.unsettled,
        "final": change.final,
        "keys": {
            key: {names} if isinstance(names, str) else set(names)
            for key, names in compared.names_by_key.items()
        },
    }


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=8))
def test_difference_gives_what_whole_pass_gives(steps: list[Any]) -> None:
    fleet, last = Fleet(), ComparedInventory()
    for edits, how, is_reversed, is_accepted in steps:
        fleet.now += 1.0
        for edit in edits:
            fleet.edit(*edit)
        for source in {edit[0] for edit in edits}:
            fleet.answer(source, is_reversed=is_reversed, is_accepted=is_accepted)
        change = fleet.compare(last)
        assert found(change) == found(fleet.compare(ComparedInventory()))
        fleet.canonical_names = change.canonical_names
        last = fleet.write(change, how)


async def test_only_nodes_that_differ_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def counted(nodes: Mapping[str, Node], *rest: Any) -> Any:
        judged.extend(nodes)
        return reconcile(nodes, *rest)

    monkeypatch.setattr(inventory_comparison, "reconcile", counted)
    async with control_environment(tmp_path) as inside:
        hosts, netbox = Source("hosts", dict(ALL)), Source("netbox", dict(ALL))
        refresher = InventoryRefresher(inside.state, [hosts, netbox])

        async def judged_now() -> list[str]:
            judged.clear()
            await refresher.refresh()
            return sorted(judged)

        assert await judged_now() == sorted(ALL)
        assert await judged_now() == []
        # A contradiction stays, and is judged once.
        netbox.nodes = ALL | {"p1": {"team": "search", "rack": "r1"}}
        assert await judged_now() == ["p1"]
        assert inside.state.index.is_quarantined("p1")
        assert await judged_now() == []
        # The node with which it shares its address is judged again.
        netbox.variables = {"p2": {"ansible_host": "s1"}}
        assert await judged_now() == ["p2", "s1"]
        assert inside.state.index.is_quarantined("s1")
        netbox.variables = {}
        assert await judged_now() == ["p2", "s1"]
        assert not inside.state.index.is_quarantined("s1")
