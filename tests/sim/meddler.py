"""Somebody who does all sorts of things at any time: what a person may ask, in no good order."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

from machines import ballots
from machines.events import VoteCast
from machines.plan import GateName
from machines.rollout import Rollout, Target, Vote
from machines.states import BUSY, Phase
from machines.windows import Window
from rolloutd.orders import locking, steering, teaming, voting
from rolloutd.orders.steering import Events
from rolloutd.orders.voting import Ballot
from rolloutd.state import State
from tests.sim.people import EVERYBODY, OLGA, PATIENCE_S, SAM, People, Person

SUCCESSORS = 2
"""Rollouts that take over from another one, at most: each walks the whole fleet again."""

UTC = ZoneInfo("UTC")

REGRET_S = 60.0
"""How long somebody's no stands, more or less, before they take it back."""


class Meddler:
    """One person, or many; which of them does what is drawn."""

    def __init__(self, people: People) -> None:
        self._people = people
        self._freezes = 0
        self._successors = 0

    async def meddle(self, people: random.Random, pace_s: float) -> None:
        """Do something now and then."""
        deeds = [getattr(self, f"_{name}") for name in _DEEDS]
        while True:
            await asyncio.sleep(people.expovariate(1.0 / pace_s))
            state = self._people.state()
            if state is not None and state.index.rollouts:
                await people.choice(deeds)(people, state)

    async def _vote(self, people: random.Random, state: State) -> None:
        rollout, who = self._people.some(people, state), people.choice(EVERYBODY)
        ballot = Ballot(people.choice(list(GateName)), people.random() < 0.93, "tests")
        if people.random() < 0.1:
            ballot = replace(ballot, digest="of another plan")
        if ballot.gate is GateName.PROCEED:
            nodes = tuple(sorted(self._people.world.machines)[: people.randrange(3)])
            until = None if people.random() < 0.5 else state.now() + 600.0
            more = people.randrange(3) if until is None else 0
            ballot = replace(ballot, nodes=nodes if not more else (), more=more, until=until)
        await self._people.ask(
            who, "vote", lambda now: voting.vote(now, who, now.index.rollout(rollout), ballot)
        )

    async def _vote_of_old(self, people: random.Random, state: State) -> None:
        """Let a vote for another digest come from somewhere: an older version, a restored backup."""
        rollout, who = self._people.some(people, state), people.choice((SAM, OLGA))
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

        await self._people.ask(who, "vote-of-old", cast)

    async def _withdraw(self, people: random.Random, state: State) -> None:
        """Say something at a gate that waits, come to regret it, and take back what can be."""
        rollout = state.index.rollout(self._people.some(people, state))
        asked = [(GateName.CONTINUE, spec.name) for spec in rollout.plan.waves if spec.gate is not None]
        places = [(GateName.START, ""), *asked]
        waiting = [at for at in places if not rollout.closed and not ballots.is_opened(rollout, *at)]
        if not waiting:
            return
        (gate, wave), who = people.choice(waiting), people.choice((SAM, OLGA))
        cast = ballots.cast_at(rollout, gate, wave)
        if not any(vote.actor.uid == who.uid for vote in cast):
            await self._people.vote(who, rollout.id, Ballot(gate, False, "tests", wave=wave or None))
            await asyncio.sleep(people.expovariate(1.0 / REGRET_S))
        await self._taken_back(who, rollout.id, gate, wave or None)

    async def _taken_back(self, who: Person, rollout: str, gate: GateName, wave: str | None) -> None:
        await self._people.ask(
            who,
            "withdraw",
            lambda now: voting.withdraw(
                now, who, now.index.rollout(rollout), gate, "tests", team=None, wave=wave
            ),
        )

    async def _pause(self, people: random.Random, state: State) -> None:
        await self._people.steer(steering.pause, self._people.some(people, state))

    async def _resume(self, people: random.Random, state: State) -> None:
        await self._people.steer(steering.resume, self._people.some(people, state))

    async def _cancel(self, people: random.Random, state: State) -> None:
        if people.random() < 0.15:
            await self._people.steer(
                people.choice((steering.cancel, _cancel_now)), self._people.some(people, state)
            )

    async def _delete(self, people: random.Random, state: State) -> None:
        closed = [name for name, rollout in state.index.rollouts.items() if rollout.closed]
        if closed and people.random() < 0.3:
            await self._people.ask(OLGA, "delete", lambda now: _deleted(now, closed[0]))

    async def _supersede(self, people: random.Random, state: State) -> None:
        """Submit the same change with another policy, to take over from a rollout that is still going."""
        going = [rollout for rollout in state.index.rollouts.values() if not rollout.closed]
        if not going or self._successors >= SUCCESSORS:
            return
        self._successors += 1
        old, name = people.choice(going), f"S{self._successors}"
        if await self._people.supersede(OLGA, old, name):
            self._people.world.marks.hit("person:supersede")

    async def _stop(self, people: random.Random, state: State) -> None:
        await self._people.steer(_stop, self._people.some(people, state))

    async def _advance(self, people: random.Random, state: State) -> None:
        rollout = self._people.some(people, state)
        waiting = [t.node for t in state.index.targets(rollout) if t.phase is Phase.PENDING]
        if waiting:
            await self._people.ordered(steering.advance, rollout, people.choice(sorted(waiting)))

    async def _retry(self, people: random.Random, state: State) -> None:
        await self._order(people, state, steering.retry)

    async def _rollback(self, people: random.Random, state: State) -> None:
        await self._order(people, state, steering.rollback)

    async def _skip(self, people: random.Random, state: State) -> None:
        await self._order(people, state, people.choice((_skip, _return, _leave)))

    async def _return(self, people: random.Random, state: State) -> None:
        await self._people.give_back(people.choice(sorted(self._people.world.machines)))

    async def _hold(self, people: random.Random, state: State) -> None:
        targets = [t for name in state.index.rollouts for t in state.index.targets(name)]
        at_work = {target.node for target in targets if target.phase in BUSY}
        node = people.choice(sorted(at_work or self._people.world.machines))
        until = None if people.random() < 0.5 else state.now() + 300.0
        await self._people.ask(
            OLGA, "hold", lambda now: locking.hold(now, OLGA, node, "tests", until=until)[1]
        )

    async def _release(self, people: random.Random, state: State) -> None:
        held = {hold.node for hold in state.index.holds} or self._people.world.machines
        node = people.choice(sorted(held))
        await self._people.ask(OLGA, "release", lambda now: locking.release(now, OLGA, node))

    async def _freeze(self, people: random.Random, state: State) -> None:
        scope = people.choice(("all", "team/a", "rack/r1", "node/n1", "node/n2"))
        until = None if people.random() < 0.5 else state.now() + 300.0
        self._freezes += 1
        fresh = f"f{self._freezes}"
        await self._people.ask(
            OLGA, "freeze", lambda now: locking.freeze(now, OLGA, scope, "tests", until, fresh)
        )

    async def _team(self, people: random.Random, state: State) -> None:
        """Let a team open its window only some hours of the day, or always."""
        team = people.choice(("a", "b"))
        hours = people.choice(((), (Window(frozenset(range(7)), 9 * 60, 15 * 60, UTC),)))
        await self._people.ask(
            OLGA, "team", lambda now: teaming.set_rules(now, OLGA, team, hours, None, "tests")
        )

    async def _unfreeze(self, people: random.Random, state: State) -> None:
        scopes = [freeze.id for freeze in state.index.freezes]
        if scopes:
            await self._people.ask(OLGA, "unfreeze", lambda now: locking.unfreeze(now, OLGA, scopes[0]))

    async def _cordon(self, people: random.Random, state: State) -> None:
        pending = {
            t.node for name in state.index.rollouts for t in state.index.targets(name) if not t.attempt
        }
        names = sorted(pending) or sorted(self._people.world.machines)
        machine = self._people.world.machines[people.choice(names)]
        if self._people.world.cordon(machine):
            self._people.world.marks.hit("fault:foreign-cordon")

    async def _uncordon(self, people: random.Random, state: State) -> None:
        self._people.world.uncordon(
            self._people.world.machines[people.choice(sorted(self._people.world.machines))]
        )

    async def _refresh(self, people: random.Random, state: State) -> None:
        life = self._people.life()
        if life is not None and life.daemon is not None:
            daemon = life.daemon

            async def refresh() -> None:
                if not self._people.world.over:
                    daemon.refresh()

            life.ask(refresh())

    async def _read(self, people: random.Random, state: State) -> None:
        """Look around, as whoever watches does."""
        life = self._people.life()
        if life is None or life.keeper is None:
            return
        keeper, rollout = life.keeper, self._people.some(people, state)

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

    async def _order(self, people: random.Random, state: State, order: Any) -> None:
        rollout = self._people.some(people, state)
        targets = sorted(state.index.targets(rollout), key=lambda t: t.node)
        failed = [t for t in targets if t.phase is Phase.FAILED] or targets
        await self._people.ordered(order, rollout, people.choice(failed).node)


