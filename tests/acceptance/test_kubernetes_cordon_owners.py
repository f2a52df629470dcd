"""Whose hand is on a node: people cordon, uncordon, annotate and hold while the real daemon is at work.

What a person took stays theirs; what rolloutd took goes back once nobody holds
it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from rolloutd.adapters.kubernetes.cluster import FIELD_MANAGER
from rolloutd.adapters.kubernetes.nodes import HOLD_ANNOTATION, ISOLATED_BY_ANNOTATION, KEPT_FOR_ANNOTATION
from tests.support.cluster_environment import (
    ClusterEnvironment,
    cluster_environment,
    hold_drain,
    is_cordoned,
    is_in_progress,
    pods_of,
    single_node_wave,
)
from tests.support.fake_kubernetes.server import ApiRequest
from tests.support.waiting import wait_in_loop_until

JSON = Any
Where = pytest.TempPathFactory

pytestmark = pytest.mark.servers

WHY = "the disk is being looked at"


async def test_held_by_rolloutctl_while_it_is_drained(tmp_path_factory: Where) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        before = await cordon_owner_view(made, node)
        await hold_drain(made, node)
        rollout = await made.submit("held", canary=single_node_wave(node))
        await made.wait_until(lambda: is_cordoned(made, node), "it is cordoned")
        await made.wait_until(lambda: drain_is_held(made, rollout, node), "its drain waits for the budget")

        told = await made.rolloutctl("why", rollout, node)
        assert f"is held by budget {made.sandbox.namespace}/db: needs 1 healthy, has 1 (pod of " in told
        assert "the isolation is aborted and tried later" in told

        said = await made.rolloutctl("hold", node, "--reason", WHY)
        assert "held as person/" in said
        assert f", once {rollout} finishes its work there" in said

        await made.wait_until(
            lambda: made.daemon.nodes(rollout)[node]["phase"] == "pending", "it is put back"
        )
        await stays_for(made, node)
        assert len(pods_of(made, node)) == 1
        assert made.daemon.spans() == []
        assert (await made.in_thread(made.daemon.status, rollout))["state"] == "running"
        why = await made.rolloutctl("why", rollout, node)
        assert "is held by" in why
        assert WHY in why
        locks = await made.rolloutctl("locks")
        assert f"held: {node} as person/" in locks
        assert WHY in locks

        await made.rolloutctl("release", node)
        await has_cordon_owner_view(made, node, before)


@pytest.mark.parametrize("how", [pytest.param("rolloutctl", marks=pytest.mark.long), "annotation"])
async def test_held_while_its_playbook_runs_it_finishes_and_stays(tmp_path_factory: Where, how: str) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        before = await cordon_owner_view(made, node)
        made.daemon.pause_playbooks()
        rollout = await made.submit("held", canary=single_node_wave(node), soak="1h")
        await made.wait_until(made.daemon.spans, "the playbook runs")

        if how == "rolloutctl":
            await made.rolloutctl("hold", node, "--reason", WHY)
        else:
            await made.sandbox.annotate(node, HOLD_ANNOTATION, WHY)
        made.daemon.resume_playbooks()

        await made.wait_until(lambda: made.daemon.nodes(rollout)[node]["phase"] == "done", "it is done")
        [span] = made.daemon.spans()
        assert span.end is not None
        await stays_for(made, node)
        locks = await made.rolloutctl("locks", "--json")
        assert WHY in locks

        await made.in_thread(made.daemon.kill_daemon)
        await made.in_thread(made.daemon.start_daemon)
        if how == "rolloutctl":
            await made.rolloutctl("release", node)
        else:
            await made.sandbox.annotate(node, HOLD_ANNOTATION, None)
        await has_cordon_owner_view(made, node, before)


async def test_a_kept_node_that_somebody_cordons_anew_is_theirs(tmp_path_factory: Where) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        made.daemon.pause_playbooks()
        rollout = await made.submit("held", canary=single_node_wave(node), soak="1h")
        await made.wait_until(made.daemon.spans, "the playbook runs")
        await made.rolloutctl("hold", node, "--reason", WHY)
        made.daemon.resume_playbooks()
        await made.wait_until(lambda: made.daemon.nodes(rollout)[node]["phase"] == "done", "it is done")
        await made.sandbox.cordon(node, unschedulable=False)
        await made.sandbox.cordon(node)

        await made.rolloutctl("release", node)

        await made.wait_until(lambda: KEPT_FOR_ANNOTATION not in notes(made, node), "our note is gone")
        assert is_cordoned(made, node)
        assert "cordoned by kubectl" in await made.rolloutctl("locks", "--json")


async def test_cordoned_between_our_look_and_our_cordon(tmp_path_factory: Where) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        await made.sandbox.workload("web", [node])
        overtaken: list[str] = []

        def overtake(asked: ApiRequest) -> Awaitable[JSON] | None:
            if overtaken or not writes(asked, node):
                return None
            overtaken.append(node)
            return made.sandbox.cordon(node)

        made.kubernetes.server.interceptors.append(overtake)
        rollout = await made.submit("beaten", canary=single_node_wave(node), isolate=drain_within("3s"))

        await made.wait_until(lambda: overtaken, "its cordon was written by somebody else")
        await made.wait_until(
            lambda: made.daemon.nodes(rollout)[node]["phase"] == "pending", "it is put back"
        )
        assert overtaken == [node]
        await stays_theirs(made, node)
        assert len(pods_of(made, node)) == 1
        assert "cordoned by kubectl" in await made.rolloutctl("why", rollout, node)


async def test_uncordoned_and_cordoned_again_during_our_attempt(tmp_path_factory: Where) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        await hold_drain(made, node)
        rollout = await made.submit("beaten", canary=single_node_wave(node), isolate=drain_within("10s"))
        await made.wait_until(lambda: is_cordoned(made, node), "it is cordoned")
        over = asyncio.Event()

        def hold_back(asked: ApiRequest) -> Awaitable[JSON] | None:
            return over.wait() if writes(asked, node) else None

        made.kubernetes.server.interceptors.append(hold_back)
        await made.sandbox.cordon(node, unschedulable=False)
        await made.sandbox.cordon(node)
        over.set()

        await made.wait_until(
            lambda: not is_in_progress(made.daemon.nodes(rollout)[node]), "its attempt has ended"
        )
        await stays_theirs(made, node)
        assert (await made.in_thread(made.daemon.status, rollout))["failed"] == 0


async def test_removed_annotation_hands_node_over_after_playbook(
    tmp_path_factory: Where,
) -> None:
    async with cluster_environment(tmp_path_factory.mktemp("k"), 2) as made:
        node = made.nodes[0]
        made.daemon.pause_playbooks()
        rollout = await made.submit("bare", canary=single_node_wave(node), soak="1h")
        await made.wait_until(made.daemon.spans, "the playbook runs")
        await made.sandbox.annotate(node, ISOLATED_BY_ANNOTATION, None)
        made.daemon.resume_playbooks()

        await made.wait_until(
            lambda: not is_in_progress(made.daemon.nodes(rollout)[node]), "its attempt has ended"
        )
        assert made.daemon.nodes(rollout)[node]["outcome"] == "changed"
        assert made.daemon.spans()[0].end is not None
        await stays_theirs(made, node)
        assert "our annotation was removed" in await made.rolloutctl("locks", "--json")


# -- what is looked at ------------------------------------------------------------


def writes(asked: ApiRequest, node: str) -> bool:
    """Whether rolloutd is about to write to the node."""
    return asked.verb == "patch" and asked.name == node and asked.manager == FIELD_MANAGER


def drain_within(limit: str) -> JSON:
    """Return an isolation that is given up soon."""
    return [{"kubernetes": {"drain_timeout": limit}}]


def drain_is_held(made: ClusterEnvironment, rollout: str, node: str) -> bool:
    """Whether a pass of the drain has ended because of a budget."""
    records = made.daemon.client.get(f"/v1/rollouts/{rollout}/nodes/{node}")
    return "is held by budget" in str(records["steps"])


def notes(made: ClusterEnvironment, node: str) -> dict[str, str]:
    """Return the node's annotations, by the server's own books."""
    found = made.kubernetes.server.objects.get("nodes", "", node)
    return dict(found["metadata"].get("annotations") or {})


async def cordon_owner_view(made: ClusterEnvironment, node: str) -> JSON:
    """Return what people and controllers set of a node."""
    found = await made.sandbox.get_node(node)
    return found["spec"], found["metadata"].get("annotations") or {}, found["metadata"]["labels"]


async def has_cordon_owner_view(made: ClusterEnvironment, node: str, before: JSON) -> None:
    """Wait until the node is exactly as it was."""

    async def same() -> bool:
        return bool(await cordon_owner_view(made, node) == before)

    await wait_in_loop_until(same)


async def stays_for(made: ClusterEnvironment, node: str) -> None:
    """Assert that the node is cordoned, and says for whom."""
    found = notes(made, node)
    assert is_cordoned(made, node)
    assert ISOLATED_BY_ANNOTATION not in found
    assert WHY in found[KEPT_FOR_ANNOTATION]


async def stays_theirs(made: ClusterEnvironment, node: str) -> None:
    """Assert that the cordon on the node is somebody else's alone."""
    assert is_cordoned(made, node)
    assert not {ISOLATED_BY_ANNOTATION, KEPT_FOR_ANNOTATION} & notes(made, node).keys()
