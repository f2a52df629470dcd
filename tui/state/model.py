"""The console's model: the daemon's responses, and the audit entries after them.

Each response names the audit entry up to which it is valid.  The model takes it
as a base, applies later entries to it, and ignores earlier ones.  So responses
and stream may arrive in any order: the model drops an entry that comes twice,
detects a missing one by its number, and the next response repairs whatever was
lost.  What the daemon derives from its facts (state, reasons, ETA, missing votes)
the model never derives: it only requests it again.

No Textual, no threads, no clock: times come from the responses and the entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolloutd.audit_names import with_current_names
from rolloutd.control import wire, wire_fleet, wire_plans
from tui.state.history import History
from tui.state.values import (
    BUSY_PHASES,
    CLOSED_STATES,
    InFlightNode,
    NodesSnapshot,
    NodeState,
    RolloutState,
    parse_in_flight_node,
    parse_pool,
    parse_timestamp,
    reason_key,
    remedy_deadline,
)

MAX_ENTRIES = 4_096
"""Entries kept for responses that are older than they are: four seconds at a thousand a second, and
a response takes less."""

MAX_TRACKED_ROLLOUTS = 3
"""Rollouts whose nodes are kept: the one on the screen and the two before it."""

MAX_PLANS = 64

MAX_REVIEWS = 8
"""Reviews kept: each has the text of playbooks."""

REFRESH_INTERVAL_S = 10.0
"""Between two requests for what time alone changes: no event announces an observation that grows old."""

WORK_INTERVAL_S = 0.5
"""The same for the status alone while nodes are in flight: the work that is left changes with time."""

OVERDUE_INTERVAL_S = 1.0
"""The same while a shown deadline has passed: the daemon has not confirmed yet what it ends."""

COUNTER_BY_OUTCOME = {
    "changed": "done",
    "already-current": "done",
    "skipped": "skipped",
    "rolled-back": "skipped",
}
"""The counter of a done node by outcome; a node that left is in none."""

_COUNTERS = ("total", "done", "failed", "skipped", "rolled_back", "pending")

_IDLE_PHASES = frozenset({"pending", "done"})

_NODE_EVENTS = frozenset(
    {
        "PhaseMoved",
        "TargetsJoined",
        "TargetChanged",
        "NodeOrdered",
        "NodeAdvanced",
        "PreparationRecorded",
        "ArtifactsBuilt",
    }
)
"""Events that change counts, reasons or the order of a rollout's nodes."""

_GATE_EVENTS = frozenset({"VoteCast", "VoteWithdrawn", "GateOpened"})

_LOCK_EVENTS = frozenset({"HoldTaken", "HoldReleased", "FreezeStarted", "FreezeLifted", "DaemonStarted"})

