"""Fuzz target of a Kubernetes API server's answers: lists, watches, and errors, through the real client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rolloutd.adapters.kubernetes.api_errors import parse_error
from rolloutd.adapters.kubernetes.budgets import parse_budget, selector_matches
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.list_watch import ListWatch
from rolloutd.adapters.kubernetes.node_pods import list_pods_on
from rolloutd.adapters.kubernetes.node_watch import NodeWatch
from rolloutd.adapters.kubernetes.pods import EvictionPolicy, plan_drain, terminating_text
from rolloutd.errors import RolloutdError
from tests.fuzz.cluster_answers import CLUSTER_ANSWERS, ClusterAnswers, part_of
from tests.fuzz.engine import Consumer, encoded

NODE = {
    "metadata": {
        "name": "w1",
        "uid": "u1",
        "resourceVersion": "7",
        "labels": {"team": "a"},
        "annotations": {
            "rolloutd/isolated-by": '{"rollout": "R", "attempt": 1, "since": "x"}',
            "rolloutd/hold": "h",
        },
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}],
    },
    "spec": {
        "unschedulable": True,
        "taints": [{"key": "a", "effect": "NoSchedule"}],
        "providerID": "aws:///i-1",
    },
    "status": {
        "conditions": [
            {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z", "message": "m"}
        ],
        "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
        "nodeInfo": {"bootID": "b", "kubeletVersion": "v1.31"},
    },
}
POD = {
    "metadata": {
        "namespace": "default",
        "name": "p",
        "uid": "u",
        "labels": {"app": "a"},
        "ownerReferences": [{"kind": "DaemonSet", "name": "d", "controller": True}],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 30,
    },
    "spec": {"volumes": [{"name": "v", "emptyDir": {}}]},
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}
BUDGET = {
    "metadata": {"namespace": "default", "name": "b", "generation": 1},
    "spec": {
        "selector": {
            "matchLabels": {"app": "a"},
            "matchExpressions": [
                {"key": "app", "operator": "In", "values": ["a"]},
                {"key": "x", "operator": "Exists"},
            ],
        },
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    },
    "status": {
        "observedGeneration": 1,
        "disruptionsAllowed": 1,
        "expectedPods": 3,
        "desiredHealthy": 2,
        "currentHealthy": 3,
        "conditions": [{"reason": "SyncFailed", "message": "m"}],
    },
}
STATUS = {
    "kind": "Status",
    "code": 429,
    "reason": "TooManyRequests",
    "message": "m",
    "details": {"causes": [{"reason": "DisruptionBudget", "message": "m"}], "retryAfterSeconds": 10},
}


def answer(kind: str, *items: Any) -> Any:
    return {"kind": kind, "answer": {"metadata": {"resourceVersion": "1"}, "items": list(items)}}


KUBERNETES = encoded(
    answer("nodes", NODE)
    | {"events": [{"type": "MODIFIED", "object": NODE}, {"type": "DELETED", "object": NODE}]},
    answer("nodes") | {"events": [{"type": "BOOKMARK", "object": NODE}, {"type": "ERROR", "object": STATUS}]},
    answer("pods", POD, POD),
    answer("budgets", BUDGET),
    {"kind": "error", "answer": STATUS},
    *CLUSTER_ANSWERS,
)


class CannedStream:
    """The content of an answer, which aiohttp offers in parts and in lines."""

    def __init__(self, body: bytes, lines: Sequence[bytes]) -> None:
        self._body, self._lines = body, lines

    async def read(self, n: int, /) -> bytes:
        part, self._body = self._body[:n], self._body[n:]
        return part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            yield line


class CannedResponse:
    """One answer of an API server: a body, or the lines of a watch."""

    status, reason, headers, connection = 200, "", dict[str, str](), None

    def __init__(self, body: bytes, lines: Sequence[bytes]) -> None:
        self._body, self._lines = body, lines

    async def __aenter__(self) -> CannedResponse:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def content(self) -> CannedStream:
        return CannedStream(self._body, self._lines)


class CannedCluster(Cluster):
    """A cluster whose API server gives one answer, and these events to a watch."""

    def __init__(self, body: bytes, lines: Sequence[bytes]) -> None:
        super().__init__("ams", "/nonexistent")
        self._response = CannedResponse(body, lines)
        self.rest_client = self.configuration = self
        self.host = "https://ams"

    async def _client(self) -> Any:
        return self

    async def _refresh_credentials(self, api: object) -> None:
        pass

    async def update_params_for_auth(self, *_: object) -> None:
        pass

    async def request(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        """Stand for the cluster's method, and for the client that it calls."""
        if "_preload_content" in options:
            return self._response
        return await super().request(method, path, *arguments, **options)


class RoutedCluster(CannedCluster):
    """A management cluster that answers each path with a part of the input."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        super().__init__(b"", [])
        self._found = found

    async def request(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        if "_preload_content" not in options:
            self._response = CannedResponse(json.dumps(part_of(self._found, path)).encode(), [])
        return await super().request(method, path, *arguments, **options)


@asynccontextmanager
async def kubernetes(directory: Path) -> AsyncIterator[Consumer]:
    clusters = ClusterAnswers(directory)

    class Now:
        def now(self) -> float:
            return 1.0

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    async def consumer(data: bytes) -> None:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            parse_error(500, "Internal", data.decode(errors="replace"), {})
            found, body, lines = {}, data, [data]
        else:
            events = found.get("events")
            body = json.dumps(found.get("answer")).encode()
            lines = [json.dumps(each).encode() for each in (events if isinstance(events, list) else ())]
        cluster = CannedCluster(body, lines)
        with contextlib.suppress(RolloutdError):
            match found.get("kind"):
                case "pods":
                    pods = await list_pods_on(cluster, "w1")
                    plan = plan_drain(pods, EvictionPolicy())
                    terminating_text(plan.terminating)
                case "budgets":
                    for each in (await cluster.list("/budgets")).items:
                        budget = parse_budget(each)
                        budget.allows_unready()
                        selector_matches(budget.selector, {"app": "a"})
                case "clusters" | "profiles" as kind:
                    await clusters.watch(cluster, kind)
                case "module":
                    kind = found["answer"].get("kind") if isinstance(found.get("answer"), dict) else ""
                    await clusters.run(RoutedCluster(found), kind)
                case "error":
                    parse_error(429, "", json.dumps(found.get("answer")), {"Retry-After": "x"})
                case _:
                    watch = NodeWatch(cluster, Now())
                    await ListWatch(cluster, "/nodes", {}, watch).list_and_watch()
                    watch.observe("w1")

    yield consumer
