"""A user who gives random commands at random times."""

from __future__ import annotations

import asyncio
import random
from contextvars import Context
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

from machines.facts import votes as ballots
from machines.model.events import VoteCast
from machines.model.plan import GateName
from machines.model.rollout import NodeOrder, Rollout, Target, Vote
from machines.model.windows import Window
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.commands import holds_and_freezes, rollbacks, rollout_commands, team_rules, voting
from rolloutd.commands.execution import Events
from rolloutd.commands.voting import Ballot
from rolloutd.engine.state import State
from tests.sim.people import ALL_USERS, ANSWER_TIMEOUT_S, OLGA, SAM, SimUser, SimUsers

MAX_SUPERSEDES = 2
"""Rollouts that take over from another one, at most: each walks the whole fleet again."""

MAX_REPEATS = 3
"""Rollouts of a plan that has ended before, at most: first another release, then the same once more."""

CLEAN_INTERVAL_S = 300.0
"""Mean time between two users who clean a node or roll out a plan again."""

PREVIEW_PROBABILITY = 0.3
"""How often a user asks in the same moment what a plan would change on that node, which keeps it from being
cleaned.
"""

SUPERSEDE_DELAY_S = 900.0
"""Mean time until a user prepares to supersede a rollout: within it most walk their nodes."""

BUSY_S = 3600.0
"""How long the work on a node may stay that a user wants rolled back: longer than an isolation lasts."""

UTC = ZoneInfo("UTC")

WITHDRAW_DELAY_S = 60.0
"""How long a user's no stands, more or less, before they take it back."""


def gates_of(rollout: Rollout) -> list[GateName]:
    """Return the kinds of gates that a rollout has."""
    pilot = [] if rollout.plan.pilot_node is None else [GateName.PILOT]
    return [*pilot, GateName.START, GateName.CONTINUE, GateName.PROCEED]


