"""What is known: the daemon's answers, and the events that came after them.

Each answer says up to which audit entry it is told.  It is a base; the events
after it are folded on top, and those before it change nothing.  So an answer
and the stream may arrive in any order: an event that comes twice is dropped, one
that is missing is noticed by its number, and the next answer repairs whatever
was lost.  What the daemon derives from its facts (state, reasons, ETA, what a
gate still wants) is never derived here: the model only notes that it must be
asked again.

No Textual, no threads, no clock: `at` and the entries' own times are all it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolloutd.control import wire
from tui.values import BUSY, CLOSED, NodesAnswer, RolloutState, Work, pool_of, work_of

KEPT_ENTRIES = 4_096
"""Entries kept to be folded onto an answer that is older than they are: four
seconds at a thousand a second, and an answer takes less."""

KEPT_NODES_OF = 3
"""Rollouts whose nodes are kept: the one that is looked at, and the last two."""

KEPT_PLANS = 64
"""Plans kept: those of all rollouts that are live at once, in most houses."""

COUNTED = {"changed": "done", "already-current": "done", "skipped": "skipped", "rolled-back": "skipped"}
"""Which count a done node is in, by its outcome; those that left are in none."""

_GATE_EVENTS = frozenset({"VoteCast", "VoteWithdrawn", "GateOpened"})

_LOCK_EVENTS = frozenset({"HoldTaken", "HoldReleased", "Frozen", "Unfrozen", "DaemonStarted"})

_ROLLOUT_EVENTS = frozenset(
    {"RolloutOpened", "RolloutPaused", "RolloutResumed", "RolloutCancelled", "RolloutEnded", "RolloutDeleted"}
)


@dataclass(frozen=True, slots=True)
class Wish:
    """Something that should be asked (again); `urgent` is what a person waits for."""

    what: str
    rollout: str = ""
    urgent: bool = False


class Model:
    """Everything the console shows, folded from answers and entries."""

    def __init__(self) -> None:
        self.seq = -1
        self.heard = -1
        self.closed: list[wire.RolloutLine] = []
        self.rollouts: dict[str, RolloutState] = {}
        self.trouble: str | None = None
        self.health: wire.Health | None = None
        self.me: wire.WhoAmI | None = None
        self.settings: wire.SettingsShown | None = None
        self.locks: wire.Locks | None = None
        self.plans: dict[str, wire.PlanContent] = {}
        self.entries: deque[Mapping[str, Any]] = deque(maxlen=KEPT_ENTRIES)
        self.version = 0
        self.wishes: dict[tuple[str, str], Wish] = {}
        self._looked_at: list[str] = []

    # -- answers

    def status_answered(self, status: wire.Status) -> None:
        """Take how all rollouts stand; what happened since is folded onto it."""
        seq = status["seq"]
        if self.heard < 0:
            self.heard = seq
        if not self._covers(seq):
            self._wish("status")
        self.trouble = status["trouble"]
        told = {each["rollout"] for each in status["rollouts"]}
        for each in status["rollouts"]:
            self._rollout_answered(each, seq)
        for gone in [each for each in self.rollouts.values() if each.id not in told and each.seq <= seq]:
            if gone.id not in self._looked_at:
                del self.rollouts[gone.id]
            elif not gone.is_closed:
                self._wish("rollout", gone.id)
        self.seq = max(self.seq, seq)
        self.version += 1

    def rollout_answered(self, status: wire.Rollout, seq: int) -> None:
        """Take how one rollout stands, at entry `seq` or later; closed ones are told of this way only."""
        self._rollout_answered(status, seq)
        self.version += 1

    def nodes_answered(self, rollout: str, answer: NodesAnswer) -> None:
        """Take a rollout's nodes; what happened since is folded onto them."""
        known = self.rollouts.get(rollout)
        if known is None:
            return
        seq = answer.seq
        if not self._covers(seq):
            self._wish("nodes", rollout)
        known.nodes = answer.nodes
        known.nodes_seq = seq
        for entry in self._after(seq, rollout):
            self._fold_node(known, entry)
        self._fill_pools(known)
        self._set_works(known, known.in_flight)
        self.version += 1

    def locks_answered(self, locks: wire.Locks) -> None:
        """Take who has which slots, the holds and the freezes."""
        if any(entry["event"] in _LOCK_EVENTS for entry in self._after(locks["seq"], None)):
            self._wish("locks")
        self.locks = locks
        self.version += 1

    def plan_answered(self, rollout: str, plan: wire.PlanContent) -> None:
        """Take a rollout's plan, which never changes."""
        while len(self.plans) >= KEPT_PLANS:
            del self.plans[next(iter(self.plans))]
        self.plans[rollout] = plan
        self.version += 1

    def closed_answered(self, rollouts: wire.Rollouts) -> None:
        """Take the list of all rollouts; the closed ones are kept, the latest first."""
        self.closed = [each for each in rollouts["rollouts"] if each["state"] in CLOSED]
        self.version += 1

    def forget(self) -> None:
        """Forget everything the daemon has told: it is another one, with another history."""
        self.__init__()  # type: ignore[misc]

    # -- the stream

    def lines_told(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take lines of the event stream, in whatever order and however often they come."""
        for line in lines:
            entry = line.get("entry")
            if entry is not None:
                self._entry_told(line["seq"], entry)
            elif "progress" in line:
                self._progress_told(line["progress"])
            elif 0 <= self.heard < line.get("heartbeat", -1):
                self.heard = line["heartbeat"]
                self.missed()
        self.version += 1

    def look_at(self, rollout: str) -> None:
        """Keep a rollout's nodes from now on; ask for them if they are not there."""
        if rollout in self._looked_at:
            self._looked_at.remove(rollout)
        self._looked_at.append(rollout)
        if rollout not in self.plans:
            self._wish("plan", rollout)
        for old in self._looked_at[:-KEPT_NODES_OF]:
            kept = self.rollouts.get(old)
            if kept is not None:
                kept.nodes, kept.nodes_seq = None, -1
                for pool in kept.pools.values():
                    pool.nodes = []
        del self._looked_at[:-KEPT_NODES_OF]
        known = self.rollouts.get(rollout)
        if known is None:
            self._wish("rollout", rollout, urgent=True)
        if known is None or known.nodes is None:
            self._wish("nodes", rollout, urgent=True)

    def wish_for(self, what: str, rollout: str = "") -> None:
        """Note that something should be asked, because a person waits for it."""
        self._wish(what, rollout, urgent=True)

    def missed(self) -> None:
        """Note that entries may be missing: everything that is shown is asked again."""
        self._wish("status", urgent=True)
        self._wish("locks")
        for rollout in self._looked_at:
            self._wish("nodes", rollout, urgent=True)

    # -- folding

    def _entry_told(self, seq: int, entry: Mapping[str, Any]) -> None:
        if seq <= self.heard:
            return
        if 0 <= self.heard < seq - 1:
            self.missed()
        self.entries.append(entry)
        self.heard = seq
        self.seq = max(self.seq, seq)
        event = entry["event"]
        if event in _LOCK_EVENTS:
            self._wish("locks", urgent=True)
        if event in _ROLLOUT_EVENTS:
            self._wish("closed")
        if event in _ROLLOUT_EVENTS or event in _GATE_EVENTS or event in _LOCK_EVENTS:
            self._wish("status", urgent=True)
        known = self.rollouts.get(entry["rollout"] or "")
        if known is None:
            return
        if event in ("PhaseMoved", "TargetsJoined", "TargetChanged", "NodeOrdered"):
            self._wish("status")
            if known.nodes is not None:
                self._wish("nodes", known.id)
        self._fold(known, entry)

    def _fold(self, known: RolloutState, entry: Mapping[str, Any]) -> None:
        """Fold one entry onto those answers about a rollout that are older than it."""
        if entry["seq"] > known.nodes_seq and known.nodes is not None:
            self._fold_node(known, entry)
        if entry["seq"] > known.seq:
            self._fold_counts(known, entry)
        known.version += 1

    def _fold_node(self, known: RolloutState, entry: Mapping[str, Any]) -> None:
        assert known.nodes is not None
        node = known.nodes.get(entry["node"] or "")
        if node is None:
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

    def _fold_counts(self, known: RolloutState, entry: Mapping[str, Any]) -> None:
        fields = entry["fields"]
        match entry["event"]:
            case "PhaseMoved":
                self._count_move(known, entry["node"], fields)
            case "StepRecorded" if (work := known.in_flight.get(entry["node"])) is not None:
                if fields["state"] == "intended":
                    work.step, work.percent, work.task = fields["step"], None, ""
            case "RolloutPaused" | "RolloutCancelled" as event:
                word = "paused" if event == "RolloutPaused" else "cancelled"
                known.status = {**known.status, "state": word}  # type: ignore[typeddict-item]
            case "RolloutEnded":
                known.status = {**known.status, "state": "done", "reason": None}
            case _:
                pass

    def _count_move(self, known: RolloutState, name: str, fields: Mapping[str, Any]) -> None:
        node = known.nodes.get(name) if known.nodes is not None else None
        work = known.in_flight.get(name)
        pools = node.pools if node is not None else work.pools if work is not None else ()
        self._count(known, pools, _place(fields["source"], "changed"), -1)
        self._count(known, pools, _place(fields["target"], fields["outcome"]), +1)
        if fields["outcome"] == "left":
            known.counts["total"] -= 1
            for pool in (known.pools[name] for name in pools if name in known.pools):
                pool.total -= 1
        if fields["target"] in BUSY:
            if work is None:
                known.in_flight[name] = Work(name, pools, fields["target"], fields["at"], began=fields["at"])
            else:
                work.phase, work.since = fields["target"], fields["at"]
        else:
            known.in_flight.pop(name, None)
        if fields["target"] == "done":
            known.ends.append(fields["at"])

    def _count(self, known: RolloutState, pools: Iterable[str], place: str, by: int) -> None:
        if place in known.counts:
            known.counts[place] += by
        for name in pools:
            pool = known.pools.get(name)
            if pool is not None and place in ("done", "failed", "in_flight"):
                setattr(pool, place, getattr(pool, place) + by)

    def _progress_told(self, works: Sequence[Mapping[str, Any]]) -> None:
        by_rollout: dict[str, dict[str, Work]] = {}
        for each in works:
            by_rollout.setdefault(each["rollout"], {})[each["node"]] = work_of(each)
        for known in self.rollouts.values():
            self._set_works(known, by_rollout.get(known.id, {}))

    def _set_works(self, known: RolloutState, works: dict[str, Work]) -> None:
        for name, work in works.items():
            before = known.in_flight.get(name)
            node = known.nodes.get(name) if known.nodes is not None else None
            known_since = before.began if before is not None else None
            work.began = node.admitted_at if node is not None else known_since
        known.in_flight = works
        known.version += 1

    # -- making

    def _rollout_answered(self, status: wire.Rollout, seq: int) -> None:
        known = self.rollouts.get(status["rollout"])
        if known is None:
            known = self.rollouts[status["rollout"]] = RolloutState(status["rollout"], status, seq)
        elif seq < known.seq:
            return
        known.status, known.seq = status, seq
        known.counts = {
            "total": status["total"],
            "done": status["done"],
            "failed": status["failed"],
            "skipped": status["skipped"],
            "pending": status["pending"],
            "in_flight": len(status["in_flight"]),
        }
        self._set_works(known, {each["node"]: work_of(each) for each in status["in_flight"]})
        self._set_pools(known, status["pools"])
        for entry in self._after(seq, known.id):
            self._fold_counts(known, entry)
        known.version += 1

    def _set_pools(self, known: RolloutState, pools: Sequence[wire.Pool]) -> None:
        before = known.pools
        known.pools = {}
        for each in pools:
            old = before.get(each["pool"])
            known.pools[each["pool"]] = pool = pool_of(each)
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

    # -- numbers

    def _covers(self, seq: int) -> bool:
        """Say whether every entry after `seq` that was told is still kept."""
        return seq >= self.heard or len(self._after(seq, None)) == self.heard - seq

    def _after(self, seq: int, rollout: str | None) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for entry in reversed(self.entries):
            if entry["seq"] <= seq:
                break
            if rollout in (None, entry["rollout"]):
                found.append(entry)
        return found[::-1]

    def _wish(self, what: str, rollout: str = "", *, urgent: bool = False) -> None:
        before = self.wishes.get((what, rollout))
        if before is None or (urgent and not before.urgent):
            self.wishes[what, rollout] = Wish(what, rollout, urgent)


def _place(phase: str, outcome: str | None) -> str:
    """Return the count that a node in this phase is in."""
    if phase in BUSY:
        return "in_flight"
    if phase == "done":
        return COUNTED.get(outcome or "", "")
    return phase
