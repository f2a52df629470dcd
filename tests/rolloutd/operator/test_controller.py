"""Objects become rollouts and show their status, over a fake API server and a daemon's real state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from machines.model.events import GateOpened
from machines.model.plan import GateName
from machines.states import Phase
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.object_events import MAX_MESSAGE_LENGTH
from rolloutd.operator.controller import RETRY_S, STATUS_INTERVAL_S, Controller, NamespaceWatch
from rolloutd.operator.objects import GROUP_VERSION, RESOURCE
from tests.rolloutd.control_environment import PLAN, URL, ControlEnvironment, control_environment
from tests.support.fake_kubernetes import FakeKubernetes

DEPLOY = Path(__file__).parents[3] / "deploy/kubernetes/operator"
NAMESPACES = {"ops": ["infra"], "others": ["search"]}
MAX_STATUS_BYTES = 10_240


@dataclass
class Fleet:
    """A cluster with objects, and a controller that a test lets act."""

    inside: ControlEnvironment
    kubernetes: FakeKubernetes
    cluster: Cluster
    controller: Controller
    at: float = 0.0

    def apply(self, name: str = "kernel", plan: str = PLAN, namespace: str = "ops", **spec: Any) -> Any:
        thing = {
            "apiVersion": GROUP_VERSION,
            "kind": "MaintenanceRollout",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"plan": plan, **spec},
        }
        return self.kubernetes.objects.create(RESOURCE, thing, manager="kubectl")

    def remove(self, name: str = "kernel", namespace: str = "ops") -> None:
        objects = self.kubernetes.objects
        objects.remove(RESOURCE, objects.get(RESOURCE, namespace, name))

    def status(self, name: str = "kernel", namespace: str = "ops") -> Any:
        return self.kubernetes.objects.get(RESOURCE, namespace, name).get("status")

    def condition(self, kind: str, name: str = "kernel", namespace: str = "ops") -> Any:
        conditions = self.status(name, namespace)["conditions"]
        return next(each for each in conditions if each["type"] == kind)

    async def open_start(self) -> str:
        """Open the start gate of the only rollout, and return it."""
        [rollout] = self.rollouts()
        await self.inside.vote("olga", rollout, "start")
        await self.inside.commit(GateOpened(rollout, GateName.START, "", self.inside.clock.now()))
        return rollout

    def events(self, namespace: str = "ops") -> list[tuple[str, str, str, int]]:
        """Return type, reason, message and count of each event of a namespace, by their version."""
        listed = list(self.kubernetes.objects.all("events", namespace))
        listed.sort(key=lambda each: int(each["metadata"]["resourceVersion"]))
        return [(each["type"], each["reason"], each["message"], each["count"]) for each in listed]

    def rollouts(self) -> list[str]:
        return [each.id for each in self.inside.state.index.rollouts.values() if not each.closed]

    async def act(self, after_s: float = STATUS_INTERVAL_S) -> None:
        """Let time pass, read the objects as the server has them, act on them, and show what came of it."""
        self.at += after_s
        await self.pass_over()
        await self.controller.submit_due()
        await self.pass_over()

    async def pass_over(self) -> None:
        watches = []
        for namespace in self.controller.settings.namespaces:
            watch = NamespaceWatch(namespace, self.controller)
            page = await self.cluster.list(
                api_path(RESOURCE, namespace=namespace, group=GROUP_VERSION), {}, watch.parse
            )
            watch.on_list(page.items)
            watches.append(watch)
        await self.controller.pass_over(watches)

    def restart(self) -> None:
        before = self.controller
        self.controller = Controller(
            before.state, before.sources, before.cluster, before.settings, lambda: self.at
        )


@asynccontextmanager
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    operator = {"cluster": "prod", "namespaces": NAMESPACES}
    async with FakeKubernetes() as kubernetes, control_environment(tmp_path, operator=operator) as inside:
        for namespace in NAMESPACES:
            kubernetes.objects.create("namespaces", {"metadata": {"name": namespace}, "spec": {}})
        inside.observe_all_up()
        cluster = Cluster("prod", kubernetes.kubeconfig(tmp_path / "kubeconfig"))
        settings = inside.state.settings.operator
        assert settings is not None
        found = Fleet(
            inside, kubernetes, cluster, Controller(inside.state, inside.sources, cluster, settings)
        )
        found.controller.monotonic = lambda: found.at
        try:
            yield found
        finally:
            await cluster.close()


def validate_status(status: Any) -> None:
    """Judge a status by the schema that a server would prune by, and by its size."""
    import jsonschema  # its import takes a CPU second in each process that collects the tests

    definition = next(yaml.safe_load_all((DEPLOY / "crd.yaml").read_text()))
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    jsonschema.validate(status, closed(schema))
    assert len(json.dumps(status)) < MAX_STATUS_BYTES


def closed(schema: Any) -> Any:
    """Return the schema without room for unknown fields, which a server drops without a word."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    return made | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else made


