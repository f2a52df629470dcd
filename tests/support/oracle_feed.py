"""Committed events as the oracle's log.

What no event says, such as observations and what runs on a node, the caller adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from machines.model.events import (
    Event,
    FreezeLifted,
    FreezeStarted,
    GateOpened,
    HoldReleased,
    HoldTaken,
    NodeOrdered,
    NodesDiscovered,
    NodesRemoved,
    PhaseMoved,
    PilotEvidenceAttached,
    RolloutCancelled,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    SoakRestarted,
    TargetChanged,
    TargetsJoined,
    TeamRulesChanged,
    VoteCast,
    VoteWithdrawn,
)
from machines.model.node import ConflictKind, NodeKind
from machines.model.plan import GateName, Plan
from machines.model.rollout import NodeOrder
from machines.model.train import TrainRemoved, TrainStored
from machines.model.windows import Window
from machines.states import Outcome, Phase, Trigger
from tests import oracle

if TYPE_CHECKING:
    from rolloutd.settings import Settings

EFFECT_KINDS = {
    Trigger.ADMITTED: "begin",
    Trigger.FOUND_CURRENT: "current",
    Trigger.SKIPPED: "skip",
    Trigger.LEFT: "leave",
    Trigger.ISOLATION_ABORTED: "put-back",
    Trigger.VERIFIED: "done",
    Trigger.FAILED: "fail",
    Trigger.DISTURBED: "redden",
    Trigger.RETRIED: "retry",
    Trigger.ROLLBACK_ORDERED: "begin",
    Trigger.SOAK_CHECK_FAILED: "redden",
    Trigger.REJOINED: "rejoin",
    Trigger.DRIFTED: "drift",
}


class OracleFeed:
    """Feeds an oracle, and collects what it says."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.violations: list[str] = []
        self.plans: dict[str, Plan] = {}
        self.oracle = oracle.Oracle()
        self._now = now
        self._labels: dict[str, dict[str, str]] = {}
        self._disputed: set[str] = set()
        self._clusters: set[str] = set()
        self._away: dict[str, float] = {}

    def report_violation(self, text: str) -> None:
        """Record one violation."""
        self.violations.append(text)

    def feed_oracle(self, kind: str, **fields: Any) -> None:
        """Pass one entry to the oracle."""
        for text in self.oracle.check_entry({"kind": kind, "at": self._now(), **fields}):
            self.report_violation(f"{kind}: {text}")

    def on_settings(self, settings: Settings) -> None:
        """Hear the limits that every plan obeys from now on."""
        rules = settings.pools
        pools = {
            key: {"": rule.max_unavailable} | {v: r.max_unavailable for v, r in rule.values.items()}
            for key, rule in rules.items()
        }
        fleet, within_s = settings.max_parallel, settings.observe_within_s
        self.feed_oracle("settings", pools=pools, fleet=fleet, within=within_s)

    def on_event(self, event: Event) -> None:  # noqa: C901  # one line per kind of event
        """Hear one committed event."""
        match event:
            case PhaseMoved():
                self._feed_transition(event)
            case NodesDiscovered() | NodesRemoved():
                self._on_inventory(event)
            case RolloutOpened():
                self._on_rollout_opened(event)
            case TargetsJoined():
                for target in event.targets:
                    place = {"wave": target.wave, "team": target.team}
                    self.feed_oracle("join", rollout=event.rollout, node=target.node, **place)
            case TargetChanged():
                self.feed_oracle("amend", rollout=event.rollout, node=event.node, team=event.team)
            case VoteCast() | VoteWithdrawn() | GateOpened():
                self._on_vote(event)
            case PilotEvidenceAttached():
                shown = {"digest": event.evidence.digest, "since": event.evidence.pilot_since}
                self.feed_oracle("evidence", rollout=event.rollout, node=event.node, **shown)
            case RolloutPaused():
                self.feed_oracle("pause", rollout=event.rollout)
            case RolloutResumed():
                self.feed_oracle("resume", rollout=event.rollout)
            case RolloutCancelled():
                self.feed_oracle("cancel", rollout=event.rollout)
            case NodeOrdered() if event.order in (None, NodeOrder.ROLLBACK):
                is_ordered = event.order is not None
                self.feed_oracle("order", rollout=event.rollout, node=event.node, ordered=is_ordered)
            case TrainStored(train=train):
                approved = set(train.rollouts) <= set(train.approvals)
                self.feed_oracle("train", name=train.name, rollouts=list(train.rollouts), approved=approved)
            case TrainRemoved():
                self.feed_oracle("untrain", name=event.train)
            case HoldTaken():
                hold = event.hold
                self.feed_oracle("hold", node=hold.node, id=f"{hold.source}/{hold.id}", until=hold.until)
            case HoldReleased():
                self.feed_oracle("release", node=event.node, id=f"{event.source}/{event.id}")
            case FreezeStarted():
                freeze = event.freeze
                self.feed_oracle("freeze", id=freeze.id, scope=freeze.scope, until=freeze.until)
            case SoakRestarted():
                self.feed_oracle("soak-restart", rollout=event.rollout, node=event.node, at=event.at)
            case FreezeLifted():
                self.feed_oracle("unfreeze", id=event.freeze)
            case TeamRulesChanged():
                self.feed_oracle(
                    "team", team=event.rules.team, windows=_windows_in_seconds(event.rules.windows)
                )
            case _:
                pass

    def _feed_transition(self, event: PhaseMoved) -> None:
        kind = EFFECT_KINDS.get(event.trigger)
        if kind is None:
            return
        fields: dict[str, Any] = {"rollout": event.rollout, "node": event.node, "at": event.at}
        if event.failure is not None:
            failure = event.failure
            fields |= {"failure": failure.id, "signature": failure.signature, "code": failure.code.value}
            fields["rolling_back"] = event.rolling_back
        if event.trigger is Trigger.VERIFIED:
            fields["changed"] = event.outcome is Outcome.CHANGED
        if event.target is Phase.ISOLATING and event.rolling_back:
            fields["rollback"] = True
        self.feed_oracle(kind, **fields)

    def _on_inventory(self, event: NodesDiscovered | NodesRemoved) -> None:
        if isinstance(event, NodesDiscovered):
            self._labels |= {node.name: dict(node.labels) for node in event.nodes}
            for node in event.nodes:
                is_disputed = any(not each.is_warning for each in node.conflicts)
                (self._disputed.add if is_disputed else self._disputed.discard)(node.name)
                is_cluster = node.kind is NodeKind.CLUSTER
                (self._clusters.add if is_cluster else self._clusters.discard)(node.name)
                self._away.pop(node.name, None)
                for each in node.conflicts:
                    if each.kind is ConflictKind.OUT_OF_SERVICE:
                        self._away[node.name] = each.since
        else:
            for name in event.names:
                self._labels.pop(name, None)
                self._disputed.discard(name)
        self.feed_oracle(
            "inventory",
            labels=dict(self._labels),
            disputed=sorted(self._disputed),
            clusters=sorted(self._clusters),
            away=dict(self._away),
        )

    def _on_vote(self, event: VoteCast | VoteWithdrawn | GateOpened) -> None:
        match event:
            case VoteCast():
                vote = event.vote
                self.feed_oracle(
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
                self.feed_oracle("withdraw", rollout=event.rollout, id=event.vote)
            case GateOpened():
                self.feed_oracle(
                    "open", at=event.at, rollout=event.rollout, gate=event.gate.value, wave=event.wave
                )

    def _on_rollout_opened(self, event: RolloutOpened) -> None:
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
        waves = [{"name": w.name, "soak": w.soak_s, "gate": w.gate is GateName.CONTINUE} for w in plan.waves]
        self.feed_oracle(
            "plan",
            rollout=event.rollout,
            digest=event.digest.whole,
            by=event.submitted_by.uid,
            owner=plan.owner,
            keys=list(plan.pool_keys),
            most=plan.max_parallel,
            waves=waves,
            gates=gates,
            windows=_windows_in_seconds(plan.windows),
            ttl=plan.vote_ttl_s,
            targets={target.node: {"wave": target.wave, "team": target.team} for target in event.targets},
            probed=bool(plan.traffic),
            pilot=plan.pilot_node,
            keep=plan.keep,
            bootstrap=plan.bootstrap,
            on_failure=plan.on_failure.value,
            at_most=plan.at_most,
        )


def _windows_in_seconds(windows: Sequence[Window]) -> list[list[int]]:
    """Return when windows of every day open and close, as the oracle is told it."""
    return [[each.start_minute * 60, each.end_minute * 60] for each in windows]
