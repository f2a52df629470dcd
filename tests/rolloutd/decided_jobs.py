"""Jobs of a daemon without its loop: what a test has decided is carried out, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from machines.model.decision import NextRound
from machines.scheduler.decide import decide
from rolloutd.engine.background.drift_checks import DriftChecker
from rolloutd.engine.background.jobs import CommandJobs, job_kinds
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.drivers.check_execution import CheckExecution
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.state import State


def command_jobs(state: State, adapters: AdapterSet) -> CommandJobs:
    """Return the jobs of all kinds over these adapters."""
    check_mode = CheckMode(state, adapters.runners)
    drift = DriftChecker(state, adapters.source, check_mode)
    return CommandJobs(state, job_kinds(state, adapters, check_mode, drift))


def checks_of(session: NodeSession) -> CheckExecution:
    return CheckExecution(session, StepJournal(session))


def start_decided(state: State, jobs: CommandJobs, tasks: asyncio.TaskGroup, *kinds: type) -> None:
    """Start the jobs of these kinds that are decided now."""
    state.index.advance(state.now())
    decision = decide(state.index, state.now())
    for next_round in decision.of(NextRound):
        state.index.record_next_round(next_round)
    jobs.start(tasks, [each for kind in kinds for each in decision.of(kind)])


async def carry_out(state: State, adapters: AdapterSet, commands: Iterable[object]) -> None:
    """Carry out these commands."""
    async with asyncio.TaskGroup() as tasks:
        command_jobs(state, adapters).start(tasks, commands)
