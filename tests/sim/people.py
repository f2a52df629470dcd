"""The people: somebody who does all sorts of things at any time, and somebody who tidies up.

Both ask as the control socket's handlers do: judged and committed in one breath,
inside the daemon, whose answer may be lost with it.  What was answered well must
never be lost: acknowledged votes are kept and compared in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from machines import gates
from machines.events import VoteCast
from machines.plan import GateName
from machines.rollout import Actor, ActorKind, Rollout, Target, Vote
from machines.states import BUSY, Phase
from rolloutd import locking, orders, voting
from rolloutd.errors import RolloutdError
from rolloutd.orders import Events
from rolloutd.state import InvariantBroken, State
from rolloutd.voting import Ballot
from tests.sim.life import Life
from tests.sim.world import World

PATIENCE_S = 60.0
"""How long somebody waits for the daemon's answer."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with an account (orders.Asker)."""

    user: str
    uid: int
    teams: frozenset[str]
    admin: bool = False

    @property
    def actor(self) -> Actor:
        """The same somebody, as events name them."""
        return Actor(ActorKind.PERSON, self.user, self.uid)


SAM = Person("sam", 1000, frozenset({"infra"}))
OLGA = Person("olga", 1001, frozenset({"infra"}), admin=True)
ANN = Person("ann", 1002, frozenset({"a"}))
BEN = Person("ben", 1003, frozenset({"b"}))
EVERYBODY = (SAM, OLGA, ANN, BEN)

STUCK_S = 3600.0
"""After so long somebody leaves out a node that waits isolated: it may be a mate of its that it waits for."""

Deciding = Callable[[State], Events]


