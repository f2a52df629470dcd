"""The people who ask the daemon things, and what they were answered.

They ask as the control socket's handlers do: judged and committed in one breath,
inside the daemon, whose answer may be lost with it.  What was answered well must
never be lost: acknowledged votes are kept and compared in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from machines.events import RolloutCancelled, VoteCast
from machines.rollout import Actor, ActorKind, Rollout
from rolloutd.errors import NotFound, RolloutdError, StoreFailed
from rolloutd.orders import steering, submit, voting
from rolloutd.orders.steering import Events
from rolloutd.orders.voting import Ballot
from rolloutd.state import InvariantBroken, State
from tests.sim import plans
from tests.sim.keeper import Keeper
from tests.sim.life import Life
from tests.sim.world import World

PATIENCE_S = 60.0
"""How long somebody waits for the daemon's answer."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with an account (steering.Asker)."""

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

Deciding = Callable[[State], Events]


@dataclass(slots=True)
class People:
    """All who ask this daemon things, and what they were answered."""

    world: World
    life: Callable[[], Life | None]
    votes: dict[str, list[str]] = field(default_factory=dict)

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

    async def vote(self, who: Person, rollout: str, ballot: Ballot) -> None:
        """Let somebody vote."""
        cause = "vote" if ballot.reason == "tests" else "tidy"
        await self.ask(who, cause, lambda now: voting.vote(now, who, now.index.rollout(rollout), ballot))

    async def supersede(self, who: Person, old: Rollout, name: str) -> bool:
        """Let somebody submit what takes over from a rollout; say whether it was, as far as they know."""
        life = self.life()
        if life is None or life.state is None or life.keeper is None:
            return False
        task = life.ask(self._superseded(life, life.state, life.keeper, who, old.id, name))
        await asyncio.wait({task}, timeout=PATIENCE_S)
        return task.done() and task.exception() is None and task.result()

    async def _superseded(
        self, life: Life, state: State, keeper: Keeper, who: Person, old: str, name: str
    ) -> bool:
        try:
            content, _ = await keeper.content(old)
            content = {**content, "spec": {**content["spec"], "soak": 60}}
            plan = life.compile(content)
            self.world.court.plans[name] = plan
            self.world.isolators[name] = tuple(spec.kind for spec in plan.isolate)
            async with state.deciding(who.actor) as commit:
                before = state.index.rollout(old)
                if before.closed:
                    return False
                now = state.now()
                opened = plans.opening(name, content, plan, state.index, who.actor, now, looked=False)
                settled = submit._settled(state, [before], opened.digest.change)
                ended = RolloutCancelled(old, who.actor, f"superseded by {name}", now)
                await commit([ended, replace(opened, supersedes=old)], "submit")
                await commit(submit._stay(state, name, settled), "stay")
        except (StoreFailed, NotFound, KeyError):
            return False
        return True

    # -- small things

    async def steer(self, order: Any, rollout: str) -> None:
        """Ask for something that concerns a whole rollout."""
        await self.ask(
            OLGA,
            order.__name__.lstrip("_"),
            lambda now: order(now, OLGA, now.index.rollout(rollout), "tests"),
        )

    async def ordered(self, order: Any, rollout: str, node: str) -> None:
        """Ask for something that concerns one node."""
        await self.ask(
            OLGA,
            order.__name__.lstrip("_"),
            lambda now: order(
                now, OLGA, now.index.rollout(rollout), now.index.target(rollout, node), "tests"
            ),
        )

    async def give_back(self, node: str) -> None:
        """Ask for a node to be returned."""
        await self.ask(OLGA, "return", lambda now: steering.give_back(now, OLGA, node, "tests")[1])

    def state(self) -> State | None:
        """Return what the daemon knows that answers now."""
        life = self.life()
        return None if life is None else life.state

    def some(self, people: random.Random, state: State) -> str:
        """Return the name of some rollout."""
        names: Sequence[str] = list(state.index.rollouts)
        return people.choice(names)