class RandomUser:
    """All users; the seed draws the user and the command."""

    def __init__(self, users: SimUsers) -> None:
        self._users = users
        self._freezes = 0
        self._superseding = 0

    async def act_randomly(self, people: random.Random, pace_s: float) -> None:
        """Do something now and then."""
        actions = [getattr(self, f"_{name}") for name in _ACTIONS]
        while True:
            await asyncio.sleep(people.expovariate(1.0 / pace_s))
            state = self._users.current_state()
            if state is not None and state.index.rollouts:
                await people.choice(actions)(people, state)

    async def _vote(self, people: random.Random, state: State) -> None:
        rollout, who = self._users.random_rollout(people, state), people.choice(ALL_USERS)
        ballot = Ballot(
            people.choice(gates_of(state.index.rollout(rollout))), people.random() < 0.93, "tests"
        )
        if people.random() < 0.1:
            ballot = replace(ballot, digest="of another plan")
        if ballot.gate is GateName.PROCEED:
            nodes = tuple(sorted(self._users.world.machines)[: people.randrange(3)])
            until = None if people.random() < 0.5 else state.now() + 600.0
            more = people.randrange(3) if until is None else 0
            ballot = replace(ballot, nodes=nodes if not more else (), more=more, until=until)
        await self._users.vote(who, rollout, ballot)

    async def _vote_of_old(self, people: random.Random, state: State) -> None:
        """Let a vote for another digest come from somewhere: an older version, a restored backup."""
        rollout, who = self._users.random_rollout(people, state), people.choice((SAM, OLGA))
        gate = people.choice(gates_of(state.index.rollout(rollout)))
        await vote_for_another_digest(self._users, who, rollout, gate)

    async def _withdraw(self, people: random.Random, state: State) -> None:
        """Say something at a gate that waits, come to regret it, and take back what can be."""
        rollout = state.index.rollout(self._users.random_rollout(people, state))
        places = rollout.plan.gates_in_order
        waiting = [at for at in places if not rollout.closed and not ballots.was_opened(rollout, *at)]
        if not waiting:
            return
        (gate, wave), who = people.choice(waiting), people.choice((SAM, OLGA))
        cast = ballots.valid_votes(rollout, gate, wave)
        if not any(vote.actor.uid == who.uid for vote in cast):
            await self._users.vote(who, rollout.id, Ballot(gate, False, "tests", wave=wave or None))
            await asyncio.sleep(people.expovariate(1.0 / WITHDRAW_DELAY_S))
        await self._withdraw_vote(who, rollout.id, gate, wave or None)

    async def _withdraw_vote(self, who: SimUser, rollout: str, gate: GateName, wave: str | None) -> None:
        await self._users.run_command(
            who,
            "withdraw",
            lambda now: voting.withdraw(
                now, who, now.index.rollout(rollout), gate, "tests", team=None, wave=wave
            ),
        )

    async def _pause(self, people: random.Random, state: State) -> None:
        await self._users.command_rollout(rollout_commands.pause, self._users.random_rollout(people, state))

    async def _resume(self, people: random.Random, state: State) -> None:
        await self._users.command_rollout(rollout_commands.resume, self._users.random_rollout(people, state))

    async def _cancel(self, people: random.Random, state: State) -> None:
        if people.random() < 0.15:
            await self._users.command_rollout(
                people.choice((rollout_commands.cancel, _cancel_now)),
                self._users.random_rollout(people, state),
            )

    async def _delete(self, people: random.Random, state: State) -> None:
        closed = [name for name, rollout in state.index.rollouts.items() if rollout.closed]
        if closed and people.random() < 0.3:
            await self._users.run_command(OLGA, "delete", lambda now: _delete_rollout(now, closed[0]))

    async def _supersede(self, people: random.Random, state: State) -> None:
        """Submit the same change with another policy, to take over from a rollout that is still going."""
        open_rollouts = [rollout for rollout in state.index.rollouts.values() if not rollout.closed]
        if not open_rollouts or self._superseding >= MAX_SUPERSEDES:
            return
        await self._submit_successor(people.choice(open_rollouts))

    async def _submit_successor(self, old: Rollout) -> None:
        self._superseding += 1
        if await self._users.supersede(OLGA, old, f"S{self._superseding}"):
            self._users.world.coverage.count("user:supersede")

    async def supersede_at_return(self) -> None:
        """Supersede a rollout at the moment at which the end of a node's work is written."""
        world = self._users.world
        superseding = world.streams.superseding
        await asyncio.sleep(superseding.expovariate(1.0 / SUPERSEDE_DELAY_S))
        state = self._users.current_state()
        open_rollouts = [each for each in state.index.rollouts.values() if not each.closed] if state else []
        if state is None or not open_rollouts:
            return
        old, returned = superseding.choice(open_rollouts), asyncio.Event()
        first = old.plan.isolate[0].kind
        returns = [f"commit revert-ok:{t.node}:isolate.0.{first}#1" for t in state.index.targets(old.id)]
        # In the world's context: the answer must not end with the daemon that wrote this.
        notify = lambda: world.loop.call_soon(returned.set, context=Context())  # noqa: E731
        world.triggers.update(dict.fromkeys(returns, notify))
        await returned.wait()
        for text in returns:
            del world.triggers[text]
        await self._submit_successor(old)

    async def roll_out_again_and_clean(self) -> None:
        """Roll out a plan that has ended once more, with the same artifacts or others, and clean nodes."""
        world = self._users.world
        cleaning, number = world.streams.cleaning, 0
        while True:
            await asyncio.sleep(cleaning.expovariate(1.0 / CLEAN_INTERVAL_S))
            state = self._users.current_state()
            if state is None:
                continue
            open_plans = {each.plan.name for each in state.index.rollouts.values() if not each.closed}
            ended = [each for each in state.index.rollouts.values() if each.plan.name not in open_plans]
            prepared = [each for each in ended if each.plan.prepare]
            if prepared and number < MAX_REPEATS and cleaning.random() < 0.5:
                number += 1
                release = cleaning.choice(("", f"A{number}"))
                if await self._users.submit_again(OLGA, prepared[-1].id, f"A{number}", release):
                    world.coverage.count("user:submit-again")
            else:
                node = cleaning.choice(sorted(world.machines))
                if cleaning.random() < PREVIEW_PROBABILITY:
                    self._users.preview_impact(node)
                await self._users.clean(node)

    async def _stop(self, people: random.Random, state: State) -> None:
        await self._users.command_rollout(_stop, self._users.random_rollout(people, state))

    async def _advance(self, people: random.Random, state: State) -> None:
        rollout = self._users.random_rollout(people, state)
        waiting = [t.node for t in state.index.targets(rollout) if t.phase is Phase.PENDING]
        if waiting:
            await self._users.command_node(rollout_commands.advance, rollout, people.choice(sorted(waiting)))

    async def _retry(self, people: random.Random, state: State) -> None:
        await self._command_some_node(people, state, rollout_commands.retry)

    async def _rollback(self, people: random.Random, state: State) -> None:
        await self._command_some_node(people, state, rollout_commands.rollback)

    async def _undo(self, people: random.Random, state: State) -> None:
        """Order the rollback of a node that is done, or of all, or withdraw what has not begun.

        The work on some of these nodes does not end, so that their isolation is aborted.
        """
        rollout, world = self._users.random_rollout(people, state), self._users.world
        targets = tuple(state.index.targets(rollout))
        changed = [t.node for t in targets if t.outcome is Outcome.CHANGED]
        if not changed or people.random() >= 0.8:
            return
        node, chance = people.choice(sorted(changed)), world.streams.rollbacks.random()
        machine, is_ordered = world.machines[node], any(t.order is NodeOrder.ROLLBACK for t in targets)
        if chance < 0.4 and is_ordered:
            await self._users.command_rollout(_withdraw_rollbacks, rollout)
        elif chance < 0.2:
            await self._users.command_rollout(_roll_back_all, rollout)
            if chance < 0.1:
                await asyncio.sleep(people.expovariate(1.0 / WITHDRAW_DELAY_S))
                await self._users.command_rollout(_withdraw_rollbacks, rollout)
        else:
            if chance > 0.4 and not machine.stuck:
                machine.stuck = True
                world.coverage.count("user:keeps-work")
                world.loop.call_from_world(BUSY_S, lambda: setattr(machine, "stuck", False))
            await self._users.command_node(rollout_commands.rollback, rollout, node)

    async def _skip(self, people: random.Random, state: State) -> None:
        await self._command_some_node(people, state, people.choice((_skip, _return, _leave)))

    async def _return(self, people: random.Random, state: State) -> None:
        await self._users.return_node(people.choice(sorted(self._users.world.machines)))

    async def _hold(self, people: random.Random, state: State) -> None:
        targets = [t for name in state.index.rollouts for t in state.index.targets(name)]
        at_work = {target.node for target in targets if target.phase in IN_FLIGHT_PHASES}
        node = people.choice(sorted(at_work or self._users.world.machines))
        until = None if people.random() < 0.5 else state.now() + 300.0
        await self._users.run_command(
            OLGA, "hold", lambda now: holds_and_freezes.hold(now, OLGA, node, "tests", until=until)
        )

    async def _release(self, people: random.Random, state: State) -> None:
        held = {hold.node for hold in state.index.holds} or self._users.world.machines
        node = people.choice(sorted(held))
        await self._users.run_command(OLGA, "release", lambda now: holds_and_freezes.release(now, OLGA, node))

    async def _freeze(self, people: random.Random, state: State) -> None:
        scope = people.choice(("all", "team/a", "rack/r1", "node/n1", "node/n2"))
        until = None if people.random() < 0.5 else state.now() + 300.0
        self._freezes += 1
        fresh = f"f{self._freezes}"
        await self._users.run_command(
            OLGA, "freeze", lambda now: holds_and_freezes.freeze(now, OLGA, scope, "tests", until, fresh)
        )

    async def _team(self, people: random.Random, state: State) -> None:
        """Let a team open its window only some hours of the day, or always."""
        team = people.choice(("a", "b"))
        hours = people.choice(((), (Window(frozenset(range(7)), 9 * 60, 15 * 60, UTC),)))
        await self._users.run_command(
            OLGA, "team", lambda now: team_rules.set_team_rules(now, OLGA, team, hours, None, "tests")
        )

    async def _unfreeze(self, people: random.Random, state: State) -> None:
        scopes = [freeze.id for freeze in state.index.freezes]
        if scopes:
            await self._users.run_command(
                OLGA, "unfreeze", lambda now: holds_and_freezes.unfreeze(now, OLGA, scopes[0])
            )

    async def _cordon(self, people: random.Random, state: State) -> None:
        pending = {
            t.node for name in state.index.rollouts for t in state.index.targets(name) if not t.attempt
        }
        names = sorted(pending) or sorted(self._users.world.machines)
        machine = self._users.world.machines[people.choice(names)]
        if self._users.world.cordon(machine):
            self._users.world.coverage.count("fault:foreign-cordon")

    async def _uncordon(self, people: random.Random, state: State) -> None:
        self._users.world.uncordon(
            self._users.world.machines[people.choice(sorted(self._users.world.machines))]
        )

    async def _refresh(self, people: random.Random, state: State) -> None:
        life = self._users.current_daemon()
        if life is not None and life.daemon is not None:
            daemon = life.daemon

            async def refresh() -> None:
                if not self._users.world.is_finished:
                    daemon.refresh_inventory()

            life.run(refresh())

    async def _read(self, people: random.Random, state: State) -> None:
        """Look around, as whoever watches does."""
        life = self._users.current_daemon()
        if life is None or life.store is None:
            return
        keeper, rollout = life.store, self._users.random_rollout(people, state)

        async def read() -> None:
            await keeper.read_audit(after=3, limit=10, rollout=rollout)
            await keeper.list_closed_rollouts()
            await keeper.load_targets(rollout)
            await keeper.load_rollout(rollout)
            digest = state.index.rollout(rollout).digest
            await keeper.find_nodes_with_change(digest.change)
            await keeper.find_identical(digest.change, "", digest.policy)
            await life.open_read_only()

        task = life.run(read())
        await asyncio.wait({task}, timeout=ANSWER_TIMEOUT_S)

    async def _command_some_node(self, people: random.Random, state: State, order: Any) -> None:
        rollout = self._users.random_rollout(people, state)
        targets = sorted(state.index.targets(rollout), key=lambda t: t.node)
        failed = [t for t in targets if t.phase is Phase.FAILED] or targets
        await self._users.command_node(order, rollout, people.choice(failed).node)