async def test_object_becomes_rollout_and_shows_it(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        thing = seen.apply()
        await seen.act()
        [rollout] = seen.rollouts()
        status = seen.status()
        validate_status(status)
        assert (status["rollout"], status["state"]) == (rollout, "awaiting-approval")
        assert (status["progress"], status["observedGeneration"]) == ("0/4", 1)
        assert [gate["gate"] for gate in status["gates"]] == ["start"]
        assert "olga" not in json.dumps(status)
        assert seen.condition("Accepted")["status"] == "True"
        submitted_by = seen.inside.state.index.rollouts[rollout].submitted_by
        assert submitted_by.name == f"kubernetes:prod/ops/kernel/{thing['metadata']['uid']}"
        # A service takes no vote from a person: the owner's own vote opens the gate.
        await seen.inside.vote("olga", rollout, "start")


async def test_status_follows_rollout_and_counts_failures(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        rollout = await seen.open_start()
        await seen.inside.fail(rollout, "p1")
        await seen.act()
        status = seen.status()
        validate_status(status)
        assert (status["state"], status["failed"]) == ("paused", 1)
        assert [each["node"] for each in status["attention"]] == ["p1"]
        assert seen.condition("Stalled")["status"] == "True"
        assert seen.condition("Ready")["status"] == "False"


async def test_invalid_plan_is_shown_with_each_mistake(tmp_path: Path) -> None:
    broken = PLAN.replace("soak: 10m", "soak: soon").replace("playbook: undo.yml", "playbok: undo.yml")
    async with fleet(tmp_path) as seen:
        seen.apply(plan=broken)
        await seen.act()
        accepted = seen.condition("Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "InvalidPlan")
        assert "spec.soak" in accepted["message"]
        assert "playbok" in accepted["message"]
        assert accepted["message"].startswith("ops/kernel:")
        validate_status(seen.status())
        assert seen.rollouts() == []


async def test_thousand_mistakes_fit_into_status(tmp_path: Path) -> None:
    many = PLAN + "".join(f"  wrong{number}: {'x' * 50}\n" for number in range(1000))
    async with fleet(tmp_path) as seen:
        seen.apply(plan=many)
        await seen.act()
        validate_status(seen.status())
        assert "more" in seen.condition("Accepted")["message"]


async def test_namespace_submits_only_for_its_teams(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply(namespace="others")
        await seen.act()
        accepted = seen.condition("Accepted", namespace="others")
        assert (accepted["status"], accepted["reason"]) == ("False", "Refused")
        assert "ask a member of infra" in accepted["message"]
        assert seen.rollouts() == []


async def test_refused_object_is_submitted_again_later(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        elsewhere = "https://git.example.org/later.git"
        seen.apply(plan=PLAN.replace(URL, elsewhere))
        await seen.act()
        assert seen.condition("Accepted")["reason"] == "Refused"
        tree = {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n"}
        seen.inside.sources.commit(elsewhere, tree, ["main"])
        await seen.act(1.0)
        assert seen.rollouts() == []
        await seen.act(RETRY_S)
        assert len(seen.rollouts()) == 1
        await seen.act()
        assert seen.condition("Accepted")["status"] == "True"


async def test_removed_object_ends_starts_alone(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        rollout = await seen.open_start()
        await seen.inside.isolate(rollout, "p1")
        seen.remove()
        await seen.act()
        cancelled = seen.inside.state.index.rollouts[rollout]
        assert cancelled.cancelled is not None
        assert seen.inside.phase(rollout, "p1") is Phase.MAINTAINING


async def test_object_removed_while_daemon_was_away_ends_rollout(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        seen.remove()
        seen.restart()
        await seen.act()
        assert seen.rollouts() == []


async def test_restart_submits_nothing_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        before = seen.rollouts()
        requests = len(seen.kubernetes.server.requests)
        seen.restart()
        await seen.act()
        assert seen.rollouts() == before
        writes = [each for each in list(seen.kubernetes.server.requests)[requests:] if each.verb == "patch"]
        assert writes == []


async def test_object_made_again_is_another_rollout(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        [first] = seen.rollouts()
        seen.remove()
        seen.apply()
        await seen.act()
        [second] = seen.rollouts()
        assert second != first


async def test_rollout_of_person_survives_removed_object(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        rollout = await seen.inside.submit("olga")
        seen.apply()
        await seen.act()
        assert seen.status()["rollout"] == rollout
        seen.remove()
        await seen.act()
        assert seen.rollouts() == [rollout]


async def test_second_object_of_same_plan_waits_for_first(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        [first] = seen.rollouts()
        seen.apply("renamed")
        await seen.act()
        # Voting on it, and removing it, would be about the rollout of another object.
        assert seen.condition("Accepted", "renamed")["message"] == (
            f"{first} has this plan already, as object ops/kernel; remove one of both"
        )
        seen.remove()
        await seen.act(RETRY_S)
        await seen.act(RETRY_S)
        [second] = seen.rollouts()
        assert (seen.status("renamed")["rollout"], second != first) == (second, True)


async def test_superseding_object_replaces_rollout(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        [first] = seen.rollouts()
        seen.apply("kernel-2", plan=PLAN.replace("soak: 10m", "soak: 20m"), supersede=True)
        await seen.act()
        [second] = seen.rollouts()
        assert second != first
        await seen.act()
        assert seen.status()["state"] == "cancelled"


async def test_edited_status_is_written_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        before = seen.status()
        thing = seen.kubernetes.objects.get(RESOURCE, "ops", "kernel")
        edited = {**thing, "status": {**before, "state": "done", "percent": 100.0}}
        seen.kubernetes.objects.update(RESOURCE, thing, edited, manager="mallory", subresource="status")
        await seen.act()
        assert seen.status() == before
        assert seen.inside.state.index.rollouts[before["rollout"]].ended_at is None


async def test_status_is_written_at_most_once_in_interval(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        [rollout] = seen.rollouts()
        for number in range(10):
            await seen.inside.request(
                "olga", "post", f"/v1/rollouts/{rollout}/pause", {"reason": f"r{number}"}
            )
            await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/resume", {"reason": "go"})
            await seen.act(STATUS_INTERVAL_S / 20)
        writes = [each for each in seen.kubernetes.server.requests if each.verb == "patch"]
        assert len(writes) == 1
        assert {each.full_resource for each in writes} == {"maintenancerollouts/status"}


async def test_plan_comes_from_git(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        url = "https://git.example.org/plans.git"
        seen.inside.sources.commit(url, {"plans/kernel.yml": PLAN}, ["main"])
        thing = seen.apply()
        seen.remove()
        thing["spec"] = {"source": {"git": url, "ref": "main", "path": "plans/kernel.yml"}}
        del thing["metadata"]["uid"], thing["metadata"]["resourceVersion"]
        seen.kubernetes.objects.create(RESOURCE, thing, manager="kubectl")
        await seen.act()
        assert len(seen.rollouts()) == 1


async def test_path_outside_of_tree_is_refused(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        url = "https://git.example.org/plans.git"
        seen.inside.sources.commit(url, {"kernel.yml": PLAN}, ["main"])
        (tmp_path / "secret.yml").write_text(PLAN)
        seen.apply(plan=None, source={"git": url, "ref": "main", "path": "../../secret.yml"})  # type: ignore[arg-type]
        await seen.act()
        assert "outside of the tree" in seen.condition("Accepted")["message"]


async def test_transitions_are_events_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        rollout = await seen.open_start()
        await seen.act()
        await seen.inside.fail(rollout, "p1")
        await seen.act()
        seen.restart()
        await seen.act()
        events = seen.events()
        assert [each[:2] for each in events] == [
            ("Normal", "Submitted"),
            ("Normal", "AwaitingApproval"),
            ("Warning", "Paused"),
            ("Normal", "AwaitingApproval"),
            ("Warning", "NodeFailed"),
        ]
        assert events[-1][2].startswith("p1: ")
        assert {each[3] for each in events} == {1}
        assert all(len(each[2]) <= MAX_MESSAGE_LENGTH for each in events)


async def test_repeated_transition_raises_count(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        await seen.act()
        rollout = await seen.open_start()
        for _ in range(3):
            await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/pause", {"reason": "look"})
            await seen.act()
            await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/resume", {"reason": "go"})
            await seen.act()
        counts = {each[1]: each[3] for each in seen.events()}
        assert (counts["Paused"], counts["Resumed"]) == (3, 3)


def shipped_rules() -> list[Any]:
    """Return the rules of the shipped Role."""
    documents = yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text())
    rules: list[Any] = next(each["rules"] for each in documents if each["kind"] == "Role")
    return rules


@pytest.mark.parametrize("has_events", [True, False])
async def test_shipped_role_suffices_and_events_may_lack(tmp_path: Path, has_events: bool) -> None:
    rules = [each for each in shipped_rules() if has_events or each["resources"] != ["events"]]
    async with fleet(tmp_path) as seen:
        token = seen.kubernetes.token(rules)
        cluster = Cluster("prod", seen.kubernetes.kubeconfig(tmp_path / "of-daemon", token=token))
        seen.controller.cluster = seen.cluster = cluster
        try:
            seen.apply()
            await seen.act()
            assert seen.status()["state"] == "awaiting-approval"
            assert bool(seen.events()) == has_events
        finally:
            await cluster.close()


async def test_hundred_rollouts_write_at_most_once_in_interval(tmp_path: Path) -> None:
    rounds = 3
    async with fleet(tmp_path) as seen:
        names = [f"change-{number}" for number in range(100)]
        for name in names:
            seen.apply(name, plan=PLAN.replace("name: sysctl", f"name: {name}"))
        await seen.act()
        assert len(seen.rollouts()) == len(names)
        for _ in range(rounds):
            for rollout in seen.rollouts():
                await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/pause", {"reason": "x"})
            await seen.act(STATUS_INTERVAL_S / 2)
            for rollout in seen.rollouts():
                await seen.inside.request("olga", "post", f"/v1/rollouts/{rollout}/resume", {"reason": "y"})
            await seen.act(STATUS_INTERVAL_S / 2)
        writes = Counter(
            each.name
            for each in seen.kubernetes.server.requests
            if each.full_resource == f"{RESOURCE}/status"
        )
        assert len(writes) == len(names)
        assert max(writes.values()) <= 1 + rounds


async def test_objects_of_an_hour_without_daemon_are_taken_up(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply("before", plan=PLAN.replace("name: sysctl", "name: before"))
        await seen.act()
        [first] = seen.rollouts()
        # Nothing waits for the daemon: no finalizer holds an object, no webhook refuses one.
        seen.remove("before")
        seen.apply("away", plan=PLAN.replace("name: sysctl", "name: away"))
        seen.inside.clock.advance(3600.0)
        seen.restart()
        await seen.act(3600.0)
        assert seen.inside.state.index.rollouts[first].closed
        assert seen.status("away")["rollout"] in seen.rollouts()


async def test_plan_of_900_kib_becomes_rollout(tmp_path: Path) -> None:
    notes = "\n".join(f"# {number} {'x' * 990}" for number in range(900))
    async with fleet(tmp_path) as seen:
        seen.apply(plan=f"{PLAN}\n{notes}\n")
        await seen.act()
        assert len(seen.rollouts()) == 1
        validate_status(seen.status())