@dataclass(slots=True)
class People:
    """All who ask this daemon things, and what they were answered."""

    world: World
    life: Callable[[], Life | None]
    votes: dict[str, list[str]] = field(default_factory=dict)
    retries: dict[tuple[str, str], int] = field(default_factory=dict)
    freezes: int = 0

    # -- asking

    async def ask(self, who: Person, cause: str, deciding: Deciding) -> bool:
        """Ask the daemon for something; say whether it was done, as far as the asker knows."""
        life = self.life()
        if life is None or life.state is None:
            return False
        task = life.ask(self._decided(life.state, who, cause, deciding))
        await asyncio.wait({task}, timeout=PATIENCE_S)
        if not task.done() or task.exception() is not None or not task.result():
            return False
        self.world.marks.hit(f"person:{cause}")
        return True

    async def _decided(self, state: State, who: Person, cause: str, deciding: Deciding) -> bool:
        try:
            async with state.deciding(who.actor) as commit:
                events = deciding(state)
                await commit(events, cause)
        except InvariantBroken as broken:
            self.world.court.accuse(f"an order was let through that the invariants refuse: {broken}")
        except (RolloutdError, KeyError):
            return False
        for event in events:
            if isinstance(event, VoteCast):
                self.votes.setdefault(event.rollout, []).append(event.vote.id)
        return bool(events)

    # -- somebody who does all sorts of things

    async def meddle(self, people: random.Random, pace_s: float) -> None:
        """Do something now and then."""
        deeds = [getattr(self, f"_{name}") for name in _DEEDS]
        while True:
            await asyncio.sleep(people.expovariate(1.0 / pace_s))
            state = self._state()
            if state is not None and state.index.rollouts:
                await people.choice(deeds)(people, state)

    async def _vote(self, people: random.Random, state: State) -> None:
        rollout, who = self._some(people, state), people.choice(EVERYBODY)
        ballot = Ballot(people.choice(list(GateName)), people.random() < 0.93, "tests")
        if people.random() < 0.1:
            ballot = replace(ballot, digest="of another plan")
        await self.ask(who, "vote", lambda now: voting.vote(now, who, now.index.rollout(rollout), ballot))

    async def _vote_of_old(self, people: random.Random, state: State) -> None:
        """Let a vote for another digest come from somewhere: an older version, a restored backup."""
        rollout, who = self._some(people, state), people.choice((SAM, OLGA))
        gate = people.choice(list(GateName))

        def cast(now: State) -> Events:
            votes = now.index.rollout(rollout).votes
            failures = tuple(each.id for each in now.index.rollout(rollout).failures)
            name = f"{rollout}#v{len(votes) + 1}"
            wave = voting.wave_of(now, now.index.rollout(rollout), gate, None)
            vote = Vote(
                name,
                gate,
                "of another plan",
                who.actor,
                True,
                "",
                now.now(),
                ("infra", "a", "b"),
                wave,
                failures,
            )
            return (VoteCast(rollout, vote),)

        await self.ask(who, "vote-of-old", cast)

    async def _withdraw(self, people: random.Random, state: State) -> None:
        rollout = self._some(people, state)
        votes = [each for each in state.index.rollout(rollout).votes if each.withdrawn_at is None]
        if not votes:
            return
        vote = people.choice(votes)
        who = next(each for each in EVERYBODY if each.uid == vote.actor.uid)
        wave = vote.wave or None
        await self.ask(
            who,
            "withdraw",
            lambda now: voting.withdraw(
                now, who, now.index.rollout(rollout), vote.gate, "tests", team=None, wave=wave
            ),
        )

    async def _pause(self, people: random.Random, state: State) -> None:
        await self._steer(orders.pause, self._some(people, state))

    async def _resume(self, people: random.Random, state: State) -> None:
        await self._steer(orders.resume, self._some(people, state))

    async def _cancel(self, people: random.Random, state: State) -> None:
        if people.random() < 0.15:
            await self._steer(people.choice((orders.cancel, _cancel_now)), self._some(people, state))

    async def _delete(self, people: random.Random, state: State) -> None:
        for rollout in [each.id for each in state.index.rollouts.values() if each.closed][:1]:
            if people.random() < 0.3:
                await self.ask(OLGA, "delete", lambda now: _deleted(now, rollout))

    async def _stop(self, people: random.Random, state: State) -> None:
        await self._steer(_stop, self._some(people, state))

    async def _advance(self, people: random.Random, state: State) -> None:
        rollout = self._some(people, state)
        waiting = [t.node for t in state.index.targets(rollout) if t.phase is Phase.PENDING]
        if waiting:
            await self._ordered(orders.advance, rollout, people.choice(sorted(waiting)))

    async def _retry(self, people: random.Random, state: State) -> None:
        await self._order(people, state, orders.retry)

    async def _rollback(self, people: random.Random, state: State) -> None:
        await self._order(people, state, orders.rollback)

    async def _skip(self, people: random.Random, state: State) -> None:
        await self._order(people, state, people.choice((_skip, _return, _leave)))

    async def _return(self, people: random.Random, state: State) -> None:
        await self._give_back(people.choice(sorted(self.world.machines)))

    async def _hold(self, people: random.Random, state: State) -> None:
        node = people.choice(sorted(self.world.machines))
        until = None if people.random() < 0.5 else state.now() + 300.0
        await self.ask(OLGA, "hold", lambda now: locking.hold(now, OLGA, node, "tests", until=until)[1])

    async def _release(self, people: random.Random, state: State) -> None:
        node = people.choice(sorted(self.world.machines))
        await self.ask(OLGA, "release", lambda now: locking.release(now, OLGA, node))

    async def _freeze(self, people: random.Random, state: State) -> None:
        scope = people.choice(("all", "team/a", "rack/r1"))
        until = None if people.random() < 0.5 else state.now() + 300.0
        self.freezes += 1
        fresh = f"f{self.freezes}"
        await self.ask(OLGA, "freeze", lambda now: locking.freeze(now, OLGA, scope, "tests", until, fresh))

    async def _unfreeze(self, people: random.Random, state: State) -> None:
        for freeze in state.index.freezes[:1]:
            scope = freeze.id
            await self.ask(OLGA, "unfreeze", lambda now: locking.unfreeze(now, OLGA, scope))

    async def _cordon(self, people: random.Random, state: State) -> None:
        machine = self.world.machines[people.choice(sorted(self.world.machines))]
        if self.world.cordon(machine):
            self.world.marks.hit("fault:foreign-cordon")

    async def _uncordon(self, people: random.Random, state: State) -> None:
        self.world.uncordon(self.world.machines[people.choice(sorted(self.world.machines))])

    async def _refresh(self, people: random.Random, state: State) -> None:
        life = self.life()
        if life is not None and life.daemon is not None:
            daemon = life.daemon

            async def refresh() -> None:
                if not self.world.over:
                    daemon.refresh()

            life.ask(refresh())

    async def _read(self, people: random.Random, state: State) -> None:
        """Look around, as whoever watches does."""
        life = self.life()
        if life is None or life.keeper is None:
            return
        keeper, rollout = life.keeper, self._some(people, state)

        async def read() -> None:
            await keeper.audit(after=3, limit=10, rollout=rollout)
            await keeper.closed_rollouts()
            await keeper.targets(rollout)
            await keeper.rollout(rollout)
            digest = state.index.rollout(rollout).digest
            await keeper.done_before(digest.change)
            await keeper.find_identical(digest.change, "", digest.policy)
            await life.look_in()

        task = life.ask(read())
        await asyncio.wait({task}, timeout=PATIENCE_S)

    # -- somebody who tidies up

    async def tidy(self) -> None:
        """Once nothing goes wrong any more, do what lets every rollout come to its end."""
        state = self._state()
        if state is None:
            return
        for freeze in state.index.freezes:
            scope = freeze.id
            await self.ask(OLGA, "thaw", lambda now, scope=scope: locking.unfreeze(now, OLGA, scope))  # type: ignore[misc]
        for hold in state.index.holds:
            if hold.source != orders.LEFT:
                await self._released(hold.node, hold.source, hold.id)
        for rollout in list(state.index.rollouts.values()):
            await self._help(state, rollout)
        for rollout in state.index.rollouts.values():
            for target in state.index.targets(rollout.id):
                if rollout.closed and target.phase is Phase.PENDING and target.isolated:
                    await self._ordered(_return, rollout.id, target.node)
        left = {hold.node for hold in state.index.holds if hold.source == orders.LEFT}
        for node in sorted(self.world.machines):
            isolated = any(t.isolated and t.phase not in BUSY for t in state.index.targets_on(node))
            if isolated or node in left:
                await self._give_back(node)

    async def care(self) -> None:
        """In the middle of trouble, see to it that votes are there and nothing stays paused."""
        state = self._state()
        if state is None:
            return
        for rollout in list(state.index.rollouts.values()):
            if rollout.paused is not None:
                await self._steer(orders.resume, rollout.id)
            await self._approve(state, rollout)

    async def _approve(self, state: State, rollout: Rollout) -> None:
        for gate in GateName:
            waves = [w.name for w in rollout.plan.waves] if gate is GateName.CONTINUE else [""]
            for wave in waves:
                await self._agree(state, rollout.id, gate, wave)

    async def _released(self, node: str, source: str, name: str) -> None:
        await self.ask(OLGA, "tidy", lambda now: locking.release(now, OLGA, node, source=source, id=name))

    async def _help(self, state: State, rollout: Rollout) -> None:
        name = rollout.id
        if rollout.closed:
            return
        if rollout.paused is not None:
            await self._steer(orders.resume, name)
        await self._approve(state, rollout)
        for target in list(state.index.targets(name)):
            if target.phase is Phase.FAILED and target.order is None:
                await self._mend(target)
            stuck = target.phase is Phase.PENDING and target.isolated
            if stuck and state.now() - target.since > STUCK_S:
                await self._ordered(_return, name, target.node)

    async def _agree(self, state: State, name: str, gate: GateName, wave: str) -> None:
        """Let everybody take back their no, and say yes where they are asked."""
        rollout = state.index.rollouts.get(name)
        if rollout is None or rollout.closed:
            return
        noes = [v for v in gates.cast_at(rollout, gate, wave) if not v.yes]
        view = gates.gate_view(state.index, rollout, gate, wave, state.now())
        waiting = any(t.needs_vote_of is not None for t in state.index.targets(name))
        if not noes and view.state != "waiting" and not waiting and not any(h < w for _, w, h in view.teams):
            return
        named = wave or None
        for who in EVERYBODY:
            if any(each.actor.uid == who.uid for each in noes):
                await self.ask(
                    who,
                    "tidy",
                    lambda now, who=who: voting.withdraw(  # type: ignore[misc]
                        now, who, now.index.rollout(name), gate, "tidy", team=None, wave=named
                    ),
                )
            ballot = Ballot(gate, True, "tidy", wave=named)
            await self.ask(
                who,
                "tidy",
                lambda now, who=who: voting.vote(now, who, now.index.rollout(name), ballot),  # type: ignore[misc]
            )

    async def _mend(self, target: Target) -> None:
        """Try a failed node again, and after that leave it out."""
        key = (target.rollout, target.node)
        self.retries[key] = self.retries.get(key, 0) + 1
        await self._ordered(orders.retry if self.retries[key] <= 2 else _return, *key)

    # -- small things

    async def _steer(self, order: Any, rollout: str) -> None:
        await self.ask(
            OLGA,
            order.__name__.lstrip("_"),
            lambda now: order(now, OLGA, now.index.rollout(rollout), "tests"),
        )

    async def _order(self, people: random.Random, state: State, order: Any) -> None:
        rollout = self._some(people, state)
        targets = sorted(state.index.targets(rollout), key=lambda t: t.node)
        failed = [t for t in targets if t.phase is Phase.FAILED] or targets
        await self._ordered(order, rollout, people.choice(failed).node)

    async def _ordered(self, order: Any, rollout: str, node: str) -> None:
        await self.ask(
            OLGA,
            order.__name__.lstrip("_"),
            lambda now: order(
                now, OLGA, now.index.rollout(rollout), now.index.target(rollout, node), "tests"
            ),
        )

    async def _give_back(self, node: str) -> None:
        await self.ask(OLGA, "return", lambda now: orders.give_back(now, OLGA, node, "tests")[1])

    def _state(self) -> State | None:
        life = self.life()
        return None if life is None else life.state

    def _some(self, people: random.Random, state: State) -> str:
        names: Sequence[str] = list(state.index.rollouts)
        return people.choice(names)


def _deleted(now: State, rollout: str) -> Events:
    return orders.delete(now, OLGA, now.index.rollout(rollout), tuple(now.index.targets(rollout)))


def _stop(*args: Any) -> Events:
    return orders.pause(*args, stop=True)


def _cancel_now(*args: Any) -> Events:
    return orders.cancel(*args, stop=True)


def _skip(*args: Any) -> Events:
    return orders.skip(*args, None)


def _return(*args: Any) -> Events:
    return orders.skip(*args, "return")


def _leave(*args: Any) -> Events:
    return orders.skip(*args, "leave")


_DEEDS = (
    *("vote", "vote", "vote", "vote", "vote_of_old", "withdraw", "pause", "resume", "resume", "cancel"),
    *("retry", "retry", "rollback", "rollback", "skip", "return", "hold", "release", "freeze", "unfreeze"),
    *("cordon", "uncordon", "refresh", "read", "stop", "advance", "delete"),
)
