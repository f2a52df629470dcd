"""Judges what happened: by the oracle, by the core's invariants, and by what the world alone knows.

The oracle is told what the world saw and what was committed, in the order of
its happening.  The rules here are those for which one must have seen the world:
whether a run was doubled, whether a node that is said to be changed is changed,
whether a node was put back as late although no daemon was there to see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from machines.events import (
    Event,
    Frozen,
    GateOpened,
    HoldReleased,
    HoldTaken,
    NodesGone,
    NodesSeen,
    PhaseMoved,
    RolloutCancelled,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    StepAction,
    StepRecorded,
    TargetChanged,
    TargetsJoined,
    TeamSet,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.plan import Plan
from machines.states import Outcome, Trigger
from machines.windows import Window
from tests import oracle

if TYPE_CHECKING:
    from rolloutd.settings import Settings
    from tests.sim.world import Machine

_MOVES = {
    Trigger.ADMITTED: "begin",
    Trigger.FOUND_CURRENT: "current",
    Trigger.SKIPPED: "skip",
    Trigger.LEFT: "leave",
    Trigger.PUT_BACK: "put-back",
    Trigger.VERIFIED: "done",
    Trigger.FAILED: "fail",
    Trigger.RETRIED: "retry",
    Trigger.ROLLBACK_ORDERED: "begin",
    Trigger.REDDENED: "redden",
}

UNSEEN = "without having been seen up"
"""What the oracle says of a node that began unseen; one that we may have isolated has its slot already."""

LATE = "not isolated within"
"""How a put-back begins whose reason is that the isolation took too long."""

BLEMISH_S = 300.0
"""A soaking node that turns red was unwell at some time so shortly before."""


class Court:
    """Hears everything and keeps what should never have happened."""

    def __init__(self, now: Callable[[], float], uptime: Callable[[], float]) -> None:
        self.accusations: list[str] = []
        self.machines: Mapping[str, Machine] = {}
        self.plans: dict[str, Plan] = {}
        self.alive_since = 0.0
        self.blemished: dict[str, float] = {}
        """Until when, by the monotonic clock, a node was unwell."""
        self.fallible: set[str] = set()
        self._now = now
        self._uptime = uptime
        self._oracle = oracle.Court()
        self._labels: dict[str, dict[str, str]] = {}
        self._begun: dict[str, str] = {}
        self._finished: set[str] = set()
        self._perhaps_out: set[tuple[str, str]] = set()
        self._ordered: set[tuple[str, str, int]] = set()
        self._looked: dict[tuple[str, str, int], bool] = {}
        self._turned: dict[tuple[str, str, int], float] = {}

    def accuse(self, text: str) -> None:
        """Keep one sentence that must never be said."""
        self.accusations.append(text)

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell the oracle."""
        for text in self._oracle.hear({"kind": kind, "at": self._now(), **fields}):
            if text.endswith(UNSEEN) and (fields["rollout"], fields["node"]) in self._perhaps_out:
                continue
            self.accuse(f"{kind}: {text}")

    # -- what the world saw

    def runs(self, handle: str, node: str, rollout: str, ours: set[str], lacking: Sequence[str]) -> None:
        """Hear that a playbook begins on a node."""
        slot = handle.partition("~")[0].rpartition(".")[0]
        if handle in self._begun:
            self.accuse(f"run {handle} began twice")
        for earlier, where in self._begun.items():
            if where == slot and earlier in self._finished and earlier not in self.fallible:
                self.accuse(f"run {handle} repeats {earlier}, which had ended well")
        self._begun[handle] = slot
        for kind in lacking:
            self.accuse(f"run {handle} begins although {node} is not isolated by {kind}")
        self.tell("maintain", rollout=rollout, node=node)

    def ran(self, node: str, rollout: str) -> None:
        """Hear that a playbook has no process left on a node."""
        self.tell("maintained", rollout=rollout, node=node)

    def ended_well(self, handle: str) -> None:
        """Hear that a run ended well and could say so."""
        self._finished.add(handle)

    def looked(self, rollout: str, node: str, attempt: int, *, idle: bool) -> None:
        """Hear what a probe saw of a node's traffic."""
        self._looked[rollout, node, attempt] = idle
        self.tell("probe", rollout=rollout, node=node, idle=idle)

    def is_begun(self, rollout: str, node: str) -> bool:
        """Say whether a rollout is at work on a node."""
        return self._oracle.at_work.get(node) == rollout

    def is_perhaps_out(self, node: str) -> bool:
        """Say whether some rollout's records have the node isolated."""
        return any(name == node for _, name in self._perhaps_out)

    def drives_off(self, rollout: str, node: str, attempt: int) -> None:
        """Hear that a node's work is driven off: only what its traffic probes found idle in this attempt."""
        if not self.plans[rollout].traffic or (rollout, node, attempt) in self._ordered:
            return
        if not self._looked.get((rollout, node, attempt), False):
            self.accuse(f"{rollout} drove work off {node}, which was not seen idle in attempt {attempt}")

    # -- what was committed

    def settings(self, settings: Settings) -> None:
        """Hear the limits that every plan obeys from now on."""
        rules = settings.pools
        pools = {
            key: {"": rule.max_unavailable} | {v: r.max_unavailable for v, r in rule.values.items()}
            for key, rule in rules.items()
        }
        fleet, within_s = settings.max_parallel, settings.observe_within_s
        self.tell("settings", pools=pools, fleet=fleet, within=within_s)

    def heard(self, events: Sequence[Event]) -> None:
        """Hear what was committed."""
        for event in events:
            self._heard(event)

    def _heard(self, event: Event) -> None:  # noqa: C901  # one line per kind of event
        match event:
            case PhaseMoved():
                self._moved(event)
            case NodesSeen() | NodesGone():
                self._inventory(event)
            case RolloutOpened():
                self._opened(event)
            case TargetsJoined():
                for target in event.targets:
                    self.tell(
                        "join",
                        rollout=event.rollout,
                        node=target.node,
                        wave=target.wave,
                        team=target.team,
                    )
            case TargetChanged():
                self.tell("amend", rollout=event.rollout, node=event.node, team=event.team)
            case VoteCast() | VoteWithdrawn() | GateOpened():
                self._voted(event)
            case RolloutPaused():
                self.tell("pause", rollout=event.rollout)
            case RolloutResumed():
                self.tell("resume", rollout=event.rollout)
            case RolloutCancelled():
                self.tell("cancel", rollout=event.rollout)
            case HoldTaken():
                hold = event.hold
                self.tell("hold", node=hold.node, id=f"{hold.source}/{hold.id}", until=hold.until)
            case HoldReleased():
                self.tell("release", node=event.node, id=f"{event.source}/{event.id}")
            case Frozen():
                freeze = event.freeze
                self.tell("freeze", id=freeze.id, scope=freeze.scope, until=freeze.until)
            case Unfrozen():
                self.tell("unfreeze", id=event.freeze)
            case TeamSet():
                self.tell("team", team=event.rules.team, windows=_seconds(event.rules.windows))
            case StepRecorded(record=record, isolated=isolated):
                place = (record.rollout, record.node)
                if record.action is StepAction.UNDO:
                    self._turned.setdefault((*place, record.attempt), record.at)
                if isolated is not None:
                    (self._perhaps_out.add if isolated else self._perhaps_out.discard)(place)
            case _:
                pass

    def _moved(self, event: PhaseMoved) -> None:
        kind = _MOVES.get(event.trigger)
        if kind is None:
            return
        fields: dict[str, Any] = {"rollout": event.rollout, "node": event.node, "at": event.at}
        if event.failure is not None:
            fields |= {"failure": event.failure.id, "signature": event.failure.signature}
        if event.trigger is Trigger.ROLLBACK_ORDERED:
            fields["rollback"] = True
            self._ordered.add((event.rollout, event.node, event.attempt))
        self.tell(kind, **fields)
        self._seen_in_the_world(event)

    def _seen_in_the_world(self, event: PhaseMoved) -> None:
        machine = self.machines[event.node]
        if event.outcome is Outcome.CHANGED and machine.version != "new":
            self.accuse(f"{event.node} is said to be changed and is not")
        if event.trigger is Trigger.VERIFIED and event.rollout in machine.ours:
            self.accuse(f"{event.node} is said to be done and is still isolated")
        if event.trigger is Trigger.PUT_BACK and event.text.startswith(LATE):
            turned_at = self._turned.get((event.rollout, event.node, event.attempt), event.at)
            limit_s = self.plans[event.rollout].isolate_timeout_s
            if 0.0 <= turned_at - self.alive_since < limit_s:
                self.accuse(f"{event.node} was put back as late, counting time in which no daemon was there")
        if event.trigger is Trigger.REDDENED:
            unwell = machine.red or not machine.up or machine.version != "new"
            if not unwell and self.blemished.get(event.node, 0.0) < self._uptime() - BLEMISH_S:
                self.accuse(f"{event.node} was said to turn red and was well")

    def _inventory(self, event: NodesSeen | NodesGone) -> None:
        if isinstance(event, NodesSeen):
            self._labels |= {node.name: dict(node.labels) for node in event.nodes}
        else:
            for name in event.names:
                self._labels.pop(name, None)
        self.tell("inventory", labels=dict(self._labels))

    def _voted(self, event: VoteCast | VoteWithdrawn | GateOpened) -> None:
        match event:
            case VoteCast():
                vote = event.vote
                self.tell(
                    "vote",
                    rollout=event.rollout,
                    at=vote.at,
                    id=vote.id,
                    gate=vote.gate.value,
                    wave=vote.wave,
                    digest=vote.digest,
                    uid=vote.actor.uid,
                    yes=vote.yes,
                    teams=list(vote.teams),
                    shown=list(vote.shown),
                    nodes=list(vote.nodes),
                    more=vote.more,
                    until=vote.until,
                )
            case VoteWithdrawn():
                self.tell("withdraw", rollout=event.rollout, id=event.vote)
            case GateOpened():
                self.tell("open", at=event.at, rollout=event.rollout, gate=event.gate.value, wave=event.wave)

    def _opened(self, event: RolloutOpened) -> None:
        plan = self.plans[event.rollout]
        gates = {
            gate.value: {
                "owner": need.owner,
                "each": need.each_team,
                "eyes": need.four_eyes,
                "per_team": need.per_team,
            }
            for gate, need in plan.gates.items()
        }
        waves = [{"name": w.name, "soak": w.soak_s, "gate": w.gate is not None} for w in plan.waves]
        self.tell(
            "plan",
            rollout=event.rollout,
            digest=event.digest.whole,
            by=event.submitted_by.uid,
            owner=plan.owner,
            keys=list(plan.pool_keys),
            most=plan.max_parallel,
            waves=waves,
            gates=gates,
            windows=_seconds(plan.windows),
            ttl=plan.vote_ttl_s,
            targets={target.node: {"wave": target.wave, "team": target.team} for target in event.targets},
            probed=bool(plan.traffic),
        )


def _seconds(windows: Sequence[Window]) -> list[list[int]]:
    """Return when windows of every day open and close, as the oracle is told it."""
    return [[each.start_minute * 60, each.end_minute * 60] for each in windows]
