"""Disruption budgets of one cluster, from one watch that all drains share.

The API server refuses an eviction with 429 while a budget allows no disruption.  The watch reports changes,
so a drain requests only evictions that can succeed and continues at once when a budget allows more.  Without
permission to watch budgets a drain tries every eviction: the server decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rolloutd.adapters.kubernetes.api_errors import malformed_answers, require_text
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.list_watch import WatchHandler, run_list_watch
from rolloutd.adapters.kubernetes.pods import Pod
from rolloutd.ports import JSON

POLICY_GROUP = "policy/v1"

SYNC_TIMEOUT_S = 5.0
"""How long a drain waits for the first list of budgets; a server that answers lists them in milliseconds."""

EVENT_TIMEOUT_S = 2.0
"""How long an accepted eviction counts while the budget's status does not show it."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The fields of a PodDisruptionBudget on which evictions depend."""

    namespace: str
    name: str
    selector: Mapping[str, JSON] | None
    is_observed: bool = False
    allowed: int = 0
    expected: int = 0
    desired: int = 0
    healthy: int = 0
    sync_error: str = ""
    always_allows_unready: bool = False
    disrupted: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def permanent_reason(self) -> str:
        """The reason why no eviction can succeed until a person changes something; empty otherwise."""
        if not self.is_observed:
            return ""
        if self.sync_error:
            return f"the cluster cannot count its pods ({self.sync_error}); its owner must fix it"
        if self.expected == 0:
            return "it counts no pods, as over pods without a controller; its owner must use minAvailable"
        if self.desired >= self.expected:
            pods = "1 pod" if self.expected == 1 else f"{self.expected} pods"
            return (
                f"it expects {pods} and allows no disruption; "
                "its owner must add a replica or lower minAvailable"
            )
        return ""

    def allows_unready(self) -> bool:
        """Return whether a pod that is not Ready can be evicted although no disruption is left."""
        return self.always_allows_unready or self.healthy >= self.desired > 0


@malformed_answers()
def parse_budget(budget: Mapping[str, JSON]) -> Budget:
    meta, spec, status = budget["metadata"], budget.get("spec") or {}, budget.get("status") or {}
    failures = (c for c in status.get("conditions") or () if c.get("reason") == "SyncFailed")
    return Budget(
        namespace=require_text(meta["namespace"]),
        name=require_text(meta["name"]),
        selector=spec.get("selector"),
        is_observed=status.get("observedGeneration") == meta.get("generation"),
        allowed=int(status.get("disruptionsAllowed", 0)),
        expected=int(status.get("expectedPods", 0)),
        desired=int(status.get("desiredHealthy", 0)),
        healthy=int(status.get("currentHealthy", 0)),
        sync_error=next((str(c.get("message") or "no reason given") for c in failures), ""),
        always_allows_unready=spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow",
        disrupted=frozenset(status.get("disruptedPods") or ()),
    )


@dataclass(slots=True)
class _Requests:
    """Evictions under one budget that its status may not show yet.

    The server counts an eviction in `disruptedPods` before it answers; the answer and the watch's event come
    in any order.  `accepted` are pods whose answer came first, with its time, `counted` those whose event
    did.
    """

    unanswered: int = 0
    accepted: dict[str, float] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)

    def pending(self, now: float) -> int:
        """Return how many disruptions are taken beyond those that the status shows."""
        return self.unanswered + sum(now - at < EVENT_TIMEOUT_S for at in self.accepted.values())

    def on_accepted(self, pod: str, now: float) -> None:
        if pod not in self.counted:
            self.accepted[pod] = now

    def on_status(self, disrupted: frozenset[str]) -> None:
        for pod in disrupted:
            self.accepted.pop(pod, None)
        self.counted |= disrupted if self.unanswered else frozenset()