def _deleted(now: State, rollout: str) -> Events:
    return steering.delete(now, OLGA, now.index.rollout(rollout), tuple(now.index.targets(rollout)))


def _stop(*args: Any) -> Events:
    return steering.pause(*args, stop=True)


def _cancel_now(*args: Any) -> Events:
    return steering.cancel(*args, stop=True)


def _skip(state: State, who: Person, rollout: Rollout, target: Target, reason: str) -> Events:
    return steering.skip(state, who, rollout, target, reason, None)


def _return(state: State, who: Person, rollout: Rollout, target: Target, reason: str) -> Events:
    return steering.skip(state, who, rollout, target, reason, "return")


def _leave(state: State, who: Person, rollout: Rollout, target: Target, reason: str) -> Events:
    return steering.skip(state, who, rollout, target, reason, "leave")


_DEEDS = (
    *("vote", "vote", "vote", "vote_of_old", "withdraw", "withdraw", "pause", "resume", "resume", "cancel"),
    *(
        "retry",
        "retry",
        "rollback",
        "rollback",
        "skip",
        "return",
        "hold",
        "hold",
        "release",
        "freeze",
        "unfreeze",
    ),
    *("cordon", "uncordon", "refresh", "read", "stop", "advance", "delete", "team", "supersede"),
)
