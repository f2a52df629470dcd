"""What becomes of nodes and groups when sources answer, fall silent, or are replaced in the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from machines.model.events import Event, TargetChanged
from machines.model.limits import Budget
from machines.model.node import NodeKind
from rolloutd.engine.background.inventory_merge import merge_inventories
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.engine.daemon import MIN_PAUSE_S
from rolloutd.errors import Conflict, SourceFailed, StoreFailed
from rolloutd.ports import GROUPS, IMPLICIT_GROUPS, PROVIDER_ID, DiscoveredNode, SourceRules
from tests.rolloutd.control_environment import NODES, PLAN, ControlEnvironment, control_environment
from tests.rolloutd.slow_store import adapters_of, daemon_of, open_slow_store


@dataclass
class Source:
    """An inventory that says what the test put there; None makes it fail."""

    source: str
    nodes: dict[str, dict[str, str]] | None
    groups: dict[str, list[str]] = field(default_factory=dict)

    async def refresh(self) -> Sequence[DiscoveredNode]:
        if self.nodes is None:
            raise SourceFailed(f"{self.source} is silent")
        return [
            DiscoveredNode(
                name, self.source, labels=labels, connection={GROUPS: list(self.groups.get(name, []))}
            )
            for name, labels in self.nodes.items()
        ]


class AnsibleSource(Source):
    """One whose texts may be templates."""

    gives_templates: ClassVar[bool] = True


async def reported(inside: ControlEnvironment, *sources: Source) -> dict[str, dict[str, str]]:
    """Let a daemon with these sources ask them, and return the nodes it knows with their labels.

    An answer may remove any number of nodes.
    """

    rules = {each.source: SourceRules(max_removed=Budget(count=None, percent=100)) for each in sources}
    await InventoryRefresher(inside.state, sources, rules).refresh()
    known: dict[str, Any] = {name: dict(node.labels) for name, node in inside.state.index.nodes.items()}
    return known


async def test_a_source_that_the_settings_no_longer_name_has_no_say(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        old = {"p1": {"team": "payments"}, "p2": {"team": "payments"}}
        before = await reported(inside, Source("hosts", old))
        assert before == old
        renamed = Source("hosts.ini", {"p1": {"team": "search"}})
        assert await reported(inside, renamed) == {"p1": {"team": "search"}}


async def test_settings_without_any_source_take_no_node_away(tmp_path: Path) -> None:
    """Its nodes would have left, and with them every rollout would have ended."""
    async with control_environment(tmp_path) as inside:
        old = {"p1": {"team": "payments"}, "p2": {"team": "payments"}}
        await reported(inside, Source("hosts", old))
        assert await reported(inside) == old
        assert "the settings name no inventory: nodes stay as last known" in "".join(inside.state.problems())


async def test_pattern_like_node_name_rejected(tmp_path: Path) -> None:
    """`--limit '!n1'` is every node but n1, `a,b` two of them, `@a` a file; `../x` is no file's name."""
    odd = ("!n1", "a,b", "@a", "../x", "~n", "w*", "-l", "n 1", "", "n" * 129, "fe80::1%{{ x }}")
    good = ("n1", "fe80::1", "10.0.0.1", "db-1.example.com", "A_b")
    async with control_environment(tmp_path) as inside:
        source = Source("hosts", {name: {"team": "payments"} for name in (*odd, *good)})
        assert await reported(inside, source) == {name: {"team": "payments"} for name in good}
        state = inside.state.sources["hosts"]
        assert "'!n1' is not a node name" in state.error
        assert "10 more of its nodes" in state.error


async def test_while_a_source_is_silent_what_is_gone_from_the_settings_stays(tmp_path: Path) -> None:
    """The silent one may be the same source under a new name."""
    async with control_environment(tmp_path) as inside:
        old = {"p1": {"team": "payments"}, "p2": {"team": "payments"}}
        await reported(inside, Source("hosts", old))
        assert await reported(inside, Source("hosts.ini", None)) == old
        assert await reported(inside, Source("hosts.ini", {"p1": {"team": "search"}})) == {
            "p1": {"team": "search"}
        }


