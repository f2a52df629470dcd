"""Distrust of the inventory: stale sources, held answers, contradictions, and the way back from each."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from machines.model.decision import Admit, Decision, EndRollout, OpenGate, SkipQuarantined
from machines.model.events import GateOpened, NodesDiscovered
from machines.model.limits import Budget
from machines.model.node import ConflictKind, Node, NodeKind
from machines.model.reasons import Reason
from machines.model.rollout import Actor, ActorKind
from machines.model.selector import parse_selector
from machines.model.trust_events import InventoryAccepted
from machines.scheduler.decide import QUARANTINE_SKIP_S, decide
from machines.states import Outcome, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.control.client import ApiError
from rolloutd.engine.background.inventory_conflicts import SourceReports, reconcile
from rolloutd.engine.background.inventory_merge import merge_inventories
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.state import State
from rolloutd.errors import SourceFailed
from rolloutd.ports import DiscoveredNode, SourceRules, without_templates
from tests.contracts.fakes.clock import FakeTimers
from tests.machines.builders import reason_of
from tests.rolloutd.control_environment import NODES, ControlEnvironment, control_environment
from tests.rolloutd.slow_store import adapters_of, loop_iterations

ALL = {node.name: dict(node.labels) for node in NODES}

HOUR_S = 3600.0

ADAM = Actor(ActorKind.PERSON, "adam", 1006)


@dataclass
class Source:
    """An inventory that reports what the test put there; None makes it fail."""

    source: str
    nodes: dict[str, dict[str, str]] | None
    variables: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: list[dict[str, dict[str, str]]] = field(default_factory=list)
    """Answers that come first, each once."""
    calls: int = 0
    ids: dict[str, str] = field(default_factory=dict)

    async def refresh(self) -> Sequence[DiscoveredNode]:
        self.calls += 1
        nodes = self.answers.pop(0) if self.answers else self.nodes
        if nodes is None:
            raise SourceFailed(f"{self.source} is silent")
        return [
            DiscoveredNode(
                *(name, self.source),
                labels=labels,
                connection=self.variables.get(name, {}),
                id=self.ids.get(name, ""),
            )
            for name, labels in nodes.items()
        ]


async def test_repeated_node_is_not_validated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of 100,000 is read every few minutes, and few of its nodes have changed."""
    asked: list[str] = []
    is_ip_address = ipaddress.ip_address

    def counted(text: str) -> Any:
        asked.append(text)
        return is_ip_address(text)

    monkeypatch.setattr(ipaddress, "ip_address", counted)
    variables = {name: {"ansible_host": f"10.0.0.{number}"} for number, name in enumerate(ALL)}
    async with control_environment(tmp_path) as inside:
        source = Source("cloud", ALL, variables)
        refresher = InventoryRefresher(inside.state, [source])
        await refresher.refresh()
        assert asked == [each["ansible_host"] for each in variables.values()]
        asked.clear()
        await refresher.refresh()
        assert asked == []
        first = next(iter(ALL))
        source.variables = variables | {first: {"ansible_host": "10.0.1.1"}}
        await refresher.refresh()
        assert asked == ["10.0.1.1"]
        source.variables = variables | {first: {"ansible_host": "-oProxyCommand=x"}}
        await refresher.refresh()
        assert inside.state.sources["cloud"].error or first not in inside.state.index.nodes


def admitted(inside: ControlEnvironment) -> list[str]:
    """Return the nodes that start now, all of them seen up."""
    return [each.node for each in decision(inside).of(Admit)]


def decision(inside: ControlEnvironment) -> Decision:
    inside.observe_all_up()
    return decide(inside.state.index, inside.clock.now())


def reason(inside: ControlEnvironment, rollout: str, node: str) -> Reason:
    inside.observe_all_up()
    return reason_of(inside.state.index, rollout, node, inside.clock.now())


def forget_as_a_restart_does(state: State) -> None:
    state.sources.clear()
    state.reports = {}


# -- contradictions ----------------------------------------------------------------