_ROLLOUT_EVENTS = frozenset(
    {"RolloutOpened", "RolloutPaused", "RolloutResumed", "RolloutCancelled", "RolloutEnded", "RolloutDeleted"}
)


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A resource to fetch; urgent where a user waits for it."""

    resource: str
    rollout: str = ""
    is_urgent: bool = False


class Model:
    """Everything the console shows."""

    def __init__(self) -> None:
        self.seq = -1
        self.last_received_seq = -1
        self.closed_rollouts: list[wire.RolloutLine] = []
        self.rollouts: dict[str, RolloutState] = {}
        self.daemon_error: str | None = None
        self.health: wire_fleet.Health | None = None
        self.current_user: wire_fleet.WhoAmI | None = None
        self.settings: wire_fleet.SettingsSummary | None = None
        self.locks: wire_fleet.Locks | None = None
        self.plans: dict[str, wire_plans.PlanContent] = {}
        self.histories: dict[str, History] = {}
        self.reviews: dict[str, wire_plans.Review] = {}
        self.entries: deque[Mapping[str, Any]] = deque(maxlen=MAX_ENTRIES)
        self.version = 0
        self.fetch_requests: dict[tuple[str, str], FetchRequest] = {}
        self.status_at: float | None = None
        self._tracked_rollouts: list[str] = []
        self._refreshed_at: float | None = None

    # -- responses

    def apply_status(self, status: wire.Status, at: float | None = None) -> None:
        """Apply the status of all live rollouts, requested at `at`."""
        seq = status["seq"]
        self.status_at = at
        if self.last_received_seq < 0:
            self.last_received_seq = seq
        if not self._has_entries_since(seq):
            self._add_fetch_request("status")
        self.daemon_error = status["trouble"]
        reported = {each["rollout"] for each in status["rollouts"]}
        for each in status["rollouts"]:
            self._apply_rollout_status(each, seq)
        for known in list(self.rollouts.values()):
            if known.id in reported or known.seq > seq:
                continue
            if known.id not in self._tracked_rollouts:
                del self.rollouts[known.id]
            elif not known.is_closed:
                self._add_fetch_request("rollout", known.id)
        self.seq = max(self.seq, seq)
        self.version += 1

    def apply_rollout(self, status: wire.Rollout, seq: int) -> None:
        """Apply the status of one rollout at entry `seq` or later; `status` omits closed rollouts."""
        self._apply_rollout_status(status, seq)
        self._add_fetch_request("nodes", status["rollout"], is_urgent=True)
        self.version += 1

    def apply_nodes(self, rollout: str, snapshot: NodesSnapshot) -> None:
        known = self.rollouts.get(rollout)
        if known is None:
            return
        if not self._has_entries_since(snapshot.seq):
            self._add_fetch_request("nodes", rollout)
        known.nodes, known.node_deadlines = snapshot.nodes, snapshot.deadlines
        for entry in self._entries_after(snapshot.seq, rollout):
            self._apply_to_node(known, known.nodes, entry)
        self._fill_pools(known)
        self._set_in_flight(known, known.in_flight)
        self.version += 1

    def apply_locks(self, locks: wire_fleet.Locks) -> None:
        if any(entry["event"] in _LOCK_EVENTS for entry in self._entries_after(locks["seq"], None)):
            self._add_fetch_request("locks")
        self.locks = locks
        self.version += 1

    def apply_plan(self, rollout: str, plan: wire_plans.PlanContent) -> None:
        while len(self.plans) >= MAX_PLANS:
            del self.plans[next(iter(self.plans))]
        self.plans[rollout] = plan
        self.version += 1

    def apply_review(self, rollout: str, review: wire_plans.Review) -> None:
        while len(self.reviews) >= MAX_REVIEWS:
            del self.reviews[next(iter(self.reviews))]
        self.reviews[rollout] = review
        self.version += 1

    def apply_closed_rollouts(self, rollouts: wire.Rollouts) -> None:
        """Keep the closed ones of all rollouts, the latest first."""
        self.closed_rollouts = [each for each in rollouts["rollouts"] if each["state"] in CLOSED_STATES]
        self.version += 1

    def reset(self) -> None:
        """Forget everything: the daemon serves another database."""
        self.__init__()  # type: ignore[misc]

    # -- the stream

    def apply_stream_lines(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Apply lines of the event stream, in any order and any number of times."""
        for line in lines:
            entry = line.get("entry")
            if entry is not None:
                self._apply_entry(line["seq"], entry)
            elif "progress" in line:
                self._apply_progress(line["progress"])
            elif 0 <= self.last_received_seq < line.get("heartbeat", -1):
                self.last_received_seq = line["heartbeat"]
                self._mark_lost()
        self.version += 1

    def track_nodes(self, rollout: str) -> None:
        """Keep a rollout's nodes from now on, and fetch them if they are unknown."""
        if rollout in self._tracked_rollouts:
            self._tracked_rollouts.remove(rollout)
        self._tracked_rollouts.append(rollout)
        if rollout not in self.plans:
            self._add_fetch_request("plan", rollout)
        for old in self._tracked_rollouts[:-MAX_TRACKED_ROLLOUTS]:
            self.histories.pop(old, None)
            evicted = self.rollouts.get(old)
            if evicted is not None:
                evicted.nodes, evicted.node_deadlines = None, frozenset()
                for pool in evicted.pools.values():
                    pool.nodes = []
        del self._tracked_rollouts[:-MAX_TRACKED_ROLLOUTS]
        known = self.rollouts.get(rollout)
        if known is None:
            self._add_fetch_request("rollout", rollout, is_urgent=True)
        if known is None or known.nodes is None:
            self._add_fetch_request("nodes", rollout, is_urgent=True)

    def history(self, rollout: str) -> History:
        """Return the history of a tracked rollout; a new one begins now and waits for earlier entries."""
        if rollout not in self.histories:
            self.histories[rollout] = History(rollout, self.last_received_seq + 1)
        return self.histories[rollout]

    def request_fetch(self, resource: str, rollout: str = "") -> None:
        """Request a resource that a user waits for."""
        self._add_fetch_request(resource, rollout, is_urgent=True)

    def _mark_lost(self) -> None:
        """Request everything again after the stream lost entries."""
        self.histories.clear()
        self.mark_stale()

    def mark_stale(self, *, is_urgent: bool = True) -> None:
        """Request everything on the screen again."""
        self._add_fetch_request("status", is_urgent=is_urgent)
        self._add_fetch_request("locks", is_urgent=is_urgent)
        for rollout in self._tracked_rollouts:
            self._add_fetch_request("nodes", rollout, is_urgent=is_urgent)

    def refresh(self, now: float) -> None:
        """Request what time may have changed: at once when a shown deadline passes, else at intervals."""
        if self._refreshed_at is None:
            self._refreshed_at = now if self.status_at is None else self.status_at
        passed = [at for at in self._shown_deadlines() if at <= now]
        has_just_passed = any(at > self._refreshed_at for at in passed)
        interval = OVERDUE_INTERVAL_S if passed else REFRESH_INTERVAL_S
        if has_just_passed or now - self._refreshed_at >= interval:
            self._refreshed_at = now
            self.mark_stale(is_urgent=has_just_passed)
        is_working = any(known.in_flight and not known.is_closed for known in self.rollouts.values())
        if is_working and (self.status_at is None or now - self.status_at >= WORK_INTERVAL_S):
            self._add_fetch_request("status")

    def _shown_deadlines(self) -> Iterator[float]:
        locks = self.locks
        ends = [each["until"] for each in (*locks["freezes"], *locks["holds"])] if locks is not None else []
        for known in self.rollouts.values():
            if not known.is_closed:
                reason = known.status["reason"]
                ends += [known.status["eta"], None if reason is None else remedy_deadline(reason)]
                yield from known.node_deadlines
        yield from (at for at in map(parse_timestamp, ends) if at is not None)

    # -- entries

    def _apply_entry(self, seq: int, entry: Mapping[str, Any]) -> None:
        if seq <= self.last_received_seq:
            return
        if 0 <= self.last_received_seq < seq - 1:
            self._mark_lost()
        entry = with_current_names(entry)
        self.entries.append(entry)
        for history in self.histories.values():
            history.add_entry(entry)
        self.last_received_seq = seq
        self.seq = max(self.seq, seq)
        event = entry["event"]
        if event in _LOCK_EVENTS:
            self._add_fetch_request("locks", is_urgent=True)
        if event in _ROLLOUT_EVENTS:
            self._add_fetch_request("closed")
        if event in _ROLLOUT_EVENTS or event in _GATE_EVENTS or event in _LOCK_EVENTS:
            # Votes, pauses and freezes change the reasons of nodes that have no event of their own.
            self._add_fetch_request("status", is_urgent=True)
            for rollout in self._tracked_rollouts:
                if entry["rollout"] in (None, rollout):
                    self._add_fetch_request("nodes", rollout, is_urgent=True)
        known = self.rollouts.get(entry["rollout"] or "")
        if known is None:
            return
        has_isolation_changed = event == "StepRecorded" and entry["fields"]["isolated"] is not None
        if has_isolation_changed or event in _NODE_EVENTS:
            self._add_fetch_request("status")
            if known.nodes is not None:
                self._add_fetch_request("nodes", known.id)
        self._apply_to_rollout(known, entry)

    def _apply_to_rollout(self, known: RolloutState, entry: Mapping[str, Any]) -> None:
        """Apply one entry to the responses about a rollout that are older than the entry."""
        if known.nodes is not None:
            self._apply_to_node(known, known.nodes, entry)
        if entry["seq"] > known.seq:
            self._apply_to_counts(known, entry)
        if entry["event"] in _GATE_EVENTS and known.id in self.reviews:
            # A vote changes what the user's own approval still gives.
            self._add_fetch_request("review", known.id, is_urgent=True)
        if known.is_closed and known.id in self._tracked_rollouts:
            # The status omits it, and its reason names the nodes without the change.
            self._add_fetch_request("rollout", known.id)
        known.version += 1

    def _apply_to_node(
        self, known: RolloutState, nodes: Mapping[str, NodeState], entry: Mapping[str, Any]
    ) -> None:
        node = nodes.get(entry["node"] or "")
        if node is None or entry["seq"] <= node.seq:
            return
        fields = entry["fields"]
        match entry["event"]:
            case "PhaseMoved":
                node.phase, node.outcome = fields["target"], fields["outcome"]
                node.attempt, node.since = fields["attempt"], fields["at"]
                node.reason = None
                failure = fields["failure"]
                node.failure = "" if failure is None else f"{failure['step']}: {failure['message']}"
                if fields["trigger"] in ("admitted", "rollback-ordered"):
                    node.admitted_at = fields["at"]
                if fields["isolated"] is not None:
                    node.isolated = fields["isolated"]
            case "StepRecorded":
                if fields["isolated"] is not None:
                    node.isolated = fields["isolated"]
            case "TargetChanged":
                node.team, node.pools = fields["team"], tuple(fields["pools"])
            case _:
                return
        for pool in node.pools:
            if pool in known.pools:
                known.pools[pool].version += 1

    def _apply_to_counts(self, known: RolloutState, entry: Mapping[str, Any]) -> None:
        fields = entry["fields"]
        match entry["event"]:
            case "PhaseMoved":
                self._count_transition(known, entry["node"], fields)
            case "StepRecorded" if (work := known.in_flight.get(entry["node"])) is not None:
                if fields["state"] == "intended":
                    work.begin(fields["step"])
            case "RolloutPaused" | "RolloutCancelled" as event:
                state: Literal["paused", "cancelled"] = "paused" if event == "RolloutPaused" else "cancelled"
                known.status = {**known.status, "state": state}
            case "RolloutEnded":
                known.status = {**known.status, "state": "done", "reason": None}
            case _:
                pass

    def _count_transition(self, known: RolloutState, name: str, fields: Mapping[str, Any]) -> None:
        node = known.nodes.get(name) if known.nodes is not None else None
        in_flight = known.in_flight.get(name)
        pools = node.pools if node is not None else in_flight.pools if in_flight is not None else ()
        self._adjust_counts(known, pools, _counter_of(fields["source"], "changed"), -1)
        self._adjust_counts(known, pools, _counter_of(fields["target"], fields["outcome"]), +1)
        if fields["outcome"] == "rolled-back":  # counted as skipped too, as in the daemon
            known.counts["rolled_back"] += 1
        if node is not None and node.isolated:
            # An isolated node uses its slots also while it is neither in flight nor failed.
            self._count_idle_isolation(known, pools, fields)
        if fields["outcome"] == "left":
            known.counts["total"] -= 1
            for pool in (known.pools[name] for name in pools if name in known.pools):
                pool.total -= 1
        if fields["target"] in BUSY_PHASES:
            if in_flight is None:
                known.in_flight[name] = InFlightNode(
                    name, pools, fields["target"], fields["at"], started_at=fields["at"]
                )
            else:
                in_flight.phase, in_flight.since = fields["target"], fields["at"]
        else:
            known.in_flight.pop(name, None)
        if fields["target"] == "done":
            known.recent_completions.append(fields["at"])

    def _count_idle_isolation(
        self, known: RolloutState, pools: Iterable[str], fields: Mapping[str, Any]
    ) -> None:
        delta = (fields["target"] in _IDLE_PHASES) - (fields["source"] in _IDLE_PHASES)
        for pool in (known.pools[name] for name in pools if name in known.pools):
            pool.other_down = max(0, pool.other_down + delta)

    def _adjust_counts(self, known: RolloutState, pools: Iterable[str], counter: str, delta: int) -> None:
        if counter in known.counts:
            known.counts[counter] += delta
        for name in pools:
            pool = known.pools.get(name)
            if pool is not None and counter in ("done", "failed", "skipped", "in_flight"):
                setattr(pool, counter, getattr(pool, counter) + delta)

    def _apply_progress(self, in_flight: Sequence[Mapping[str, Any]]) -> None:
        by_rollout: dict[str, dict[str, InFlightNode]] = {}
        for each in in_flight:
            by_rollout.setdefault(each["rollout"], {})[each["node"]] = parse_in_flight_node(each)
        for known in self.rollouts.values():
            self._set_in_flight(known, by_rollout.get(known.id, {}))

    def _set_in_flight(self, known: RolloutState, in_flight: dict[str, InFlightNode]) -> None:
        for name, work in in_flight.items():
            before = known.in_flight.get(name)
            node = known.nodes.get(name) if known.nodes is not None else None
            known_since = before.started_at if before is not None else None
            work.started_at = node.admitted_at if node is not None else known_since
        known.in_flight = in_flight
        known.version += 1

    # -- rollouts and pools

    def _apply_rollout_status(self, status: wire.Rollout, seq: int) -> None:
        known = self.rollouts.get(status["rollout"])
        if known is None:
            known = self.rollouts[status["rollout"]] = RolloutState(status["rollout"], status, seq)
        elif seq < known.seq:
            return
        old, new = known.status["reason"], status["reason"]
        if (old and reason_key(old)) != (new and reason_key(new)) and known.nodes is not None:
            # The nodes wait for the rollout's reason, and time may have changed it without an event.
            self._add_fetch_request("nodes", known.id, is_urgent=True)
        known.status, known.seq = status, seq
        known.counts = {name: status[name] for name in _COUNTERS}  # type: ignore[literal-required]
        known.counts["in_flight"] = len(status["in_flight"])
        self._set_in_flight(known, {each["node"]: parse_in_flight_node(each) for each in status["in_flight"]})
        self._set_pools(known, status["pools"])
        for entry in self._entries_after(seq, known.id):
            self._apply_to_counts(known, entry)
        known.version += 1

    def _set_pools(self, known: RolloutState, pools: Sequence[wire.Pool]) -> None:
        before = known.pools
        known.pools = {}
        for each in pools:
            old = before.get(each["pool"])
            known.pools[each["pool"]] = pool = parse_pool(each)
            if old is not None:
                pool.nodes, pool.version = old.nodes, old.version
        if known.nodes is not None and before.keys() != known.pools.keys():
            self._fill_pools(known)

    def _fill_pools(self, known: RolloutState) -> None:
        assert known.nodes is not None
        for pool in known.pools.values():
            pool.nodes = []
            pool.version += 1
        for node in known.nodes.values():
            for name in node.pools:
                if name in known.pools:
                    known.pools[name].nodes.append(node)

    # -- bookkeeping

    def _has_entries_since(self, seq: int) -> bool:
        """Return whether the model still has every received entry after `seq`."""
        return (
            seq >= self.last_received_seq
            or len(self._entries_after(seq, None)) == self.last_received_seq - seq
        )

    def _entries_after(self, seq: int, rollout: str | None) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for entry in reversed(self.entries):
            if entry["seq"] <= seq:
                break
            if rollout in (None, entry["rollout"]):
                found.append(entry)
        return found[::-1]

    def _add_fetch_request(self, resource: str, rollout: str = "", *, is_urgent: bool = False) -> None:
        before = self.fetch_requests.get((resource, rollout))
        if before is None or (is_urgent and not before.is_urgent):
            self.fetch_requests[resource, rollout] = FetchRequest(resource, rollout, is_urgent)


def _counter_of(phase: str, outcome: str | None) -> str:
    """Return the counter of a node in this phase."""
    if phase in BUSY_PHASES:
        return "in_flight"
    if phase == "done":
        return COUNTER_BY_OUTCOME.get(outcome or "", "")
    return phase