async def test_removed_node_is_not_in_runs_after_restart(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await reported(inside, Source("hosts", {"p1": {}, "p2": {}}, {"p1": ["web"], "p2": ["web"]}))
        await reported(inside, Source("hosts", {"p1": {}}, {"p1": ["web"]}))
        inside.state.connections.change({}, tuple(inside.state.connections))
        await inside.state.load_connections()
        snapshot = inside.state.connections.snapshot()
        assert ("p2" in snapshot.hosts, snapshot.groups) == (False, {"web": ["p1"]})


@pytest.mark.parametrize("name", sorted(IMPLICIT_GROUPS))
async def test_node_named_as_implicit_group_is_left_out(tmp_path: Path, name: str) -> None:
    async with control_environment(tmp_path) as inside:
        assert list(await reported(inside, Source("hosts", {name: {}, "p1": {}}))) == ["p1"]
        assert f"{name} is the name of a group" in inside.state.sources["hosts"].error


async def test_node_named_as_group_of_another_source_is_left_out(tmp_path: Path) -> None:
    """In a run it would take the group's place, and plays of the group would skip its nodes."""
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", {"p1": {}, "p2": {}, "db": {}}, {"p1": ["web"], "p2": ["web", "db"]})
        devices = Source("netbox", {"web": {}, "db": {}, "s1": {}})
        assert sorted(await reported(inside, devices, hosts)) == ["db", "p1", "p2", "s1"]
        error = inside.state.sources["netbox"].error
        assert error == "web is the name of a group of hosts; rename the node in the source"


async def test_node_with_long_label_is_left_out(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        labels = {"w1": {"team": "x" * 254}, "w2": {"team": "x" * 253}}
        assert list(await reported(inside, Source("hosts", labels))) == ["w2"]
        assert "w1: label team has 254 characters" in inside.state.sources["hosts"].error


@pytest.mark.parametrize("of_ansible", [True, False])
async def test_node_with_control_character_in_label_is_left_out(tmp_path: Path, of_ansible: bool) -> None:
    async with control_environment(tmp_path) as inside:
        source = AnsibleSource if of_ansible else Source
        labels = {"w1": {"rack": "r1\x1b[2J"}, "w2": {"rack": "r1"}}
        assert list(await reported(inside, source("hosts", labels))) == ["w2"]
        error = "w1: label 'rack' has the control character '\\x1b'; correct it in the source"
        assert inside.state.sources["hosts"].error == error


async def test_empty_label_is_no_team_and_no_pool(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await reported(inside, Source("hosts", {"w1": {"team": "", "rack": ""}}))
        node = inside.state.index.nodes["w1"]
        assert (node.team, inside.state.index.pools_of(node)) == (None, ("team/none", "rack/none"))
        (shown,) = (await inside.request("nora", "get", "/v1/inventory"))["nodes"]
        assert (shown["team"], shown["pools"]) == (None, ["team/none", "rack/none"])


async def test_why_says_that_relabelled_node_is_no_longer_selected(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        known = {node.name: dict(node.labels) for node in NODES}
        hosts = Source("hosts", known)
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        rollout = await inside.start(text=PLAN.replace('targets: ""', "targets: rack=r1"))
        path = f"/v1/rollouts/{rollout}/nodes/p1/why"
        assert (await inside.request("nora", "get", path))["is_selected"]
        hosts.nodes = known | {"p1": known["p1"] | {"rack": "r2"}}
        await refresher.refresh()
        assert not (await inside.request("nora", "get", path))["is_selected"]


async def test_failing_source_is_trouble_before_it_is_stale(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        source = Source("netbox", {"p1": {"team": "payments"}})
        await reported(inside, source)
        assert not inside.state.problems()
        for _ in range(6):
            inside.clock.advance(1.0)
            await reported(inside, Source("netbox", None))
        (problem,) = inside.state.problems()
        assert problem.startswith("inventory netbox: it fails since 2027-01-15T08:00:0")
        assert problem.endswith("its nodes stay as last known: netbox is silent")
        await reported(inside, source)
        assert not inside.state.problems()


async def test_source_fails_since_it_gave_no_answer(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        source = Source("netbox", {"p1": {"team": "payments"}, "!p2": {}})
        refresher = InventoryRefresher(inside.state, [source])
        await refresher.refresh()
        known_since = inside.state.sources["netbox"].failing_since
        assert known_since == inside.clock.now(), "one of its names is not valid"
        for reported_nodes in (None, source.nodes):
            inside.clock.advance(600.0)
            source.nodes = reported_nodes
            await refresher.refresh()
            assert inside.state.sources["netbox"].failing_since == inside.clock.now()


async def test_groups_of_all_sources_are_joined_and_outlive_the_daemon(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        one = Source("one", {"p1": {}, "p2": {}}, {"p1": ["web"], "p2": ["web"]})
        two = Source("two", {"p2": {}, "s1": {}}, {"p2": ["db"], "s1": ["web"]})
        await reported(inside, one, two)
        assert inside.state.connections.snapshot().groups == {"web": ["p1", "p2", "s1"], "db": ["p2"]}
        inside.state.connections.change({}, tuple(inside.state.connections))
        await inside.state.load_connections()
        assert inside.state.connections.snapshot().groups == {"web": ["p1", "p2", "s1"], "db": ["p2"]}
        two.groups = {}
        await reported(inside, one, two)
        assert inside.state.connections.snapshot().groups == {"web": ["p1", "p2"]}


async def test_the_fleet_is_one_value_until_a_refresh_changes_it(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        one = Source("one", {"p1": {}, "p2": {}})
        await reported(inside, one)
        fleet = inside.state.connections.snapshot()
        await reported(inside, one)
        assert inside.state.connections.snapshot() is fleet
        await reported(inside, Source("one", {"p1": {}, "p2": {}}, {"p1": ["web"]}))
        changed = inside.state.connections.snapshot()
        assert changed.generation > fleet.generation
        assert (fleet.groups, changed.groups) == ({}, {"web": ["p1"]})
        inside.state.connections.change({}, ["p2"])
        assert list(inside.state.connections.snapshot().hosts) == ["p1"]


class SlowSource(Source):
    """A source that answers when the test lets it."""

    def __init__(self, source: str, nodes: dict[str, dict[str, str]]) -> None:
        super().__init__(source, nodes)
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def refresh(self) -> Sequence[DiscoveredNode]:
        self.asked.set()
        await self.may_answer.wait()
        return await super().refresh()


class ClusterSource(Source):
    """A source of Kubernetes nodes."""

    kind = NodeKind.KUBERNETES

    async def refresh(self) -> Sequence[DiscoveredNode]:
        return [
            replace(
                each,
                kind=self.kind,
                connection={
                    PROVIDER_ID: f"cloud://{self.source}/{each.name}",
                    "kubernetes_cluster": self.source,
                },
            )
            for each in await super().refresh()
        ]


async def test_a_slow_source_delays_no_other_and_is_heard_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutd.engine.background.inventory_refresh.FIRST_COMMIT_WAIT_S", 0.01)
    async with control_environment(tmp_path) as inside:
        slow, quick = SlowSource("slow", {"s9": {}}), Source("quick", {"q9": {}})
        refreshing = InventoryRefresher(inside.state, (slow, quick))
        waiting = asyncio.create_task(refreshing.refresh())
        await slow.asked.wait()
        while "q9" not in inside.state.index.nodes:
            await asyncio.sleep(0)
        assert "s9" not in inside.state.index.nodes
        assert not waiting.done()
        slow.may_answer.set()
        await waiting
        assert "s9" in inside.state.index.nodes


async def test_a_source_that_hangs_is_given_up_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutd.engine.background.inventory_sources.SOURCE_TIMEOUT_S", 0.01)
    async with control_environment(tmp_path) as inside:
        await InventoryRefresher(
            inside.state, (SlowSource("slow", {}), Source("quick", {"q9": {}}))
        ).refresh()
        assert "q9" in inside.state.index.nodes
        assert "no answer within" in inside.state.sources["slow"].error


async def test_nodes_of_one_name_in_two_clusters_are_never_one(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        ams, ber = (
            ClusterSource("ams", {"w1": {"team": "a"}}),
            ClusterSource("ber", {"w1": {"team": "b"}, "w2": {}}),
        )
        assert await reported(inside, ams, ber) == {"w1": {"team": "a"}, "w2": {}}
        assert inside.state.host("w1").connection["kubernetes_cluster"] == "ams"
        assert inside.state.canonical_names["ber", "w1"] == ""
        assert inside.state.sources["ber"].error.startswith(
            "w1 is also in ams: give one of the two clusters a prefix"
        )
        assert inside.state.sources["ams"].error == ""
        # Whoever had the name keeps it, whatever the order in the settings, and while its cluster is away.
        assert (await reported(inside, ber, ams))["w1"] == {"team": "a"}
        ams.nodes = None
        assert (await reported(inside, ber, ams))["w1"] == {"team": "a"}
        assert inside.state.canonical_names["ber", "w1"] == ""


async def test_sources_agree_on_a_node_by_its_provider_id(tmp_path: Path) -> None:
    class Cloud(Source):
        async def refresh(self) -> Sequence[DiscoveredNode]:
            found = await super().refresh()
            return [replace(each, connection={PROVIDER_ID: "cloud://ams/ip-10"}) for each in found]

    async with control_environment(tmp_path) as inside:
        cloud, ams = Cloud("cloud", {"web-1": {"rack": "r1"}}), ClusterSource("ams", {"ip-10": {"team": "a"}})
        assert await reported(inside, cloud, ams) == {"web-1": {"rack": "r1", "team": "a"}}
        assert inside.state.canonical_names == {("ams", "ip-10"): "web-1"}
        assert inside.state.index.nodes["web-1"].sources == ("cloud", "ams")
        # It keeps its name when the source that named it is silent after a restart.
        cloud.nodes = None
        assert list(await reported(inside, ams, cloud)) == ["web-1"]


async def test_a_node_that_left_its_cluster_is_gone_though_another_source_lists_it(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts, ams = Source("hosts", {"w1": {}, "w2": {}}), ClusterSource("ams", {"w1": {}, "w2": {}})
        assert list(await reported(inside, hosts, ams)) == ["w1", "w2"]
        ams.nodes = {"w2": {}}
        assert list(await reported(inside, hosts, ams)) == ["w2"]
        await reported(inside, hosts, ams)
        assert inside.state.index.nodes["w1"].kind is NodeKind.HOST
        # A cluster that is away has not lost its nodes.
        ams.nodes = None
        await reported(inside, hosts, ams)
        assert inside.state.index.nodes["w2"].kind is NodeKind.KUBERNETES


async def test_cluster_gone_from_its_management_cluster_leaves(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        both: dict[str, dict[str, str]] = {"east": {}, "west": {}}
        hosts, management = Source("hosts", both), ClusterSource("hub", both)
        management.kind = NodeKind.CLUSTER
        await reported(inside, hosts, management)
        assert inside.state.index.nodes["east"].kind is NodeKind.CLUSTER
        management.nodes = {"west": {}}
        assert list(await reported(inside, hosts, management)) == ["west"]


async def test_answer_counts_when_its_nodes_are_committed(tmp_path: Path) -> None:
    """`rolloutctl inventory --refresh` waits for the answer, and then lists the nodes."""
    async with control_environment(tmp_path) as inside:
        known = {node.name: dict(node.labels) for node in NODES}
        hosts = Source("hosts", known)
        refresher, status = InventoryRefresher(inside.state, [hosts]), inside.state.sources
        await refresher.refresh()
        before = status["hosts"].refreshed_at
        inside.clock.advance(60.0)
        hosts.nodes = known | {"p9": {}}

        async def shown() -> tuple[float, bool]:
            answer = await inside.request("olga", "get", "/v1/inventory")
            return answer["sources"][0]["age_s"], "p9" in {each["node"] for each in answer["nodes"]}

        async with inside.state.exclusive_commit():
            refreshing = asyncio.create_task(refresher.refresh())
            while status["hosts"].refreshed_at == before:
                await asyncio.sleep(0)
            assert await shown() == (60.0, False)
        await refreshing
        assert await shown() == (0.0, True)


async def test_node_and_target_change_commit_together(tmp_path: Path) -> None:
    """A node changes its team; its windows are those of the new one from the same moment on."""
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        rollout, index = await inside.start(), inside.state.index
        apart: list[str] = []

        async def look_on() -> None:
            while True:
                async with inside.state.exclusive_commit():
                    apart.extend(t.node for t in index.targets(rollout) if index.nodes[t.node].team != t.team)
                await asyncio.sleep(0)

        looking = asyncio.create_task(look_on())
        labels = {node.name: dict(node.labels) for node in NODES} | {"p1": {"team": "search", "rack": "r1"}}
        await InventoryRefresher(inside.state, (Source("hosts", labels),)).refresh()
        looking.cancel()
        await asyncio.wait({looking})
        assert index.target(rollout, "p1").team == "search"
        assert not apart


async def test_lost_write_of_target_change_repeats_before_decision(tmp_path: Path) -> None:
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        rollout, write, failed = await inside.start(), inside.state.store.commit, []

        async def fail_once(events: Sequence[Event], **more: Any) -> Any:
            if not failed and any(isinstance(event, TargetChanged) for event in events):
                failed.append(events)
                raise StoreFailed("disk full")
            return await write(events, **more)

        inside.state.store.commit = fail_once  # type: ignore[method-assign]
        labels = {node.name: dict(node.labels) for node in NODES} | {"p1": {"team": "search", "rack": "r1"}}
        loop = daemon_of(inside, adapters_of(inside, tmp_path), Source("hosts", labels))
        running = asyncio.create_task(loop.run())
        await asyncio.wait_for(loop.first_iteration_done.wait(), 30)
        running.cancel()
        await asyncio.wait({running})
        assert len(failed) == 1
        assert inside.state.index.target(rollout, "p1").team == "search"


async def test_altered_row_keeps_other_rollouts_membership(tmp_path: Path) -> None:
    """It is verified once, or verification and decision would wake each other without an end."""
    async with control_environment(tmp_path, store=open_slow_store) as inside:
        altered = await inside.start()
        rollout = await inside.start(text=PLAN.replace("name: sysctl", "name: kernel"))
        store, write, verified = inside.state.store, inside.state.store.commit, []
        report = await store.verify_audit()

        async def refuse(events: Sequence[Event], **more: Any) -> Any:
            if any(isinstance(event, TargetChanged) and event.rollout == altered for event in events):
                raise Conflict(f"target {altered}/p1 is not as expected")
            return await write(events, **more)

        async def verify(**_: Any) -> Any:
            verified.append(inside.clock.now())
            return report

        store.commit, store.verify_audit = refuse, verify  # type: ignore[method-assign]
        labels = {node.name: dict(node.labels) for node in NODES} | {"p1": {"team": "search", "rack": "r1"}}
        loop = daemon_of(inside, adapters_of(inside, tmp_path), Source("hosts", labels))
        iterations = asyncio.Semaphore(0)
        loop.iteration_listeners.append(lambda _: iterations.release())
        running = asyncio.create_task(loop.run())
        async with asyncio.timeout(30):
            for _ in range(6):
                await iterations.acquire()
                loop.wake_up()
                inside.clock.advance(MIN_PAUSE_S)
        running.cancel()
        await asyncio.wait({running})
        teams = [inside.state.index.target(each, "p1").team for each in (altered, rollout)]
        assert teams == ["payments", "search"]
        assert len(verified) == 2, "at the start, and once for the altered row"


def test_template_of_provider_id_merges_no_nodes() -> None:
    variables = {"provider_id": "aws:///{{ instance_id }}"}
    reports = [
        DiscoveredNode("web1", "hosts", connection=variables),
        DiscoveredNode("web2", "aws", connection=variables),
    ]
    assert set(merge_inventories(reports).connections) == {"web1", "web2"}
