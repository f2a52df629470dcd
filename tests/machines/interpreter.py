"""A small world that carries decisions out, with accidents, and writes an effect log for the oracle.

It does what the daemon and its drivers do, one event at a time, over an index;
every event is judged by violation() before it becomes fact.  Everything random
comes from one seed.

Longer than 400 lines: one world, whose every move the judges must see.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from machines.amend import amendments
from machines.book import Snapshot
from machines.changes import target_after
from machines.decision import Decision
from machines.events import (
    Event,
    Frozen,
    GateOpened,
    HoldReleased,
    HoldTaken,
    LookedCurrent,
    NodeOrdered,
    NodesGone,
    NodesSeen,
    PhaseMoved,
    RolloutCancelled,
    RolloutEnded,
    RolloutPaused,
    RolloutResumed,
    StepAction,
    StepRecord,
    StepRecorded,
    StepState,
    TargetChanged,
    TargetsJoined,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.gates import may_vote, unsettled
from machines.invariants import violation
from machines.limits import PoolRule
from machines.node import Observation, Sight
from machines.plan import GateName, Need, Plan
from machines.projection import Projection
from machines.rollout import Actor, ActorKind, Failure, Hold, Target, Vote
from machines.schedule import decide, why, why_all
from machines.states import BUSY, Outcome, Phase, Trigger, edge
from machines.traffic import Traffic
from machines.windows import Freeze
from tests.machines.fleets import limits_of, node_of, plain_pools, some_plan
from tests.machines.worlds import T0, opening

SUBMITTER = Actor(ActorKind.PERSON, "sam", 1000)
PEOPLE: dict[Actor, tuple[str, ...]] = {
    SUBMITTER: ("infra", "a"),
    Actor(ActorKind.PERSON, "olga", 1001): ("infra",),
    Actor(ActorKind.PERSON, "otto", 1002): ("infra", "b"),
    Actor(ActorKind.PERSON, "ann", 1003): ("a",),
    Actor(ActorKind.PERSON, "ben", 1004): ("b", "c"),
    Actor(ActorKind.PERSON, "cleo", 1005): ("c",),
}
FAULTS = ("no route to host", "task 3 failed", "disk full")


class Broken(AssertionError):
    """An event would have broken an invariant."""


@dataclass
class World:
    """An index, the truth about the nodes, and the log of what was done to them."""

    chance: random.Random
    index: Projection
    now: float
    log: list[dict[str, Any]]
    truth: dict[str, tuple[Sight, bool]]
    faulty: bool = True
    trusting: bool = False
    traffic: dict[str, bool | None] = field(default_factory=dict)
    """Nodes with client traffic, or of which nobody can say (None); all others are idle."""
    ids: int = 0

    # -- making one

    @classmethod
    def of(cls, seed: int) -> World:
        """Return a fleet with up to three plans, as the seed says."""
        chance = random.Random(seed)
        nodes = [node_of(chance, f"n{number}") for number in range(1, chance.randint(3, 9))]
        limits = limits_of(chance)
        index = Projection.build(Snapshot(nodes=tuple(nodes)), limits, lambda content: content["plan"])
        world = cls(chance, index, T0, [], {node.name: (Sight.UP, False) for node in nodes})
        world.note("settings", pools=plain_pools(limits), fleet=limits.max_parallel, within=60.0)
        world._note_inventory()
        for number in range(chance.randint(1, 3)):
            world._submit(f"R{number}", some_plan(chance))
            if chance.random() < 0.7:
                world.agree(f"R{number}")
        return world

    def _submit(self, rollout: str, plan: Plan) -> None:
        event = opening(rollout, plan, self.index, self.now, by=SUBMITTER)
        self.index.apply(event)
        gates = {gate: plan.gates.get(gate, Need(owner=1)) for gate in GateName}
        self.note(
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
        )

    # -- telling

    def note(self, kind: str, **fields: Any) -> None:
        """Write to the effect log."""
        self.log.append({"kind": kind, "at": self.now, **fields})

    def _note_inventory(self) -> None:
        labels = {node.name: dict(node.labels) for node in self.index.nodes.values()}
        self.note("inventory", labels=labels)

    def commit(self, event: Event) -> None:
        """Judge the event, then let it become fact; raises Broken, unless the world is trusting."""
        broken = None if self.trusting else violation(self.index, event, self.now)
        if broken is not None:
            raise Broken(broken)
        self.index.apply(event)

    def move(self, target: Target, trigger: Trigger, outcome: Outcome | None = None, **fields: Any) -> None:
        """Let a node take an edge."""
        begins = trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED)
        way = edge(trigger, target.phase, outcome)
        rolling = target.rolling_back and way.target in (*BUSY, Phase.FAILED)
        event = PhaseMoved(
            rollout=target.rollout,
            node=target.node,
            trigger=trigger,
            source=target.phase,
            target=way.target,
            attempt=target.attempt + begins,
            at=self.now,
            outcome=outcome,
            rolling_back=fields.pop("rolling_back", rolling),
            **fields,
        )
        assert target_after(target, event).phase is way.target
        self.commit(event)

    # -- carrying out

    def decide(self) -> Decision:
        """Decide and carry it out; what was observed is known a moment later."""
        decision = decide(self.index, self.now)
        for gate in decision.opens:
            self.commit(GateOpened(gate.rollout, gate.gate, gate.wave, self.now))
            self.note("open", rollout=gate.rollout, gate=gate.gate.value, wave=gate.wave)
        for start in decision.starts:
            self.move(self.index.target(start.rollout, start.node), Trigger.ADMITTED)
            self.note("begin", rollout=start.rollout, node=start.node)
        for look in decision.looks:
            self._look(self.index.target(look.rollout, look.node))
        for back in decision.put_backs:
            self._put_back(self.index.target(back.rollout, back.node))
        for rollout in decision.ends:
            self.commit(RolloutEnded(rollout, self.now))
        if decision.observe:
            self._observe(decision.observe)
        for probe in decision.probes:
            self._probe(probe.rollout, probe.node)
        return decision

    def _look(self, target: Target) -> None:
        if self.chance.random() < 0.5:
            self.commit(LookedCurrent(target.rollout, target.node, self.now))
            return
        self.move(target, Trigger.FOUND_CURRENT, Outcome.ALREADY_CURRENT)
        self.note("current", rollout=target.rollout, node=target.node)

    def _put_back(self, target: Target) -> None:
        self._isolate(target, False)
        later = self.now + self.chance.choice((0.0, 30.0, 90.0))
        self.move(self.index.target(target.rollout, target.node), Trigger.PUT_BACK, not_before=later)
        self.note("put-back", rollout=target.rollout, node=target.node)

    def _isolate(self, target: Target, isolated: bool) -> None:
        record = StepRecord(
            target.rollout,
            target.node,
            target.attempt,
            "isolate.0",
            StepAction.DO if isolated else StepAction.UNDO,
            1,
            StepState.OK,
            self.now,
            self.now,
        )
        self.commit(StepRecorded(record, isolated))

    def _observe(self, nodes: tuple[str, ...]) -> None:
        seen = []
        for node in nodes:
            sight, foreign = self.truth.get(node, (Sight.UP, False))
            seen.append(Observation(node, sight, self.now, "as it is", foreign))
            self.note("saw", node=node, up=sight is Sight.UP, foreign=foreign)
        self.index.observed(seen, self.now)

    def _probe(self, rollout: str, node: str) -> None:
        busy = self.traffic.get(node, False)
        self.index.probed(Traffic(rollout, node, busy, self.now, f"{node} is {busy}"))
        self.note("probe", rollout=rollout, node=node, idle=busy is False)

    def come_and_go(self) -> None:
        """Let client traffic come to a node, or end there."""
        node = self.chance.choice(sorted(self.truth))
        self.traffic[node] = self.chance.choice((True, True, None, False))

    def work(self, target: Target) -> None:
        """Let one node in flight take its next step, or fail in it."""
        if self.faulty and self.chance.random() < 0.12:
            self._fail(target, Trigger.FAILED)
            return
        if target.phase is Phase.ISOLATING:
            self._isolate(target, True)
            self.note("isolated", rollout=target.rollout, node=target.node)
            self.move(self.index.target(target.rollout, target.node), Trigger.ISOLATED)
            self.note("maintain", rollout=target.rollout, node=target.node)
        elif target.phase is Phase.MAINTAINING:
            self.note("maintained", rollout=target.rollout, node=target.node)
            self.move(target, Trigger.MAINTAINED)
        else:
            self._finish(target)

    def _finish(self, target: Target) -> None:
        if target.isolated:
            self._isolate(target, False)
            self.note("back", rollout=target.rollout, node=target.node)
        outcome = Outcome.ROLLED_BACK if target.rolling_back else Outcome.CHANGED
        self.move(self.index.target(target.rollout, target.node), Trigger.VERIFIED, outcome)
        self.note("done", rollout=target.rollout, node=target.node)

    def _fail(self, target: Target, trigger: Trigger) -> None:
        number = sum(failure.node == target.node for failure in self.index.rollout(target.rollout).failures)
        name = f"{target.node}#{target.attempt}.{number}"
        message = self.chance.choice(FAULTS)
        failure = Failure(name, target.node, target.attempt, "run.configure", message, self.now)
        self.move(target, trigger, failure=failure)
        kind = "fail" if trigger is Trigger.FAILED else "redden"
        self.note(kind, rollout=target.rollout, node=target.node, failure=name, signature=failure.signature)

    # -- accidents and people

    def accident(self) -> None:
        """Let one thing happen that nobody decided."""
        self.chance.choice(_ACCIDENTS)(self)

    def pass_time(self, most_s: float = 90.0) -> None:
        """Let time pass."""
        self.now += self.chance.uniform(0.5, most_s)

    def observe_some(self) -> None:
        """Let a watch report of some nodes."""
        known = sorted(self.index.nodes)
        self._observe(tuple(self.chance.sample(known, self.chance.randint(1, len(known)))))

    def break_or_mend(self) -> None:
        """Let a node go down, come up, or be cordoned by somebody else."""
        sight = self.chance.choice((Sight.UP, Sight.UP, Sight.DOWN, Sight.UNKNOWN))
        node = self.chance.choice(sorted(self.truth))
        self.truth[node] = (sight, sight is Sight.UP and self.chance.random() < 0.2)

    def hold(self) -> None:
        """Let somebody hold or release a node."""
        if self.index.holds and self.chance.random() < 0.6:
            self.release(self.chance.choice(self.index.holds))
            return
        until = self.chance.choice((None, self.now + 120.0))
        node = self.chance.choice(sorted(self.index.nodes))
        self.ids += 1
        self.commit(HoldTaken(Hold(node, "cli", f"h{self.ids}", SUBMITTER, "tests", self.now, until)))
        self.note("hold", node=node, id=f"h{self.ids}", until=until)

    def release(self, hold: Hold) -> None:
        """Release a hold."""
        self.commit(HoldReleased(hold.node, hold.source, hold.id, SUBMITTER, self.now))
        self.note("release", node=hold.node, id=hold.id)

    def freeze(self) -> None:
        """Let somebody freeze or thaw something."""
        if self.index.freezes:
            self.thaw(self.index.freezes[0])
            return
        self.ids += 1
        scope = self.chance.choice(("all", "team/a", "rack/r1"))
        until = self.chance.choice((None, self.now + 100.0))
        self.commit(Frozen(Freeze(f"f{self.ids}", scope, "tests", "sam", self.now, until)))
        self.note("freeze", id=f"f{self.ids}", scope=scope, until=until)

    def thaw(self, freeze: Freeze) -> None:
        """Lift a freeze."""
        self.commit(Unfrozen(freeze.id, SUBMITTER, self.now))
        self.note("unfreeze", id=freeze.id)

    def pause(self) -> None:
        """Let somebody pause or resume a rollout; rarely, cancel it."""
        rollout = self._some_rollout()
        if rollout is None:
            return
        if rollout.paused is not None:
            self.commit(RolloutResumed(rollout.id, SUBMITTER, "tests", self.now))
            self.note("resume", rollout=rollout.id)
        elif self.chance.random() < 0.9:
            self.commit(RolloutPaused(rollout.id, SUBMITTER, "tests", self.now))
            self.note("pause", rollout=rollout.id)
        else:
            self.commit(RolloutCancelled(rollout.id, SUBMITTER, "tests", self.now))
            self.note("cancel", rollout=rollout.id)

    def vote(self) -> None:
        """Let somebody vote where they are asked, sometimes no, sometimes for another digest."""
        rollout = self._some_rollout()
        if rollout is None:
            return
        gate = self.chance.choice(tuple(GateName))
        wave = rollout.plan.waves[0].name if gate is GateName.CONTINUE else ""
        actor = self.chance.choice(tuple(PEOPLE))
        yes = self.chance.random() < 0.9
        if not yes and gate is GateName.START:
            return
        digest = rollout.digest.whole if self.chance.random() < 0.9 else "another"
        self.cast(rollout.id, gate, wave, actor, yes=yes, digest=digest)

    def cast(
        self, rollout_id: str, gate: GateName, wave: str, actor: Actor, *, yes: bool = True, digest: str = ""
    ) -> None:
        """Let a person vote if the gate is asked."""
        rollout = self.index.rollout(rollout_id)
        if may_vote(self.index, rollout, gate, wave, self.now) is not None:
            return
        self.ids += 1
        shown, nodes, more = (), (), 0
        until = None
        if gate is GateName.PROCEED and yes:
            open_failures = unsettled(self.index, rollout)
            kept = self.chance.random() < 0.8 or not self.faulty
            shown = tuple(failure.id for failure in open_failures[: None if kept else 1])
            nodes = tuple(sorted({failure.node for failure in open_failures if self.chance.random() < 0.2}))
            more = self.chance.choice((0, 0, 1, 2))
            until = self.chance.choice((None, self.now + 100.0))
        cast = Vote(
            f"v{self.ids}",
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
        self.commit(VoteCast(rollout_id, cast))
        self.note(
            "vote",
            rollout=rollout_id,
            id=cast.id,
            gate=gate.value,
            wave=wave,
            digest=cast.digest,
            uid=actor.uid,
            yes=yes,
            teams=list(cast.teams),
            shown=list(shown),
            nodes=list(nodes),
            more=more,
            until=until,
        )

    def withdraw(self) -> None:
        """Let somebody take a no back, or a yes at a gate that is shut."""
        rollout = self._some_rollout()
        votes = [] if rollout is None else [vote for vote in rollout.votes if vote.withdrawn_at is None]
        opened = set() if rollout is None else {(each.gate, each.wave) for each in rollout.opened}
        free = [vote for vote in votes if not vote.yes or (vote.gate, vote.wave) not in opened]
        if rollout is not None and free:
            self.take_back(rollout.id, self.chance.choice(free))

    def take_back(self, rollout: str, vote: Vote) -> None:
        """Withdraw a vote."""
        self.commit(VoteWithdrawn(rollout, vote.id, vote.actor, "tests", self.now))
        self.note("withdraw", rollout=rollout, id=vote.id)

    def settle(self) -> None:
        """Let somebody retry, skip or roll back a failed node, or skip a waiting one."""
        failed = self._targets(Phase.FAILED)
        if not failed:
            self._skip_waiting()
            return
        target = self.chance.choice(failed)
        match self.chance.choice(("retry", "retry", "skip", "rollback", "leave")):
            case "retry":
                self.retry(target)
            case "rollback" if not (self.index.rollout(target.rollout).closed or self._held(target.node)):
                self.move(target, Trigger.ROLLBACK_ORDERED, rolling_back=True)
                self.note("begin", rollout=target.rollout, node=target.node, rollback=True)
            case "skip":
                self.skip(target)
            case _:
                self.commit(NodeOrdered(target.rollout, target.node, None, SUBMITTER, "tests", self.now))

    def _held(self, node: str) -> bool:
        return any(hold.until is None or self.now < hold.until for hold in self.index.holds_on(node))

    def retry(self, target: Target) -> None:
        """Let a failed node wait for another try."""
        if not self.index.rollout(target.rollout).closed:
            self.move(target, Trigger.RETRIED)
            self.note("retry", rollout=target.rollout, node=target.node)

    def skip(self, target: Target) -> None:
        """Return a node if it is isolated, and leave it out."""
        if target.isolated:
            self._isolate(target, False)
            self.note("back", rollout=target.rollout, node=target.node)
        self.move(self.index.target(target.rollout, target.node), Trigger.SKIPPED, Outcome.SKIPPED)
        self.note("skip", rollout=target.rollout, node=target.node)

    def _skip_waiting(self) -> None:
        waiting = self._targets(Phase.PENDING)
        if waiting and self.chance.random() < 0.2:
            self.skip(self.chance.choice(waiting))

    def redden(self) -> None:
        """Let a check of a done canary turn red."""
        done = [
            target
            for target in self._targets(Phase.DONE)
            if target.outcome is Outcome.CHANGED
            and target.wave == "canary"
            and target.node in self.index.nodes
            and not self.index.rollout(target.rollout).closed
            and not any(other.phase in BUSY or other.isolated for other in self.index.targets_on(target.node))
        ]
        if done and self.chance.random() < 0.3:
            self._fail(self.chance.choice(done), Trigger.REDDENED)

    def refresh(self) -> None:
        """Let nodes appear, go and change in the inventory; follow it with amendments."""
        known = sorted(self.index.nodes)
        match self.chance.choice(("appear", "go", "change")):
            case "appear":
                self.ids += 1
                node = node_of(self.chance, f"m{self.ids}")
                self.truth[node.name] = (Sight.UP, False)
                self.commit(NodesSeen((node,)))
            case "go" if len(known) > 2:
                self.commit(NodesGone((self.chance.choice(known),)))
            case _:
                node = self.index.nodes[self.chance.choice(known)]
                changed = node_of(self.chance, node.name)
                self.commit(NodesSeen((replace(node, labels=changed.labels),)))
        self._note_inventory()
        self.amend()

    def amend(self) -> None:
        """Follow the inventory with amendments."""
        for event in amendments(self.index, self.now):
            self.commit(event)
            self._note_amendment(event)

    def _note_amendment(self, event: Event) -> None:
        match event:
            case TargetsJoined():
                for target in event.targets:
                    where = {"wave": target.wave, "team": target.team}
                    self.note("join", rollout=event.rollout, node=target.node, **where)
            case TargetChanged():
                self.note("amend", rollout=event.rollout, node=event.node, team=event.team)
            case PhaseMoved():
                self.note("leave", rollout=event.rollout, node=event.node)

    def relimit(self) -> None:
        """Let the settings change."""
        limits = limits_of(self.chance)
        self.index.relimit(limits)
        self.note("settings", pools=plain_pools(limits), fleet=limits.max_parallel, within=60.0)

    def _some_rollout(self) -> Any:
        going = [rollout for rollout in self.index.rollouts.values() if not rollout.closed]
        return self.chance.choice(going) if going else None

    def _targets(self, phase: Phase) -> list[Target]:
        found = [t for name in self.index.rollouts for t in self.index.targets(name) if t.phase is phase]
        return sorted(found, key=lambda target: (target.rollout, target.node))

    def work_some(self) -> None:
        """Let some of the nodes in flight take their next step."""
        for target in self.index.busy():
            if target.phase in BUSY and self.chance.random() < 0.7:
                self.work(self.index.target(target.rollout, target.node))

    # -- peace

    def make_peace(self) -> None:
        """End all accidents: what is down comes up, what is held is released, nobody says no."""
        self.faulty = False
        self.amend()
        self.truth = dict.fromkeys(self.truth, (Sight.UP, False))
        self.traffic.clear()
        for hold in self.index.holds:
            self.release(hold)
        for freeze in self.index.freezes:
            self.thaw(freeze)
        for rollout in list(self.index.rollouts.values()):
            if rollout.closed:
                continue
            if rollout.paused is not None:
                self.commit(RolloutResumed(rollout.id, SUBMITTER, "peace", self.now))
                self.note("resume", rollout=rollout.id)
            for vote in rollout.votes:
                if not vote.yes and vote.withdrawn_at is None:
                    self.take_back(rollout.id, vote)
        self.index.relimit(replace(self.index.limits, pools={"team": PoolRule()}, max_parallel=8))
        self.note("settings", pools={"team": {"": 1}}, fleet=8, within=60.0)

    def settle_all(self) -> None:
        """Let failed nodes be tried again (left out where their rollout is over) and everybody say yes."""
        for target in self._targets(Phase.FAILED):
            (self.skip if self.index.rollout(target.rollout).closed else self.retry)(target)
        for target in self._targets(Phase.DONE) + self._targets(Phase.PENDING):
            if target.isolated and self.index.rollout(target.rollout).closed:
                self._isolate(target, False)
                self.note("back", rollout=target.rollout, node=target.node)
        for target in self._targets(Phase.PENDING):
            self._part(target)
        for rollout in list(self.index.rollouts.values()):
            if rollout.closed:
                continue
            codes = {reason.code for reason in why_all(self.index, rollout.id, self.now).values()}
            if codes & {"gate-start", "gate-continue", "node-failed", "needs-vote"}:
                self.agree(rollout.id)

    def _part(self, target: Target) -> None:
        """Return one of two nodes that wait for each other: for a slot, or the one for the other's wave."""
        rollout = self.index.rollout(target.rollout)
        if target.isolated and not rollout.closed:
            reason = why(self.index, target.rollout, target.node, self.now)
            full = reason.code in ("pool-full", "pool-over-budget") and "still isolated" in reason.text
            if full or (reason.code == "earlier-wave" and self._is_waited_for(target)):
                self.skip(target)

    def _is_waited_for(self, target: Target) -> bool:
        """Whether a node of the wave that is not over waits for the slot of this one."""
        reasons = why_all(self.index, target.rollout, self.now).values()
        return any(r.code == "pool-full" and f"{target.node} is pending" in r.text for r in reasons)

    def agree(self, rollout: str) -> None:
        """Let everybody say yes wherever they are asked."""
        for gate in GateName:
            wave = self.index.rollout(rollout).plan.waves[0].name if gate is GateName.CONTINUE else ""
            for actor in PEOPLE:
                self.cast(rollout, gate, wave, actor)

    def step(self) -> None:
        """Let work go on, time pass, and now and then something happen."""
        self.work_some()
        self.pass_time(40.0)
        if self.chance.random() < 0.4:
            self.settle()
        if self.chance.random() < 0.5:
            self.vote()
        if self.chance.random() < 0.1 and (rollout := self._some_rollout()) is not None:
            self.agree(rollout.id)
        if self.chance.random() < 0.4:
            self.accident()


_ACCIDENTS: tuple[Callable[[World], None], ...] = (
    World.observe_some,
    World.observe_some,
    World.break_or_mend,
    World.break_or_mend,
    World.come_and_go,
    World.come_and_go,
    World.hold,
    World.hold,
    World.freeze,
    World.pause,
    World.withdraw,
    World.redden,
    World.redden,
    World.refresh,
    World.relimit,
)