@dataclass
class BudgetWatch(WatchHandler):
    cluster: Cluster
    is_synced: bool = False
    _budgets: dict[str, dict[str, Budget]] = field(default_factory=dict)
    _requests: dict[str, _Requests] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _users: int = 0
    _watch: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[BudgetWatch]:
        """Run the watch while at least one drain has it open."""
        self._users += 1
        if self._watch is None:
            self._watch = asyncio.create_task(self._run(), name=f"budgets {self.cluster.name}")
        try:
            # Without the right to list budgets this times out, and the server judges each eviction.
            if not self.is_synced:
                await self.wait_for_change(SYNC_TIMEOUT_S)
            yield self
        finally:
            self._users -= 1
            if not self._users:
                if self._watch is not None:
                    self._watch.cancel()
                self._reset()

    def covering(self, pod: Pod) -> list[Budget]:
        candidates = self._budgets.get(pod.namespace, {}).values()
        return [each for each in candidates if selector_matches(each.selector, pod.labels)]

    def blockers(self, pod: Pod) -> list[Budget]:
        """Return the budgets that refuse the pod's eviction now; none if the eviction can be requested."""
        covering = self.covering(pod)
        # The API server refuses every eviction of a pod with two budgets, whatever they allow.
        if len(covering) != 1:
            return covering
        [budget] = covering
        if pod.bypasses_budget or (not pod.is_ready and budget.is_observed and budget.allows_unready()):
            return []
        requests = self._requests.get(budget.id, _Requests())
        left = budget.allowed - requests.pending(asyncio.get_running_loop().time())
        return [] if budget.is_observed and left > 0 else covering

    def count_request(self, pod: Pod) -> Callable[[bool], None]:
        """Count an eviction against the pod's budget; return a function to call with whether it succeeded."""
        covering = self.covering(pod)
        requests = self._requests.setdefault(covering[0].id, _Requests()) if covering else _Requests()
        requests.unanswered += 1

        def finish(is_accepted: bool) -> None:
            requests.unanswered -= 1
            if is_accepted:
                requests.on_accepted(pod.name, asyncio.get_running_loop().time())
            # With no request unanswered, no answer can follow its event any more.
            if not requests.unanswered:
                requests.counted.clear()
            if covering:
                self._notify()  # the event of this eviction may have come before its answer

        return finish

    async def wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def parse(self, obj: Mapping[str, JSON]) -> Budget:
        return parse_budget(obj)

    def on_list(self, objects: Sequence[Budget]) -> None:
        self._budgets.clear()
        for requests in self._requests.values():
            requests.accepted.clear()
        for each in objects:
            self._store(each)
        self.is_synced = True
        self._notify()

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        if kind == "DELETED":
            self._budgets.get(obj["metadata"]["namespace"], {}).pop(obj["metadata"]["name"], None)
        else:
            self._store(parse_budget(obj))
        self._notify()

    def on_connected(self) -> None:
        # A watch that continues from a known version is not preceded by a list.
        self.is_synced = True

    def on_disconnected(self, reason: str) -> None:
        """Keep the budgets: the next watch continues from their version."""
        self.is_synced = False
        self._notify()

    def _store(self, budget: Budget) -> None:
        self._budgets.setdefault(budget.namespace, {})[budget.name] = budget
        if budget.id in self._requests:
            self._requests[budget.id].on_status(budget.disrupted)

    def _notify(self) -> None:
        # A waiter holds the event that was current when it began, so it misses no change and sees none twice.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        try:
            path = api_path("poddisruptionbudgets", group=POLICY_GROUP)
            await run_list_watch(self.cluster, path, {}, self)
        finally:
            # A cancelled watch may end after its successor began, whose budgets are not its own.
            if self._watch is asyncio.current_task():
                self._reset()

    def _reset(self) -> None:
        self._watch, self.is_synced = None, False
        self._budgets.clear()
        self._requests.clear()
        self._notify()


@malformed_answers()
def selector_matches(selector: Mapping[str, JSON] | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects these labels; an empty selector selects everything."""
    if selector is None:
        return False
    required = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in required.items()):
        return False
    return all(
        _expression_matches(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def _expression_matches(expression: Mapping[str, JSON], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return False
