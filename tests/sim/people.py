"""The people who ask the daemon things, and what they were answered.

They ask as the control socket's handlers do: judged and committed in one breath,
inside the daemon, whose answer may be lost with it.  What was answered well must
never be lost: acknowledged votes are kept and compared in the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from machines.model.events import VoteCast
from machines.model.plan import GateName
from machines.model.rollout import Actor, ActorKind, Rollout
from rolloutd.commands import rollout_commands, submit, trains, voting
from rolloutd.commands.execution import Events
from rolloutd.commands.voting import Ballot
from rolloutd.engine.state import InvariantViolation, State
from rolloutd.errors import NotFound, RolloutdError, StoreFailed
from tests.contracts.fakes.sources import SOURCE
from tests.sim import plans
from tests.sim.daemon_process import DaemonProcess
from tests.sim.faulty_store import FaultyStore
from tests.sim.world import SimWorld

ANSWER_TIMEOUT_S = 60.0
"""How long a user waits for the daemon's answer."""

NEW_RELEASES = 0.5
"""Share of the superseding plans whose manifest has other artifacts; all else of them is the same."""


@dataclass(frozen=True, slots=True)
class SimUser:
    """A user with an account (steering.Asker)."""

    user: str
    uid: int
    teams: frozenset[str]
    admin: bool = False

    @property
    def actor(self) -> Actor:
        """The same user, as events name them."""
        return Actor(ActorKind.PERSON, self.user, self.uid)


SAM = SimUser("sam", 1000, frozenset({"infra"}))
OLGA = SimUser("olga", 1001, frozenset({"infra"}), admin=True)
ANN = SimUser("ann", 1002, frozenset({"a"}))
BEN = SimUser("ben", 1003, frozenset({"b"}))
ALL_USERS = (SAM, OLGA, ANN, BEN)

Command = Callable[[State], Events]