async def test_node_with_two_owners_never_starts_until_sources_agree(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts, netbox = Source("hosts", dict(ALL)), Source("netbox", dict(ALL))
        netbox.nodes = ALL | {"p1": {"team": "search", "rack": "r1"}}
        refresher = InventoryRefresher(inside.state, [hosts, netbox])
        await refresher.refresh()
        rollout = await inside.start()
        assert admitted(inside) == ["s1"]
        why = reason(inside, rollout, "p1")
        assert (why.code, why.since) == ("quarantined", inside.clock.now())
        assert why.params["conflicts"] == (
            {"kind": "owners-differ", "about": "team", "values": {"hosts": "payments", "netbox": "search"}},
        )
        shown = await inside.request("olga", "get", "/v1/inventory/p1")
        assert [each["source"] for each in shown["reports"]] == ["hosts", "netbox"]
        assert [each["labels"]["team"] for each in shown["reports"]] == ["payments", "search"]
        assert shown["node"]["quarantined"]
        assert shown["reports"][0]["at"]
        # It lasts while one of them is silent, also in the next daemon.
        netbox.nodes = None
        forget_as_a_restart_does(inside.state)
        inside.clock.advance(60)
        refresher = InventoryRefresher(inside.state, [hosts, netbox])
        await refresher.refresh()
        assert reason(inside, rollout, "p1").since == why.since
        netbox.nodes = dict(ALL)
        await refresher.refresh("netbox")
        assert admitted(inside) == ["p1"]


HOST_A = {"ansible_host": "10.0.0.1"}

CONFLICTS: dict[
    str, tuple[dict[str, list[tuple[str, dict[str, str], dict[str, Any]]]], ConflictKind | None]
] = {
    "the rack differs": (
        {"n1": [("a", {"rack": "r1"}, {}), ("b", {"rack": "r2"}, {})]},
        ConflictKind.POOLS_DIFFER,
    ),
    "one source has no rack": ({"n1": [("a", {"rack": "r1"}, {}), ("b", {}, {})]}, None),
    "a label that makes no pool differs": ({"n1": [("a", {"os": "x"}, {}), ("b", {"os": "y"}, {})]}, None),
    "the machine id is another": ({"old": [("a", {}, {"machine_id": "new"})]}, ConflictKind.IDENTITY_CHANGED),
    "the cluster is another": ({"old": [("a", {}, {"cluster_id": "new"})]}, ConflictKind.IDENTITY_CHANGED),
    "the host key is another": ({"old": [("a", {}, {"host_key": "new"})]}, ConflictKind.IDENTITY_CHANGED),
    "two sources see two machines": (
        {"n1": [("a", {}, {"machine_id": "m1"}), ("b", {}, {"machine_id": "m2"})]},
        ConflictKind.IDENTITY_CHANGED,
    ),
    "the address has two names": (
        {"n1": [("a", {}, HOST_A)], "n2": [("b", {}, HOST_A)]},
        ConflictKind.ADDRESS_SHARED,
    ),
    "the address is another node's name": (
        {"n1": [("a", {}, {"ansible_host": "n2"})], "n2": [("a", {}, {})]},
        ConflictKind.ADDRESS_SHARED,
    ),
    "the ports differ": (
        {"n1": [("a", {}, HOST_A)], "n2": [("a", {}, HOST_A | {"ansible_port": 2222})]},
        None,
    ),
    "no port and port 22 are one": (
        {"n1": [("a", {}, HOST_A)], "n2": [("a", {}, HOST_A | {"ansible_port": 22})]},
        ConflictKind.ADDRESS_SHARED,
    ),
    "the jump hosts differ": (
        {
            "n1": [("a", {}, HOST_A | {"ansible_ssh_common_args": "-J ams"})],
            "n2": [("a", {}, HOST_A | {"ansible_ssh_common_args": "-J ber"})],
        },
        None,
    ),
    "both run on this machine": (
        {name: [("a", {}, HOST_A | {"ansible_connection": "local"})] for name in ("n1", "n2")},
        None,
    ),
    "the machine is planned": ({"n1": [("a", {"status": "Planned"}, {})]}, ConflictKind.OUT_OF_SERVICE),
    "a variable says offline": ({"n1": [("a", {}, {"status": "offline"})]}, ConflictKind.OUT_OF_SERVICE),
    "the machine is active": ({"n1": [("a", {"status": "active"}, {})]}, None),
    "clones share a machine id": (
        {name: [("a", {}, {"machine_id": "m1"})] for name in ("n1", "n2")},
        ConflictKind.MACHINE_ID_SHARED,
    ),
    "two nodes share a provider_id, a number": (
        {name: [("a", {}, {"provider_id": 4711})] for name in ("n1", "n2")},
        ConflictKind.PROVIDER_ID_SHARED,
    ),
    "two nodes share the template of an id": (
        {name: [("a", {}, {"provider_id": "{{ id }}"})] for name in ("n1", "n2")},
        None,
    ),
    "an expected source lacks it": ({"n1": [("ams", {"role": "worker"}, {})]}, ConflictKind.NOT_REPORTED),
    "no node of the expectation": ({"n1": [("ams", {"role": "spare"}, {})]}, None),
    "the expected source has it": ({"n1": [("ams", {"role": "worker"}, {}), ("netbox", {}, {})]}, None),
    "the expected source never answered": ({"n1": [("ber", {"role": "worker"}, {})]}, None),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_contradiction_quarantines_its_nodes(case: str) -> None:
    records, expected = CONFLICTS[case]
    by_node = {
        name: [
            DiscoveredNode(name, source, labels=labels, connection=variables)
            for source, labels, variables in each
        ]
        for name, each in records.items()
    }
    nodes = {
        name: Node(name, sources=tuple(each.source for each in found), labels=found[0].labels)
        for name, found in by_node.items()
    }
    known = {"old": Node("old", identity=dict.fromkeys(("machine_id", "cluster_id", "host_key"), "old"))}
    worker = parse_selector("role=worker")
    expectations = {"ams": {"netbox": worker}, "ber": {"silent": worker}}
    reports = SourceReports(by_node, frozenset({"a", "b", "ams", "ber", "netbox"}), expectations)
    found = reconcile(nodes, known, reports, ("team", "rack"), 5.0)
    kinds = [[each.kind for each in conflicts] for _, conflicts in found.values()]
    assert kinds == [[] if expected is None else [expected]] * len(nodes)
    quarantined = [Node(name, conflicts=conflicts).quarantined for name, (_, conflicts) in found.items()]
    assert quarantined == [expected not in (None, ConflictKind.MACHINE_ID_SHARED)] * len(nodes)


def test_provider_id_that_one_source_has_twice_merges_no_nodes() -> None:
    """The addresses of two machines must never belong to one name."""
    variables = {"provider_id": "aws:///i-1"}
    two = [
        DiscoveredNode(name, "kubernetes/ams", connection={**variables, "ansible_host": address})
        for name, address in (("n1", "10.0.0.1"), ("n2", "10.0.0.2"))
    ]
    # Both were known before, the second one under another id, or none was.
    before = {"n1": variables, "n2": variables}, {}
    for connections in before:
        merged = merge_inventories(two, connections=connections)
        addresses = {name: found["ansible_host"] for name, found in merged.connections.items()}
        assert addresses == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
        assert merged.canonical_names == {}
    # Under a third name, which another source gave to the first of them.
    merged = merge_inventories(two, connections={"web": variables})
    assert set(merged.connections) == {"web", "n2"}
    assert merged.connections["web"]["ansible_host"] == "10.0.0.1"


async def test_cluster_has_its_pinned_identity(tmp_path: Path) -> None:
    """A change compares it with what it reaches, so a newer answer must not take its place."""
    async with control_environment(tmp_path) as inside:
        for pinned, reported in (("old", "new"), ("old", None), (None, "new")):
            identity = {} if pinned is None else {"cluster_id": pinned}
            await inside.commit(NodesDiscovered((Node("east", NodeKind.CLUSTER, identity=identity),)))
            variables = {} if reported is None else without_templates({"cluster_id": reported})
            inside.state.connections.change({"east": variables})
            assert inside.state.host("east").connection.get("cluster_id") == pinned


async def test_pinned_identity_outlasts_agreement_until_an_admin_accepts(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", dict(ALL), {"p1": {"machine_id": "m1"}})
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        hosts.variables = {"p1": {"machine_id": "m2"}}
        await refresher.refresh()
        assert inside.state.index.nodes["p1"].quarantined
        rollout = await inside.start()
        remedy = reason(inside, rollout, "p1").remedy
        assert remedy is not None
        assert (remedy.kind, remedy.args) == ("pin-identity", {"node": "p1"})
        with pytest.raises(ApiError, match="ask an admin"):
            await inside.request("olga", "post", "/v1/inventory/p1/pin", {"reason": "reinstalled"})
        await refresher.pin_identity("p1", ADAM, "reinstalled")
        assert inside.state.index.nodes["p1"].identity == {"machine_id": "m2"}
        assert admitted(inside) == ["p1"]
        last = await inside.state.store.read_audit(event="IdentityPinned")
        assert len(last) == 1


# -- a quarantined node blocks no other ----------------------------------------------


async def test_quarantined_node_holds_neither_wave_nor_rollout_for_ever(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts, netbox = Source("hosts", dict(ALL)), Source("netbox", {"p1": {"team": "search"}})
        rules = SourceRules(stale_after_s=1e9)
        await InventoryRefresher(inside.state, [hosts, netbox], {"hosts": rules, "netbox": rules}).refresh()
        rollout = await inside.start()
        index = inside.state.index
        assert not index.is_wave_over(rollout, "canary"), "no canary has shown anything yet"
        await inside.finish(rollout, "s1")
        assert index.is_wave_over(rollout, "canary")
        inside.clock.advance(HOUR_S)
        for who in ("olga", "paul", "sara"):
            await inside.vote(who, rollout, "continue")
        opened = decision(inside).of(OpenGate)
        await inside.commit(*(GateOpened(e.rollout, e.gate, e.wave, inside.clock.now()) for e in opened))
        assert sorted(admitted(inside)) == ["p2", "s2"]
        for node in ("p2", "s2"):
            await inside.finish(rollout, node)
        waiting = decision(inside)
        assert waiting.reasons[rollout].code == "quarantined"
        assert not waiting.of(SkipQuarantined)
        assert waiting.wake_at is not None
        inside.clock.advance(QUARANTINE_SKIP_S)
        (skip,) = decision(inside).of(SkipQuarantined)
        target = index.target(rollout, skip.node)
        await inside.commit(transition(target, Trigger.SKIPPED, inside.clock.now(), outcome=Outcome.SKIPPED))
        inside.clock.advance(600)  # the soak
        assert decision(inside).of(EndRollout) == (EndRollout(rollout),)


async def test_rollback_of_quarantined_node_is_refused(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts, netbox = Source("hosts", dict(ALL)), Source("netbox", dict(ALL))
        refresher = InventoryRefresher(inside.state, [hosts, netbox])
        await refresher.refresh()
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        netbox.nodes = ALL | {"p1": {"team": "search"}}
        await refresher.refresh()
        path = f"/v1/rollouts/{rollout}/nodes/p1/rollback"
        with pytest.raises(ApiError, match="p1 is quarantined: its owner differs"):
            await inside.request("olga", "post", path, {"reason": "because"})


# -- staleness -----------------------------------------------------------------------


async def test_stale_source_starts_nothing_until_it_answers_again(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", dict(ALL))
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        answered_at = inside.clock.now()
        rollout = await inside.start()
        hosts.nodes = None
        inside.clock.advance(HOUR_S - 1)
        await refresher.refresh()
        assert admitted(inside) == ["p1"], "its last answer is good enough for an hour"
        inside.clock.advance(1)
        assert admitted(inside) == []
        why = reason(inside, rollout, "p1")
        assert (why.code, why.subject) == ("inventory-stale", "hosts")
        assert why.params == {"refreshed_at": answered_at, "stale_after_s": HOUR_S}
        await refresher.refresh()
        assert "inventory hosts: it last answered at" in "".join(inside.state.problems())
        (shown,) = (await inside.request("olga", "get", "/v1/inventory"))["sources"]
        assert (shown["stale"], shown["age_s"], shown["error"]) == (True, HOUR_S, "hosts is silent")
        hosts.nodes = dict(ALL)
        await refresher.refresh()
        assert admitted(inside) == ["p1"]
        assert not inside.state.problems()


async def test_age_of_an_answer_counts_across_a_restart(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", dict(ALL), {"p1": {"ansible_host": "10.0.0.1", "db_password": "hunter2"}})
        await InventoryRefresher(inside.state, [hosts]).refresh()
        await inside.start()
        hosts.nodes = None
        forget_as_a_restart_does(inside.state)
        inside.clock.advance(HOUR_S - 1)
        await InventoryRefresher(inside.state, [hosts]).refresh()
        assert admitted(inside) == ["p1"]
        shown = await inside.request("olga", "get", "/v1/inventory/p1")
        assert shown["reports"][0]["address"] == "10.0.0.1"
        (stored,) = await inside.state.store.load_source_answers()
        assert "db_password" not in stored.nodes[0].connection
        forget_as_a_restart_does(inside.state)
        inside.clock.advance(1)
        await InventoryRefresher(inside.state, [hosts]).refresh()
        assert admitted(inside) == []


async def test_source_without_any_answer_is_stale(tmp_path: Path) -> None:
    """After an upgrade its nodes are known, and their age is not."""
    async with control_environment(tmp_path) as inside:
        await InventoryRefresher(inside.state, [Source("hosts", None)]).refresh()
        rollout = await inside.start()
        assert admitted(inside) == []
        assert reason(inside, rollout, "p1").params["refreshed_at"] is None


async def test_each_source_has_its_own_schedule(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        fast, slow = Source("fast", dict(ALL)), Source("slow", dict(ALL))
        timers = FakeTimers(inside.clock)
        daemon = Daemon(
            inside.state,
            adapters_of(inside, tmp_path),
            inventories=[fast, slow],
            observers=[],
            timers=timers,
            source_rules={"fast": SourceRules(refresh_s=60.0)},
        )
        running = asyncio.create_task(daemon.run())
        await loop_iterations(50)
        for _ in range(int(inside.state.settings.inventory_refresh_s / 60)):
            inside.clock.advance(60)
            timers.run_due()
            await loop_iterations(50)
        running.cancel()
        await asyncio.wait({running})
        assert (fast.calls, slow.calls) == (6, 2)


# -- held answers ----------------------------------------------------------------------


def fleet(count: int) -> dict[str, dict[str, str]]:
    return {f"n{number}": {"team": "idle"} for number in range(count)}


async def test_answer_that_removes_too_many_nodes_waits_for_an_admin(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", fleet(20))
        refresher = InventoryRefresher(
            inside.state, [hosts], {"hosts": SourceRules(max_removed=Budget(count=None, percent=10))}
        )
        hosts.nodes = ALL | fleet(20)
        await refresher.refresh()
        hosts.nodes = ALL | fleet(18)
        await refresher.refresh()
        assert len(inside.state.index.nodes) == 22, "two of 24 are not more than a tenth"
        hosts.nodes = ALL | fleet(15)
        await refresher.refresh()
        assert len(inside.state.index.nodes) == 22
        (shown,) = (await inside.request("olga", "get", "/v1/inventory"))["sources"]
        assert shown["held"]["removed"] == ["n15", "n16", "n17"]
        (problem,) = inside.state.problems()
        assert "would remove 3 of 22 nodes" in problem
        rollout = await inside.start()
        inside.clock.advance(HOUR_S)
        assert admitted(inside) == [], "the answer in effect is an hour old"
        remedy = reason(inside, rollout, "p1").remedy
        assert remedy is not None
        assert (remedy.kind, remedy.args) == ("accept-inventory", {"source": "hosts"})
        body = {"source": "hosts", "reason": "rack r9 is gone"}
        with pytest.raises(ApiError, match="ask an admin"):
            await inside.request("olga", "post", "/v1/inventory/accept", body)
        await refresher.refresh()
        await refresher.accept("hosts", ADAM, "rack r9 is gone")
        assert len(inside.state.index.nodes) == 19
        assert not inside.state.problems()
        assert "p1" in admitted(inside)
        (entry,) = await inside.state.store.read_audit(event=InventoryAccepted.__name__)
        assert '"removed":3' in entry.text
        assert "rack r9 is gone" in entry.text


async def test_answer_that_returns_to_normal_is_not_held(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", dict(ALL))
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        hosts.nodes = {"p1": ALL["p1"]}
        await refresher.refresh()
        assert inside.state.sources["hosts"].held is not None
        hosts.nodes = dict(ALL)
        await refresher.refresh()
        assert inside.state.sources["hosts"].held is None
        assert not inside.state.problems()


# -- joiners and leavers -----------------------------------------------------------------


async def test_joiner_of_any_source_is_enrolled_last_within_one_refresh(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts, other = Source("hosts", dict(ALL)), Source("other", {"p1": dict(ALL["p1"])})
        refresher = InventoryRefresher(inside.state, [hosts, other])
        await refresher.refresh()
        rollout = await inside.start()
        other.nodes = {"p1": dict(ALL["p1"]), "a0": {"team": "search", "rack": "r3"}}
        await refresher.refresh("other")
        target = inside.state.index.target(rollout, "a0")
        assert (target.wave, target.joined) == ("fleet", True)
        assert "a0" not in admitted(inside), "canaries go first"
