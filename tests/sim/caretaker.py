"""Somebody who cares: who votes in the middle of trouble, and tidies up once there is peace."""

from __future__ import annotations

from machines import ballots, gates
from machines.plan import GateName
from machines.rollout import Rollout, Target
from machines.states import BUSY, Phase
from rolloutd.orders import locking, steering, voting
from rolloutd.orders.steering import Events
from rolloutd.orders.voting import Ballot
from rolloutd.state import State
from tests.sim.people import EVERYBODY, OLGA, People, Person

STUCK_S = 3600.0
"""After so long somebody leaves out a node that waits isolated: it may be a mate of its that it waits for."""


class Caretaker:
    """Does what lets every rollout come to its end."""

    def __init__(self, people: People) -> None:
        self._people = people
        self._retries: dict[tuple[str, str], int] = {}

    async def tidy(self) -> None:
        """Once nothing goes wrong any more, do what lets every rollout come to its end."""
        state = self._people.state()
        if state is None:
            return
        for freeze in state.index.freezes:
            scope = freeze.id
            await self._people.ask(OLGA, "thaw", lambda now, scope=scope: locking.unfreeze(now, OLGA, scope))  # type: ignore[misc]
        for hold in state.index.holds:
            if hold.source != steering.LEFT:
                if "/" in hold.id:  # a rollout that was deleted had left it isolated
                    self._people.world.put_in_service(self._people.world.machines[hold.node])
                await self._released(hold.node, hold.source, hold.id)
        for rollout in list(state.index.rollouts.values()):
            await self._help(state, rollout)
        for rollout in state.index.rollouts.values():
            for target in state.index.targets(rollout.id):
                waits = target.phase is Phase.PENDING and target.isolated
                if rollout.closed and target.order is None and (waits or target.phase is Phase.FAILED):
                    await self._people.ordered(_return, rollout.id, target.node)
        left = {hold.node for hold in state.index.holds if hold.source == steering.LEFT}
        for node in sorted(self._people.world.machines):
            isolated = any(t.isolated and t.phase not in BUSY for t in state.index.targets_on(node))
            if isolated or node in left:
                await self._people.give_back(node)

    async def care(self) -> None:
        """In the middle of trouble, see to it that votes are there and nothing stays paused."""
        state = self._people.state()
        if state is None:
            return
        for rollout in list(state.index.rollouts.values()):
            if rollout.paused is not None:
                await self._people.steer(steering.resume, rollout.id)
            await self._approve(state, rollout)

    async def _approve(self, state: State, rollout: Rollout) -> None:
        for gate in GateName:
            waves = [w.name for w in rollout.plan.waves] if gate is GateName.CONTINUE else [""]
            for wave in waves:
                await self._agree(state, rollout.id, gate, wave)

    async def _released(self, node: str, source: str, name: str) -> None:
        await self._people.ask(
            OLGA, "tidy", lambda now: locking.release(now, OLGA, node, source=source, id=name)
        )

    async def _help(self, state: State, rollout: Rollout) -> None:
        name = rollout.id
        if rollout.closed:
            return
        if rollout.paused is not None:
            await self._people.steer(steering.resume, name)
        await self._approve(state, rollout)
        for target in list(state.index.targets(name)):
            if target.phase is Phase.FAILED and target.order is None:
                await self._mend(target)
            stuck = target.phase is Phase.PENDING and target.isolated
            if stuck and state.now() - target.since > STUCK_S:
                await self._people.ordered(_return, name, target.node)

    async def _agree(self, state: State, name: str, gate: GateName, wave: str) -> None:
        """Let everybody take back their no, and say yes where they are asked."""
        rollout = state.index.rollouts.get(name)
        if rollout is None or rollout.closed:
            return
        noes = [v for v in ballots.cast_at(rollout, gate, wave) if not v.yes]
        view = gates.gate_view(state.index, rollout, gate, wave, state.now())
        waiting = any(t.needs_vote_of is not None for t in state.index.targets(name))
        if not noes and view.state != "waiting" and not waiting and not any(h < w for _, w, h in view.teams):
            return
        named = wave or None
        for who in EVERYBODY:
            if any(each.actor.uid == who.uid for each in noes):
                await self._people.ask(
                    who,
                    "tidy",
                    lambda now, who=who: voting.withdraw(  # type: ignore[misc]
                        now, who, now.index.rollout(name), gate, "tidy", team=None, wave=named
                    ),
                )
            await self._people.vote(who, name, Ballot(gate, True, "tidy", wave=named))

    async def _mend(self, target: Target) -> None:
        """Try a failed node again, and after that leave it out."""
        key = (target.rollout, target.node)
        self._retries[key] = self._retries.get(key, 0) + 1
        await self._people.ordered(steering.retry if self._retries[key] <= 2 else _return, *key)


def _return(state: State, who: Person, rollout: Rollout, target: Target, reason: str) -> Events:
    return steering.skip(state, who, rollout, target, reason, "return")