@dataclass(slots=True)
class SimUsers:
    """All who ask this daemon things, and what they were answered."""

    world: SimWorld
    current_daemon: Callable[[], DaemonProcess | None]
    votes: dict[str, list[str]] = field(default_factory=dict)

    # -- asking

    async def run_command(self, who: SimUser, cause: str, command: Command) -> bool:
        """Ask the daemon for something; say whether it was done, as far as the asker knows."""
        daemon = self.current_daemon()
        if daemon is None or daemon.state is None:
            return False
        task = daemon.run(self._commit_command(daemon.state, who, cause, command))
        await asyncio.wait({task}, timeout=ANSWER_TIMEOUT_S)
        if not task.done():
            return False
        if isinstance(error := task.exception(), TypeError | AttributeError):
            # A command whose parameters have changed would never be given again.
            self.world.checker.report_violation(f"the simulation cannot ask for {cause}: {error!r}")
        if error is not None or not task.result():
            return False
        self.world.coverage.count(f"user:{cause}")
        return True

    async def _commit_command(self, state: State, who: SimUser, cause: str, command: Command) -> bool:
        try:
            async with state.exclusive_commit(who.actor) as commit:
                events = command(state)
                await commit(events, cause)
        except InvariantViolation as broken:
            self.world.checker.report_violation(
                f"an order was let through that the invariants refuse: {broken}"
            )
        except (RolloutdError, KeyError):
            return False
        for event in events:
            if isinstance(event, VoteCast):
                self.votes.setdefault(event.rollout, []).append(event.vote.id)
        return bool(events)

    async def make_train(self, names: Sequence[str]) -> bool:
        """Let an admin put the open rollouts of these names in one train; say whether there is one."""
        daemon = self.current_daemon()
        if daemon is not None and daemon.state is not None and daemon.state.index.trains:
            return True  # the answer was lost
        return await self.run_command(OLGA, "train", lambda now: _train_of(now, names))

    async def remove_train(self) -> bool:
        """Let an admin remove the train."""
        return await self.run_command(OLGA, "untrain", lambda now: trains.remove(now, OLGA, "t", "tests"))

    async def vote(self, who: SimUser, rollout: str, ballot: Ballot) -> None:
        """A user votes."""
        cause = "vote" if ballot.reason == "tests" else "tidy"
        await self.run_command(
            who,
            cause,
            lambda now: voting.vote(
                now, who, now.index.rollout(rollout), with_failures(now, rollout, ballot), ()
            ),
        )

    async def supersede(self, who: SimUser, old: Rollout, name: str) -> bool:
        """A user submits what takes over from a rollout; say whether it was, as far as they know."""
        daemon = self.current_daemon()
        if daemon is None or daemon.state is None or daemon.store is None:
            return False
        task = daemon.run(self._commit_supersede(daemon, daemon.state, daemon.store, who, old.id, name))
        await asyncio.wait({task}, timeout=ANSWER_TIMEOUT_S)
        return task.done() and task.exception() is None and task.result()

    async def _commit_supersede(
        self, daemon: DaemonProcess, state: State, keeper: FaultyStore, who: SimUser, old: str, name: str
    ) -> bool:
        try:
            content, _ = await keeper.load_plan(old)
            content = {**content, "spec": {**content["spec"], "soak": 60}}
            if self.world.streams.artifacts.random() < NEW_RELEASES:
                content = plans.with_new_artifacts(content, name)
            content = plans.with_values(content, daemon.compile(content), state)
            plan = daemon.compile(content)
            if plan.pilot_node is not None and plan.pilot_node not in state.index.nodes:
                return False  # submit refuses a pilot that is not a target
            self.world.on_plan(name, plan)
            async with state.exclusive_commit(who.actor) as commit:
                before = state.index.rollout(old)
                if before.closed:
                    return False
                now = state.now()
                opened = plans.rollout_opened(
                    name, content, plan, state.index, who.actor, now, maybe_current=plan.skip_compliant
                )
                if plan.pilot_node not in {None, *(target.node for target in opened.targets)}:
                    return False  # submit refuses a plan whose pilot has left
                await commit(submit.opening_events(state.index, opened, [before]), "submit")
        except (StoreFailed, NotFound, KeyError):
            return False
        return True

    async def submit_again(self, who: SimUser, old: str, name: str, release: str) -> bool:
        """A user submits a plan that has ended, with new artifacts or the same; say whether it was."""
        daemon = self.current_daemon()
        if daemon is None or daemon.state is None or daemon.store is None:
            return False
        state, keeper = daemon.state, daemon.store
        task = daemon.run(self._commit_again(daemon, state, keeper, who, old, name, release))
        await asyncio.wait({task}, timeout=ANSWER_TIMEOUT_S)
        return task.done() and task.exception() is None and task.result()

    async def _commit_again(
        self,
        daemon: DaemonProcess,
        state: State,
        keeper: FaultyStore,
        who: SimUser,
        old: str,
        name: str,
        release: str,
    ) -> bool:
        with suppress(NotFound):
            await keeper.load_rollout(name)
            return True  # the answer to an earlier try was lost
        try:
            content, _ = await keeper.load_plan(old)
            content = plans.with_new_artifacts(content, release) if release else content
            content = plans.with_values(content, daemon.compile(content), state)
            plan = daemon.compile(content)
            self.world.on_plan(name, plan)
            async with state.exclusive_commit(who.actor) as commit:
                index, now = state.index, state.now()
                if any(not each.closed and each.plan.name == plan.name for each in index.rollouts.values()):
                    return False
                opened = plans.rollout_opened(
                    name, content, plan, index, who.actor, now, maybe_current=plan.skip_compliant
                )
                if plan.pilot_node not in {None, *(target.node for target in opened.targets)}:
                    return False  # submit refuses a plan whose pilot has left
                await commit(submit.opening_events(state, opened, []), "submit")
        except (StoreFailed, NotFound, KeyError):
            return False
        return True

    async def clean(self, node: str) -> bool:
        """A user cleans a node; say whether it was, as far as they know."""
        daemon = self.current_daemon()
        if daemon is None or daemon.cleaner is None:
            return False
        task = daemon.run(daemon.cleaner.clean(node, actor=OLGA.actor, cause="clean"))
        await asyncio.wait({task}, timeout=ANSWER_TIMEOUT_S)
        has_result = task.done() and not task.cancelled() and task.exception() is None
        if not has_result or task.result().problem:
            return False
        self.world.coverage.count("user:clean")
        return True

    def preview_impact(self, node: str) -> None:
        """Let two people ask at once what a plan would change on a node, without waiting for the answers."""
        daemon = self.current_daemon()
        if daemon is None or daemon.daemon is None or daemon.state is None:
            return
        rollouts = daemon.state.index.rollouts
        if rollouts and node in daemon.state.index.nodes:
            plan = next(iter(rollouts.values())).plan
            for _ in range(2):
                daemon.run(daemon.daemon.check_mode.check(node, SOURCE, plan))
            self.world.coverage.count("user:preview-impact")

    # -- small things

    async def command_rollout(self, command: Any, rollout: str) -> None:
        """Ask for something that concerns a whole rollout."""
        await self.run_command(
            OLGA,
            command.__name__.lstrip("_"),
            lambda now: command(now, OLGA, now.index.rollout(rollout), "tests"),
        )

    async def command_node(self, command: Any, rollout: str, node: str) -> None:
        """Ask for something that concerns one node."""
        await self.run_command(
            OLGA,
            command.__name__.lstrip("_"),
            lambda now: command(
                now, OLGA, now.index.rollout(rollout), now.index.target(rollout, node), "tests"
            ),
        )

    async def return_node(self, node: str) -> None:
        """Ask for a node to be returned."""
        await self.run_command(
            OLGA, "return", lambda now: rollout_commands.return_node(now, OLGA, node, "tests")
        )

    def current_state(self) -> State | None:
        """Return what the daemon knows that answers now."""
        daemon = self.current_daemon()
        return None if daemon is None else daemon.state

    def random_rollout(self, people: random.Random, state: State) -> str:
        """Return the name of some rollout."""
        names: Sequence[str] = list(state.index.rollouts)
        return people.choice(names)


def with_failures(state: State, rollout: str, ballot: Ballot) -> Ballot:
    """Return an approval at proceed with the unresolved failures of the nodes that it names, or of all."""
    if ballot.gate is not GateName.PROCEED or not ballot.yes:
        return ballot
    shown = tuple(
        each.id
        for each in state.index.unresolved_failures(rollout)
        if not ballot.nodes or each.node in ballot.nodes
    )
    return replace(ballot, shown=shown)


def _train_of(state: State, names: Sequence[str]) -> Events:
    rollouts = [state.index.rollouts[name] for name in names if name in state.index.rollouts]
    known = trains.find_train(state.index, "t")
    shown = None if known is None else trains.Shown(known.rollouts, known.wait_s)
    return trains.add(state, OLGA, "t", [each for each in rollouts if not each.closed], "tests", shown=shown)
