"""The table of jobs: which commands of a decision are carried out beside the loop, how many at once, and how.

A node has one job of a kind at a time, for each rollout.  The loop asks again for what a job left undone, so
each may end early.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from machines.facts.dry_runs import DryRunResult
from machines.model import decision
from rolloutd.engine.background.checks_outside_attempts import check_if_current, check_soaking
from rolloutd.engine.background.drift_checks import DriftChecker
from rolloutd.engine.background.dry_runs import run_dry_run, watch_blocker
from rolloutd.engine.background.hold_release import release
from rolloutd.engine.background.pilot_evidence import document_pilot
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.drivers.traffic_probes import probe_node
from rolloutd.engine.preparation.preparer import Preparer
from rolloutd.engine.preparation.staged_files import compare_staged
from rolloutd.engine.state import STORE_RETRY_S, State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import StoreFailed

log = logging.getLogger(__name__)

C = TypeVar("C")

MAX_OUTSIDE = 8
"""Nodes at a time of what asks systems outside: they also serve clients, and drains."""

MAX_SOAK_CHECKS = 64
"""Soaking nodes that are checked at once; of a larger wave the others wait, without a connection."""

MAX_COMPARISONS = 16
"""Nodes at a time: each has one of the daemon's connections for as long as a disk takes to read its files."""


@dataclass(frozen=True, slots=True)
class JobKind(Generic[C]):
    """How the commands of one type are carried out.

    `of_target`: a command whose target is gone when its turn comes is dropped.  `node`: no job begins before
    the inventory sources of this node have answered, because without its password it cannot be reached.
    """

    name: str
    command: type[C]
    carry_out: Callable[[C], Coroutine[Any, Any, None]]
    at_once: int | None = None
    of_target: bool = True
    node: Callable[[C], str] | None = None


def job_kinds(
    state: State, adapters: AdapterSet, check_mode: CheckMode, drift: DriftChecker
) -> Sequence[JobKind[Any]]:
    both, preparer = (state, adapters), Preparer(state, adapters)
    current = partial(check_if_current, *both, check_mode)
    pilot = partial(document_pilot, state, adapters.runners)
    releasing = partial(release, *both, Counter())
    node = attrgetter("node")
    return (
        JobKind("dry-run", decision.DryRun, partial(run_dry_run, *both), MAX_OUTSIDE),
        JobKind("blocker", DryRunResult, partial(watch_blocker, *both), of_target=False),
        JobKind("traffic", decision.ProbeTraffic, partial(probe_node, *both), MAX_OUTSIDE),
        JobKind("compare-staged", decision.CompareStaged, partial(compare_staged, *both), MAX_COMPARISONS),
        JobKind("current-check", decision.CheckIfCurrent, current, node=node),
        JobKind("soak", decision.CheckSoaking, partial(check_soaking, *both), MAX_SOAK_CHECKS, node=node),
        JobKind("drift", decision.CheckDrift, drift.check_nodes, of_target=False),
        JobKind("hold-release", decision.Release, releasing, of_target=False),
        JobKind("pilot", decision.DocumentPilot, pilot, of_target=False),
        JobKind("prepare", decision.Prepare, preparer.prepare, of_target=False, node=preparer.node_of),
    )


class CommandJobs:
    def __init__(self, state: State, kinds: Iterable[JobKind[Any]]) -> None:
        self._state = state
        self._kinds: Mapping[type, tuple[JobKind[Any], BackgroundJobs[str]]] = {
            kind.command: (kind, BackgroundJobs(kind.name, state, lambda: state.wake_up(), kind.at_once))
            for kind in kinds
        }

    def start(self, tasks: asyncio.TaskGroup, commands: Iterable[Any]) -> None:
        """Start the jobs that are not under way yet; commands of no kind are passed over."""
        for command in commands:
            if type(command) not in self._kinds:
                continue
            kind, jobs = self._kinds[type(command)]
            if kind.node is None or not self._state.awaited_sources(kind.node(command)):
                rollout, node = getattr(command, "rollout", ""), getattr(command, "node", "")
                job, key = partial(self._run_job, kind, command), f"{rollout}/{node}"
                jobs.start(tasks, job, key, name=f"{kind.name} {key.strip('/')}")

    async def _run_job(self, kind: JobKind[Any], command: Any, key: str) -> None:
        # It may have waited for its turn.
        if kind.of_target and not self._has_target(command.rollout, command.node):
            return
        try:
            await kind.carry_out(command)
        except StoreFailed as failure:
            log.error("%s %s: not recorded: %s", kind.name, key.strip("/"), failure)
            self._state.last_write_error = str(failure)
            # The job keeps its key meanwhile: the loop would start it again at once.
            await self._state.clock.sleep(STORE_RETRY_S)

    def _has_target(self, rollout: str, node: str) -> bool:
        return rollout in self._state.index.rollouts and node in self._state.index.nodes
