"""A simulated fleet that executes decisions, with random faults, and writes an effect log for the oracle.

It does the daemon's and the drivers' work on an index, one event at a time.
violations() checks every event before it is applied.  One seed decides everything.

Longer than 500 lines: the checks must see every action of one fleet.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from machines.facts.apply import apply_to_target
from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import (
    AbortIsolation,
    Admit,
    CheckIfCurrent,
    Decision,
    EndRollout,
    Observe,
    OpenGate,
    ProbeTraffic,
)
from machines.model.events import (
    ChangeNeeded,
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
    RolloutCancelled,
    RolloutEnded,
    RolloutPaused,
    RolloutResumed,
    StepRecorded,
    TargetChanged,
    TargetsJoined,
    VoteCast,
    VoteWithdrawn,
)
from machines.model.limits import PoolRule
from machines.model.node import NodeHealth, Observation
from machines.model.plan import GateName, Plan, VoteRequirement
from machines.model.reasons import Reason
from machines.model.rollout import Actor, ActorKind, Failure, Hold, Target, Vote
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.traffic import TrafficResult
from machines.model.windows import Freeze
from machines.rules.gates import voting_blocker
from machines.scheduler.decide import decide
from machines.scheduler.membership import membership_events
from machines.scheduler.why import why_nodes
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase, Trigger, next_phase
from rolloutd.texts.cause_text import describe_causes
from tests.machines.builders import T0, reason_of, rollout_opened
from tests.machines.random_fleets import oracle_pools, random_limits, random_node, random_plan

SUBMITTER = Actor(ActorKind.PERSON, "sam", 1000)
PEOPLE: dict[Actor, tuple[str, ...]] = {
    SUBMITTER: ("infra", "a"),
    Actor(ActorKind.PERSON, "olga", 1001): ("infra",),
    Actor(ActorKind.PERSON, "otto", 1002): ("infra", "b"),
    Actor(ActorKind.PERSON, "ann", 1003): ("a",),
    Actor(ActorKind.PERSON, "ben", 1004): ("b", "c"),
    Actor(ActorKind.PERSON, "cleo", 1005): ("c",),
}
WATCH = "ams"
FAILURE_MESSAGES = ("no route to host", "task 3 failed", "disk full")


class InvariantViolated(AssertionError):
    """An event would have broken an invariant."""


@dataclass
class FleetSimulator:
    """An index, the truth about the nodes, and the log of what was done to them."""

    rng: random.Random
    index: Projection
    now: float
    log: list[dict[str, Any]]
    actual_health: dict[str, tuple[NodeHealth, bool]]
    has_faults: bool = True
    skips_invariants: bool = False
    is_watched: bool = False
    """Whether each observation is the report of a watch, which confirms it later."""
    traffic: dict[str, bool | None] = field(default_factory=dict)
    """Nodes with client traffic (True) or unknown traffic (None); all others are idle."""
    last_id: int = 0

    # -- making one

    @classmethod
    def from_seed(cls, seed: int) -> FleetSimulator:
        """Return a fleet with up to three plans, as the seed says."""
        chance = random.Random(seed)
        nodes = [random_node(chance, f"n{number}") for number in range(1, chance.randint(3, 9))]
        limits = random_limits(chance)
        index = Projection.build(FactsSnapshot(nodes=tuple(nodes)), limits, lambda content: content["plan"])
        world = cls(chance, index, T0, [], {node.name: (NodeHealth.UP, False) for node in nodes})
        world.is_watched = chance.random() < 0.5
        world.log_effect("settings", pools=oracle_pools(limits), fleet=limits.max_parallel, within=60.0)
        world._log_inventory()
        for number in range(chance.randint(1, 3)):
            world._submit(f"R{number}", random_plan(chance))
            if chance.random() < 0.7:
                world.approve_all_gates(f"R{number}")
        return world

    def _submit(self, rollout: str, plan: Plan) -> None:
        event = rollout_opened(rollout, plan, self.index, self.now, by=SUBMITTER)
        self.index.apply(event)
        gates = {gate: plan.gates.get(gate, VoteRequirement(owner=1)) for gate in GateName}
        self.log_effect(
            "plan",
            rollout=rollout,
            digest=rollout,
            by=SUBMITTER.uid,
            owner=plan.owner,
            keys=list(plan.pool_keys),
            most=plan.max_parallel,
            waves=[
                {"name": wave.name, "soak": wave.soak_s, "gate": wave.gate is not None} for wave in plan.waves
            ],
            gates={
                gate.value: {
                    "owner": need.owner,
                    "each": need.each_team,
                    "eyes": need.four_eyes,
                    "per_team": need.per_team,
                }
                for gate, need in gates.items()
            },
            windows=[[window.start_minute * 60, window.end_minute * 60] for window in plan.windows],
            ttl=plan.vote_ttl_s,
            targets={target.node: {"wave": target.wave, "team": target.team} for target in event.targets},
            probed=bool(plan.traffic),
            pilot=plan.pilot_node,
        )

    # -- telling

    def log_effect(self, kind: str, **fields: Any) -> None:
        """Write to the effect log."""
        self.log.append({"kind": kind, "at": self.now, **fields})

    def _log_inventory(self) -> None:
        labels = {node.name: dict(node.labels) for node in self.index.nodes.values()}
        self.log_effect("inventory", labels=labels)

    def commit(self, event: Event) -> None:
        """Judge the event, then let it become fact; raises Broken, unless the world is trusting."""
        problem = None if self.skips_invariants else violation(self.index, event, self.now)
        if problem is not None:
            raise InvariantViolated(problem)
        self.index.apply(event)

    def move(self, target: Target, trigger: Trigger, outcome: Outcome | None = None, **fields: Any) -> None:
        """Let a node take an edge."""
        begins = trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED)
        reached = next_phase(trigger, target.phase, outcome)
        rolling = target.rolling_back and reached in (*IN_FLIGHT_PHASES, Phase.FAILED)
        event = PhaseMoved(
            rollout=target.rollout,
            node=target.node,
            trigger=trigger,
            source=target.phase,
            target=reached,
            attempt=target.attempt + begins,
            at=self.now,
            outcome=outcome,
            rolling_back=fields.pop("rolling_back", rolling),
            **fields,
        )
        assert apply_to_target(target, event).phase is reached
        self.commit(event)

    # -- carrying out

    def decide(self) -> Decision:
        """Decide and carry it out; what was observed is known a moment later."""
        self.index.advance(self.now)
        decision = decide(self.index, self.now)
        self.index.record_backoffs(decision.backoffs)
        for gate in decision.of(OpenGate):
            self.commit(GateOpened(gate.rollout, gate.gate, gate.wave, self.now))
            self.log_effect("open", rollout=gate.rollout, gate=gate.gate.value, wave=gate.wave)
        for start in decision.of(Admit):
            self.move(self.index.target(start.rollout, start.node), Trigger.ADMITTED)
            self.log_effect("begin", rollout=start.rollout, node=start.node)
        for look in decision.of(CheckIfCurrent):
            self._check_if_current(self.index.target(look.rollout, look.node))
        for back in decision.of(AbortIsolation):
            self._abort_isolation(self.index.target(back.rollout, back.node))
        for ended in decision.of(EndRollout):
            self.commit(RolloutEnded(ended.rollout, self.now))
        if wanted := decision.of(Observe):
            self._observe(tuple(each.node for each in wanted))
        for probe in decision.of(ProbeTraffic):
            self._probe(probe.rollout, probe.node)
        return decision

    def _check_if_current(self, target: Target) -> None:
        if self.rng.random() < 0.5:
            self.commit(ChangeNeeded(target.rollout, target.node, self.now))
            return
        self.move(target, Trigger.FOUND_CURRENT, Outcome.ALREADY_CURRENT)
        self.log_effect("current", rollout=target.rollout, node=target.node)

    def _abort_isolation(self, target: Target) -> None:
        self._record_isolation(target, False)
        later = self.now + self.rng.choice((0.0, 30.0, 90.0))
        self.move(self.index.target(target.rollout, target.node), Trigger.ISOLATION_ABORTED, not_before=later)
        self.log_effect("put-back", rollout=target.rollout, node=target.node)

    def _record_isolation(self, target: Target, isolated: bool) -> None:
        record = StepRecord(
            target.rollout,
            target.node,
            target.attempt,
            "isolate.0",
            StepAction.APPLY if isolated else StepAction.REVERT,
            1,
            StepState.OK,
            self.now,
            self.now,
        )
        self.commit(StepRecorded(record, isolated))

    def _observe(self, nodes: tuple[str, ...]) -> None:
        observations = []
        for node in nodes:
            sight, foreign = self.actual_health.get(node, (NodeHealth.UP, False))
            watch = WATCH if self.is_watched else ""
            observations.append(Observation(node, sight, self.now, "as it is", foreign, watch=watch))
            self.log_effect("saw", node=node, up=sight is NodeHealth.UP, foreign=foreign)
        self.index.record_observations(observations, self.now)

    def _probe(self, rollout: str, node: str) -> None:
        busy = self.traffic.get(node, False)
        self.index.record_traffic(TrafficResult(rollout, node, busy, self.now, f"{node} is {busy}"))
        self.log_effect("probe", rollout=rollout, node=node, idle=busy is False)

    def change_traffic(self) -> None:
        """Let client traffic come to a node, or end there."""
        node = self.rng.choice(sorted(self.actual_health))
        self.traffic[node] = self.rng.choice((True, True, None, False))

    def advance(self, target: Target) -> None:
        """Let one node in flight take its next step, or fail in it."""
        if self.has_faults and self.rng.random() < 0.12:
            self._fail(target, Trigger.FAILED)
            return
        if target.phase is Phase.ISOLATING:
            self._record_isolation(target, True)
            self.log_effect("isolated", rollout=target.rollout, node=target.node)
            self.move(self.index.target(target.rollout, target.node), Trigger.ISOLATED)
            self.log_effect("maintain", rollout=target.rollout, node=target.node)
        elif target.phase is Phase.MAINTAINING:
            self.log_effect("maintained", rollout=target.rollout, node=target.node)
            self.move(target, Trigger.MAINTAINED)
        else:
            self._finish(target)

    def _finish(self, target: Target) -> None:
        if target.isolated:
            self._record_isolation(target, False)
            self.log_effect("back", rollout=target.rollout, node=target.node)
        outcome = Outcome.ROLLED_BACK if target.rolling_back else Outcome.CHANGED
        self.move(self.index.target(target.rollout, target.node), Trigger.VERIFIED, outcome)
        self.log_effect("done", rollout=target.rollout, node=target.node)

    def _fail(self, target: Target, trigger: Trigger) -> None:
        number = sum(failure.node == target.node for failure in self.index.rollout(target.rollout).failures)
        name = f"{target.node}#{target.attempt}.{number}"
        message = self.rng.choice(FAILURE_MESSAGES)
        failure = Failure(name, target.node, target.attempt, "run.configure", message, self.now)
        self.move(target, trigger, failure=failure)
        kind = "fail" if trigger is Trigger.FAILED else "redden"
        self.log_effect(
            kind, rollout=target.rollout, node=target.node, failure=name, signature=failure.signature
        )

    # -- accidents and people

    def random_event(self) -> None:
        """Cause one random event that the scheduler did not decide."""
        self.rng.choice(_RANDOM_EVENTS)(self)

    def pass_time(self, most_s: float = 90.0) -> None:
        """Let time pass."""
        self.now += self.rng.uniform(0.5, most_s)

    def observe_some(self) -> None:
        """Let a watch report of some nodes."""
        known = sorted(self.index.nodes)
        self._observe(tuple(self.rng.sample(known, self.rng.randint(1, len(known)))))

    def confirm_reports(self) -> None:
        """Let a watch report the nodes that have changed, and confirm its other reports at once."""
        if not self.is_watched:
            return
        if self.index.lacks_reports(WATCH):
            self.index.expect_reports(WATCH)
            self._observe(tuple(sorted(self.index.nodes)))
            return
        reported = [seen for seen in self.index.reports if seen.watch]
        healths = {seen.node: (seen.sight, seen.cordoned_by_other) for seen in reported}
        up = (NodeHealth.UP, False)
        self._observe(tuple(n for n, seen in healths.items() if seen != self.actual_health.get(n, up)))
        self.index.record_confirmation(WATCH, self.now, self.now)
        for node in healths:
            sight, foreign = self.actual_health.get(node, up)
            self.log_effect("saw", node=node, up=sight is NodeHealth.UP, foreign=foreign)

    def change_node_health(self) -> None:
        """Take a node down, bring it up, or add a foreign cordon."""
        sight = self.rng.choice((NodeHealth.UP, NodeHealth.UP, NodeHealth.DOWN, NodeHealth.UNKNOWN))
        node = self.rng.choice(sorted(self.actual_health))
        self.actual_health[node] = (sight, sight is NodeHealth.UP and self.rng.random() < 0.2)

    def hold(self) -> None:
        """Hold or release a node."""
        if self.index.holds and self.rng.random() < 0.6:
            self.release(self.rng.choice(self.index.holds))
            return
        until = self.rng.choice((None, self.now + 120.0))
        node = self.rng.choice(sorted(self.index.nodes))
        self.last_id += 1
        self.commit(HoldTaken(Hold(node, "cli", f"h{self.last_id}", SUBMITTER, "tests", self.now, until)))
        self.log_effect("hold", node=node, id=f"h{self.last_id}", until=until)

    def release(self, hold: Hold) -> None:
        """Release a hold."""
        self.commit(HoldReleased(hold.node, hold.source, hold.id, SUBMITTER, self.now))
        self.log_effect("release", node=hold.node, id=hold.id)

    def freeze(self) -> None:
        """Start or lift a freeze."""
        if self.index.freezes:
            self.unfreeze(self.index.freezes[0])
            return
        self.last_id += 1
        scope = self.rng.choice(("all", "team/a", "rack/r1"))
        until = self.rng.choice((None, self.now + 100.0))
        self.commit(FreezeStarted(Freeze(f"f{self.last_id}", scope, "tests", "sam", self.now, until)))
        self.log_effect("freeze", id=f"f{self.last_id}", scope=scope, until=until)

    def unfreeze(self, freeze: Freeze) -> None:
        """Lift a freeze."""
        self.commit(FreezeLifted(freeze.id, SUBMITTER, self.now))
        self.log_effect("unfreeze", id=freeze.id)

    def pause(self) -> None:
        """Pause or resume a rollout; rarely, cancel it."""
        rollout = self._some_rollout()
        if rollout is None:
            return
        if rollout.paused is not None:
            self.commit(RolloutResumed(rollout.id, SUBMITTER, "tests", self.now))
            self.log_effect("resume", rollout=rollout.id)
        elif self.rng.random() < 0.9:
            self.commit(RolloutPaused(rollout.id, SUBMITTER, "tests", self.now))
            self.log_effect("pause", rollout=rollout.id)
        else:
            self.commit(RolloutCancelled(rollout.id, SUBMITTER, "tests", self.now))
            self.log_effect("cancel", rollout=rollout.id)

    def vote(self) -> None:
        """Vote at an open gate, sometimes no, sometimes for another digest."""
        rollout = self._some_rollout()
        if rollout is None:
            return
        gate = self.rng.choice(tuple(GateName))
        wave = rollout.plan.waves[0].name if gate is GateName.CONTINUE else ""
        actor = self.rng.choice(tuple(PEOPLE))
        yes = self.rng.random() < 0.9
        if not yes and gate is GateName.START:
            return
        digest = rollout.digest.whole if self.rng.random() < 0.9 else "another"
        self.cast_vote(rollout.id, gate, wave, actor, yes=yes, digest=digest)

    def cast_vote(
        self, rollout_id: str, gate: GateName, wave: str, actor: Actor, *, yes: bool = True, digest: str = ""
    ) -> None:
        """Let a person vote if the gate is asked."""
        rollout = self.index.rollout(rollout_id)
        if voting_blocker(self.index, rollout, gate, wave, self.now) is not None:
            return
        self.last_id += 1
        shown, nodes, more = (), (), 0
        until = None
        if gate is GateName.PROCEED and yes:
            open_failures = self.index.unresolved_failures(rollout.id)
            covers_all = self.rng.random() < 0.8 or not self.has_faults
            shown = tuple(failure.id for failure in open_failures[: None if covers_all else 1])
            nodes = tuple(sorted({failure.node for failure in open_failures if self.rng.random() < 0.2}))
            more = self.rng.choice((0, 0, 1, 2))
            until = self.rng.choice((None, self.now + 100.0))
        new_vote = Vote(
            f"v{self.last_id}",
            gate,
            digest or rollout.digest.whole,
            actor,
            yes,
            "tests",
            self.now,
            PEOPLE[actor],
            wave,
            shown,
            nodes,
            more,
            until,
        )
        self.commit(VoteCast(rollout_id, new_vote))
        self.log_effect(
            "vote",
            rollout=rollout_id,
            id=new_vote.id,
            gate=gate.value,
            wave=wave,
            digest=new_vote.digest,
            uid=actor.uid,
            yes=yes,
            teams=list(new_vote.teams),
            shown=list(shown),
            nodes=list(nodes),
            more=more,
            until=until,
        )

    def withdraw(self) -> None:
        """Withdraw a no, or a yes at a closed gate."""
        rollout = self._some_rollout()
        votes = [] if rollout is None else [vote for vote in rollout.votes if vote.withdrawn_at is None]
        opened = set() if rollout is None else {(each.gate, each.wave) for each in rollout.opened}
        free = [vote for vote in votes if not vote.yes or (vote.gate, vote.wave) not in opened]
        if rollout is not None and free:
            self.withdraw_vote(rollout.id, self.rng.choice(free))

    def withdraw_vote(self, rollout: str, vote: Vote) -> None:
        """Withdraw a vote."""
        self.commit(VoteWithdrawn(rollout, vote.id, vote.actor, "tests", self.now))
        self.log_effect("withdraw", rollout=rollout, id=vote.id)

    def resolve_failure(self) -> None:
        """Retry, skip or roll back a failed node, or skip a pending one."""
        failed = self._targets(Phase.FAILED)
        if not failed:
            self._skip_waiting()
            return
        target = self.rng.choice(failed)
        match self.rng.choice(("retry", "retry", "skip", "rollback", "leave")):
            case "retry":
                self.retry(target)
            case "rollback" if not (self.index.rollout(target.rollout).closed or self._is_held(target.node)):
                self.move(target, Trigger.ROLLBACK_ORDERED, rolling_back=True)
                self.log_effect("begin", rollout=target.rollout, node=target.node, rollback=True)
            case "skip":
                self.skip(target)
            case _:
                self.commit(NodeOrdered(target.rollout, target.node, None, SUBMITTER, "tests", self.now))

    def _is_held(self, node: str) -> bool:
        return any(hold.until is None or self.now < hold.until for hold in self.index.holds_on(node))

    def retry(self, target: Target) -> None:
        """Let a failed node wait for another try."""
        if not self.index.rollout(target.rollout).closed:
            self.move(target, Trigger.RETRIED)
            self.log_effect("retry", rollout=target.rollout, node=target.node)

    def skip(self, target: Target) -> None:
        """Return a node if it is isolated, and leave it out."""
        if target.isolated:
            self._record_isolation(target, False)
            self.log_effect("back", rollout=target.rollout, node=target.node)
        self.move(self.index.target(target.rollout, target.node), Trigger.SKIPPED, Outcome.SKIPPED)
        self.log_effect("skip", rollout=target.rollout, node=target.node)

    def _skip_waiting(self) -> None:
        waiting = self._targets(Phase.PENDING)
        if waiting and self.rng.random() < 0.2:
            self.skip(self.rng.choice(waiting))

    def fail_soak_check(self) -> None:
        """Let a check of a done canary turn red."""
        done = [
            target
            for target in self._targets(Phase.DONE)
            if target.outcome is Outcome.CHANGED
            and target.wave == "canary"
            and target.node in self.index.nodes
            and not self.index.rollout(target.rollout).closed
            and not any(
                other.phase in IN_FLIGHT_PHASES or other.isolated
                for other in self.index.targets_on(target.node)
            )
        ]
        if done and self.rng.random() < 0.3:
            self._fail(self.rng.choice(done), Trigger.SOAK_CHECK_FAILED)

    def refresh_inventory(self) -> None:
        """Let nodes appear, go and change in the inventory; follow it with amendments."""
        known = sorted(self.index.nodes)
        match self.rng.choice(("appear", "go", "change")):
            case "appear":
                self.last_id += 1
                node = random_node(self.rng, f"m{self.last_id}")
                self.actual_health[node.name] = (NodeHealth.UP, False)
                self.commit(NodesDiscovered((node,)))
            case "go" if len(known) > 2:
                name = self.rng.choice(known)
                # The inventory keeps a node in flight.
                if not any(target.phase in IN_FLIGHT_PHASES for target in self.index.targets_on(name)):
                    self.commit(NodesRemoved((name,)))
            case _:
                node = self.index.nodes[self.rng.choice(known)]
                changed = random_node(self.rng, node.name)
                self.commit(NodesDiscovered((replace(node, labels=changed.labels),)))
        self._log_inventory()
        self.apply_amendments()

    def apply_amendments(self) -> None:
        """Follow the inventory with amendments."""
        for event in membership_events(self.index, self.now, describe_causes):
            self.commit(event)
            self._log_amendment(event)

    def _log_amendment(self, event: Event) -> None:
        match event:
            case TargetsJoined():
                for target in event.targets:
                    where = {"wave": target.wave, "team": target.team}
                    self.log_effect("join", rollout=event.rollout, node=target.node, **where)
            case TargetChanged():
                self.log_effect("amend", rollout=event.rollout, node=event.node, team=event.team)
            case PhaseMoved():
                self.log_effect("leave", rollout=event.rollout, node=event.node)

    def change_limits(self) -> None:
        """Let the settings change."""
        limits = random_limits(self.rng)
        self.index.update_limits(limits)
        self.log_effect("settings", pools=oracle_pools(limits), fleet=limits.max_parallel, within=60.0)

    def _some_rollout(self) -> Any:
        going = [rollout for rollout in self.index.rollouts.values() if not rollout.closed]
        return self.rng.choice(going) if going else None

    def _targets(self, phase: Phase) -> list[Target]:
        found = [t for name in self.index.rollouts for t in self.index.targets(name) if t.phase is phase]
        return sorted(found, key=lambda target: (target.rollout, target.node))

    def advance_some(self) -> None:
        """Let some of the nodes in flight take their next step."""
        for target in self.index.needing_driver():
            if target.phase in IN_FLIGHT_PHASES and self.rng.random() < 0.7:
                self.advance(self.index.target(target.rollout, target.node))

    # -- peace

    def stop_faults(self) -> None:
        """End all faults: nodes come up, holds are released, and every no is withdrawn."""
        self.has_faults = False
        self.apply_amendments()
        self.actual_health = dict.fromkeys(self.actual_health, (NodeHealth.UP, False))
        self.traffic.clear()
        for hold in self.index.holds:
            self.release(hold)
        for freeze in self.index.freezes:
            self.unfreeze(freeze)
        for rollout in list(self.index.rollouts.values()):
            if rollout.closed:
                continue
            if rollout.paused is not None:
                self.commit(RolloutResumed(rollout.id, SUBMITTER, "peace", self.now))
                self.log_effect("resume", rollout=rollout.id)
            for vote in rollout.votes:
                if not vote.yes and vote.withdrawn_at is None:
                    self.withdraw_vote(rollout.id, vote)
        self.index.update_limits(replace(self.index.limits, pools={"team": PoolRule()}, max_parallel=8))
        self.log_effect("settings", pools={"team": {"": 1}}, fleet=8, within=60.0)

    def resolve_all_failures(self) -> None:
        """Let failed nodes be tried again (left out where their rollout is over) and everybody say yes."""
        for target in self._targets(Phase.FAILED):
            (self.skip if self.index.rollout(target.rollout).closed else self.retry)(target)
        for target in self._targets(Phase.DONE) + self._targets(Phase.PENDING):
            if target.isolated and self.index.rollout(target.rollout).closed:
                self._record_isolation(target, False)
                self.log_effect("back", rollout=target.rollout, node=target.node)
        for target in self._targets(Phase.PENDING):
            self._break_deadlock(target)
        for rollout in list(self.index.rollouts.values()):
            if rollout.closed:
                continue
            codes = {reason.code for reason in why_nodes(self.index, rollout.id, self.now).values() if reason}
            if codes & {"gate-start", "gate-continue", "node-failed", "needs-vote"}:
                self.approve_all_gates(rollout.id)

    def _break_deadlock(self, target: Target) -> None:
        """Return one of two nodes that wait for each other: for a slot, or the one for the other's wave."""
        rollout = self.index.rollout(target.rollout)
        if target.isolated and not rollout.closed:
            reason = reason_of(self.index, target.rollout, target.node, self.now)
            waits_for_isolated = any(peer["cause"] == "isolated" for peer in _peers(reason))
            if waits_for_isolated or (reason.code == "earlier-wave" and self._is_waited_for(target)):
                self.skip(target)

    def _is_waited_for(self, target: Target) -> bool:
        """Whether a node of the wave that is not over waits for the slot of this one."""
        reasons = why_nodes(self.index, target.rollout, self.now).values()
        peers = [peer for reason in reasons if reason for peer in _peers(reason)]
        return any((peer["node"], peer.get("phase")) == (target.node, "pending") for peer in peers)

    def approve_all_gates(self, rollout: str) -> None:
        """Let everybody say yes wherever they are asked."""
        for gate in GateName:
            wave = self.index.rollout(rollout).plan.waves[0].name if gate is GateName.CONTINUE else ""
            for actor in PEOPLE:
                self.cast_vote(rollout, gate, wave, actor)

    def step(self) -> None:
        """Let work go on, time pass, and now and then something happen."""
        self.advance_some()
        self.pass_time(40.0)
        if self.rng.random() < 0.4:
            self.resolve_failure()
        if self.rng.random() < 0.5:
            self.vote()
        if self.rng.random() < 0.1 and (rollout := self._some_rollout()) is not None:
            self.approve_all_gates(rollout.id)
        if self.rng.random() < 0.4:
            self.random_event()
        if self.rng.random() < 0.5:
            self.confirm_reports()


_RANDOM_EVENTS: tuple[Callable[[FleetSimulator], None], ...] = (
    FleetSimulator.observe_some,
    FleetSimulator.observe_some,
    FleetSimulator.change_node_health,
    FleetSimulator.change_node_health,
    FleetSimulator.change_traffic,
    FleetSimulator.change_traffic,
    FleetSimulator.hold,
    FleetSimulator.hold,
    FleetSimulator.freeze,
    FleetSimulator.pause,
    FleetSimulator.withdraw,
    FleetSimulator.fail_soak_check,
    FleetSimulator.fail_soak_check,
    FleetSimulator.refresh_inventory,
    FleetSimulator.change_limits,
)


def _peers(reason: Reason) -> tuple[Any, ...]:
    """Return the nodes that a reason names as holders of a pool's slots."""
    found: Any = reason.params.get("peers", ())
    return tuple(found)