async def vote_for_another_digest(users: SimUsers, who: SimUser, rollout: str, gate: GateName) -> None:
    """Let a yes for another digest be cast at a gate."""

    def cast(now: State) -> Events:
        failures = tuple(each.id for each in now.index.rollout(rollout).failures)
        name = voting._unused_id(now.index.rollout(rollout))
        wave = voting.resolve_wave(now.index.rollout(rollout), gate, None)
        teams = ("infra", "a", "b")
        vote = Vote(name, gate, "of another plan", who.actor, True, "", now.now(), teams, wave, failures)
        return (VoteCast(rollout, vote),)

    await users.run_command(who, "vote-of-old", cast)


def _delete_rollout(now: State, rollout: str) -> Events:
    return rollout_commands.delete(now, OLGA, now.index.rollout(rollout), tuple(now.index.targets(rollout)))


def _roll_back_all(state: State, who: SimUser, rollout: Rollout, reason: str) -> Events:
    return rollbacks.roll_back_wave(state, who, rollout, None, reason, {})


def _withdraw_rollbacks(state: State, who: SimUser, rollout: Rollout, reason: str) -> Events:
    return rollbacks.withdraw(state, who, rollout, (), None, reason)


def _stop(*args: Any) -> Events:
    return rollout_commands.pause(*args, stop=True)


def _cancel_now(*args: Any) -> Events:
    return rollout_commands.cancel(*args, stop=True)


def _skip(state: State, who: SimUser, rollout: Rollout, target: Target, reason: str) -> Events:
    return rollout_commands.skip(state, who, rollout, target, reason, None)


def _return(state: State, who: SimUser, rollout: Rollout, target: Target, reason: str) -> Events:
    return rollout_commands.skip(state, who, rollout, target, reason, "return")


def _leave(state: State, who: SimUser, rollout: Rollout, target: Target, reason: str) -> Events:
    return rollout_commands.skip(state, who, rollout, target, reason, "leave")


_ACTIONS = (
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
    *("undo", "cordon", "uncordon", "refresh", "read", "stop", "advance", "delete", "team", "supersede"),
)
