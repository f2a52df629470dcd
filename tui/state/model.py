"""The console's model: what the daemon last reported, and what to request again.

An audit entry is kept for the event log and for a rollout's past.  Otherwise it only wakes
the model, which requests what the entry may have changed and never works it out itself.
So a lost, late or duplicate entry cannot lead to a wrong figure.

No Textual, no threads, no clock: times come from the responses and the entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolloutd.control.daemons import wire_daemons
from rolloutd.control.fleet import wire_fleet
from rolloutd.control.plans import wire_plans
from rolloutd.control.rollouts import wire
from rolloutd.texts.audit_names import with_current_names
from tui.state import values
from tui.state.history import History

MAX_ENTRIES = 4_096
"""Entries kept for the audit's page, which adds them while it is open."""

MAX_TRACKED_ROLLOUTS = 3
"""Rollouts whose nodes are kept: the one on the screen and the two before it."""

MAX_PLANS = 64

MAX_REVIEWS = 8
"""Reviews kept: each has the text of playbooks."""

REFRESH_INTERVAL_S = 10.0
"""Between two requests for what time alone changes: no event announces an observation that grows old."""

OVERDUE_INTERVAL_S = 1.0
"""The same while a shown deadline has passed: the daemon has not confirmed yet what it ends."""

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
    def __init__(self) -> None:
        self.seq = -1
        self.last_received_seq = -1
        self.closed_rollouts: list[wire.RolloutLine] = []
        self.rollouts: dict[str, values.RolloutState] = {}
        self.missing_rollouts: set[str] = set()
        self.daemon_error: str | None = None
        self.health: wire_daemons.Health | None = None
        self.current_user: wire_daemons.WhoAmI | None = None
        self.settings: wire_daemons.SettingsSummary | None = None
        self.locks: wire_fleet.Locks | None = None
        self.plans: dict[str, wire_plans.PlanContent] = {}
        self.histories: dict[str, History] = {}
        self.reviews: dict[str, wire_plans.Review] = {}
        self.entries: deque[Mapping[str, Any]] = deque(maxlen=MAX_ENTRIES)
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
        self.daemon_error = status["trouble"]
        reported = {each["rollout"] for each in status["rollouts"]}
        for each in status["rollouts"]:
            self._apply_rollout_status(each, seq)
        for known in list(self.rollouts.values()):
            # A rollout that is newer than this response was opened after it.
            if known.id in reported or known.seq > seq:
                continue
            if known.id not in self._tracked_rollouts:
                del self.rollouts[known.id]
            elif not known.is_closed:
                self._add_fetch_request("rollout", known.id)
        self.seq = max(self.seq, seq)

    def apply_rollout(self, status: wire.Rollout, seq: int) -> None:
        """Apply the status of one rollout at entry `seq` or later; `status` omits closed rollouts."""
        self._apply_rollout_status(status, seq)
        self.missing_rollouts.discard(status["rollout"])
        self._add_fetch_request("nodes", status["rollout"], is_urgent=True)

    def apply_nodes(self, rollout: str, snapshot: values.NodesSnapshot, *, is_whole: bool = True) -> None:
        """Apply all nodes of a rollout, or with `is_whole=False` those that have changed."""
        known = self.rollouts.get(rollout)
        if known is None or (known.nodes is None and not is_whole):
            return
        before = known.nodes or {}
        # Changed nodes may have come while the pages of all nodes were read: the newer state stays.
        # A node that joined after the first page has no earlier state, and no later entry may name it.
        newer = {
            name: node
            for name, node in before.items()
            if node.seq > (snapshot.nodes[name].seq if name in snapshot.nodes else snapshot.seq)
        }
        known.nodes = {**({} if is_whole else before), **snapshot.nodes, **newer}
        known.nodes_seq = max(known.nodes_seq, snapshot.seq)
        known.node_deadlines = snapshot.deadlines | (frozenset() if is_whole else known.node_deadlines)
        self._fill_pools(known)
        known.version += 1

    def apply_locks(self, locks: wire_fleet.Locks) -> None:
        self.locks = locks

    def apply_plan(self, rollout: str, plan: wire_plans.PlanContent) -> None:
        while len(self.plans) >= MAX_PLANS:
            del self.plans[next(iter(self.plans))]
        self.plans[rollout] = plan

    def apply_review(self, rollout: str, review: wire_plans.Review) -> None:
        while len(self.reviews) >= MAX_REVIEWS:
            del self.reviews[next(iter(self.reviews))]
        self.reviews[rollout] = review

    def apply_closed_rollouts(self, rollouts: wire.Rollouts) -> None:
        """Keep the closed ones of all rollouts, the latest first."""
        self.closed_rollouts = [
            each for each in rollouts["rollouts"] if each["state"] in values.CLOSED_STATES
        ]

    def reset(self) -> None:
        """Forget everything: the daemon serves another database."""
        self.__init__()  # type: ignore[misc]

    # -- the stream

    def apply_stream_lines(self, lines: Iterable[Mapping[str, Any]], at: float | None = None) -> None:
        """Apply lines of the event stream, received at `at`, in any order and any number of times."""
        status: wire.Status | None = None
        for line in lines:
            entry = line.get("entry")
            if entry is not None:
                self._apply_entry(line["seq"], entry)
            elif "status" in line:
                status = line["status"]  # the latest is enough
            elif 0 <= self.last_received_seq < line.get("heartbeat", -1):
                self.last_received_seq = line["heartbeat"]
                self._mark_lost()
        if status is not None:
            self.apply_status(status, at)

    def track_nodes(self, rollout: str) -> None:
        """Keep a rollout's nodes from now on, and fetch them if they are unknown."""
        if rollout in self._tracked_rollouts:
            self._tracked_rollouts.remove(rollout)
        self._tracked_rollouts.append(rollout)
        if rollout not in self.plans:
            self._add_fetch_request("plan", rollout)
        # Ten thousand nodes and their history take tens of MiB.
        for old in self._tracked_rollouts[:-MAX_TRACKED_ROLLOUTS]:
            self.histories.pop(old, None)
            evicted = self.rollouts.get(old)
            if evicted is not None:
                evicted.nodes, evicted.node_deadlines = None, frozenset()
                evicted.version += 1
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
        # The entries received so far may be incomplete: all before the next one come from the audit.
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

    def mark_stale(self, *, is_urgent: bool = True, has_status: bool = False) -> None:
        """Request everything on the screen again, or with `has_status` all but the status."""
        if not has_status:
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
            # The stream brings a status at shorter intervals.
            has_status = self.status_at is not None and now - self.status_at < interval
            self.mark_stale(is_urgent=has_just_passed, has_status=has_status and not has_just_passed)

    def _shown_deadlines(self) -> Iterator[float]:
        locks = self.locks
        ends = [each["until"] for each in (*locks["freezes"], *locks["holds"])] if locks is not None else []
        for known in self.rollouts.values():
            if not known.is_closed:
                reason = known.status["reason"]
                ends += [known.status["eta"], None if reason is None else values.remedy_deadline(reason)]
                yield from known.node_deadlines
        yield from (at for at in map(values.parse_timestamp, ends) if at is not None)

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
        event, rollout = entry["event"], entry["rollout"]
        # A user waits for the effect of a decision; the work on nodes may wait for its turn.
        is_decision = event in _GATE_EVENTS | _LOCK_EVENTS | _ROLLOUT_EVENTS
        if event in _LOCK_EVENTS:
            self._add_fetch_request("locks", is_urgent=True)
        if event in _ROLLOUT_EVENTS:
            self._add_fetch_request("closed")
        if event in _GATE_EVENTS and rollout in self.reviews:
            # A vote changes what the user's own approval still gives.
            self._add_fetch_request("review", rollout, is_urgent=True)
        if event == "PhaseMoved" and entry["fields"]["target"] == "done":
            self._record_completion(entry)
        for tracked in self._tracked_rollouts:
            if rollout in (None, tracked):
                self._request_nodes_after(entry, tracked, is_urgent=is_decision)

    def _record_completion(self, entry: Mapping[str, Any]) -> None:
        # When it happened, not now: after a reconnect, entries from minutes ago come at once.
        known = self.rollouts.get(entry["rollout"])
        if known is not None:
            known.recent_completions.append(entry["fields"]["at"])

    def _request_nodes_after(self, entry: Mapping[str, Any], rollout: str, *, is_urgent: bool) -> None:
        """Request a rollout's nodes: an entry may change the reasons of nodes that it does not name."""
        known = self.rollouts.get(rollout)
        if known is None:
            return
        if known.is_closed:
            if entry["rollout"] is None and entry["event"] not in _LOCK_EVENTS:
                # The rest of the fleet changes nothing of a closed rollout.
                return
            # The status omits it, and its reason names the nodes without the change.
            self._add_fetch_request("rollout", rollout)
        self._add_fetch_request("nodes", rollout, is_urgent=is_urgent)
        node = (known.nodes or {}).get(entry["node"] or "")
        if node is not None:
            self._add_fetch_request("changed-nodes", rollout)
            for pool in known.pools.keys() & node.pools:
                # The history has the entry already, and the pool's bar shows it.
                known.pools[pool].version += 1

    # -- rollouts and pools

    def _apply_rollout_status(self, status: wire.Rollout, seq: int) -> None:
        known = self.rollouts.get(status["rollout"])
        if known is None:
            known = self.rollouts[status["rollout"]] = values.RolloutState(status["rollout"], status, seq)
        elif seq < known.seq:
            return
        old, new = known.status["reason"], status["reason"]
        if (old and values.reason_key(old)) != (new and values.reason_key(new)) and known.nodes is not None:
            # The nodes wait for the rollout's reason, and time may have changed it without an event.
            self._add_fetch_request("nodes", known.id, is_urgent=True)
        # A status of the stream shares with the one before what did not change.
        before, known.status, known.seq = known.status, status, seq
        known.in_flight = {each["node"]: each for each in status["in_flight"]}
        if before["pools"] is not status["pools"] or not known.pools:
            self._set_pools(known, before["pools"])

    def _set_pools(self, known: values.RolloutState, answers_before: Sequence[wire.Pool]) -> None:
        before, answers = known.pools, {each["pool"]: each for each in answers_before}
        known.pools = {}
        for each in known.status["pools"]:
            old = before.get(each["pool"])
            if old is not None and answers[each["pool"]] is each:
                known.pools[each["pool"]] = old
                continue
            known.pools[each["pool"]] = pool = values.parse_pool(each)
            if old is not None:
                pool.nodes, pool.version = old.nodes, old.version
        if known.nodes is not None and before.keys() != known.pools.keys():
            self._fill_pools(known)

    def _fill_pools(self, known: values.RolloutState) -> None:
        assert known.nodes is not None
        for pool in known.pools.values():
            pool.nodes = []
            pool.version += 1
        for node in known.nodes.values():
            for name in node.pools:
                if name in known.pools:
                    known.pools[name].nodes.append(node)

    # -- bookkeeping

    def _add_fetch_request(self, resource: str, rollout: str = "", *, is_urgent: bool = False) -> None:
        before = self.fetch_requests.get((resource, rollout))
        if before is None or (is_urgent and not before.is_urgent):
            self.fetch_requests[resource, rollout] = FetchRequest(resource, rollout, is_urgent)
