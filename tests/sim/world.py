"""The world as it really is: nodes, what isolates them, playbook runs and their log.

It outlives every daemon and believes none.  Whatever happens here is told to
the court at once, in the order of its happening.  A node is out of service when
something isolates it; each kind of isolator is one bit, as a flag in a load
balancer is, and only the world knows who set it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from machines.model.node import NodeKind
from machines.model.plan import PLAYBOOK_RUN, Plan
from machines.model.rollout import FailureCode
from rolloutd.ports import Failed, GuardState, Ok, RunRequest
from tests.sim.checker import Checker
from tests.sim.fault_plan import EffectOutcome, FaultPlan, NoFaults, RunFate
from tests.sim.loop import SimLoop, SimProcess
from tests.sim.random_streams import Coverage, RandomStreams
from tests.sim.sim_node import UNDO_REPEAT_S, SimGuard, SimNode, SimRun
from tests.support.note_change import noted_text

if TYPE_CHECKING:
    from tests.sim.job_faults import JobFaults

START = 1_800_000_000.0
"""Some instant: 2027-01-15 08:00 UTC, a Friday."""

HOLD_AWARE_KIND = "kubernetes"
"""The isolation that is left standing for whoever holds the node."""

SHARED_KIND = "command"
"""The kind of isolation that other people use too."""

SLOW_ANSWER_S = 55.0
"""How long a slow answer takes: just within what is waited for."""

ISOLATION_LOSS_GRACE_S = 60.0
"""So long after an operator undid an isolation a run may begin that was on its way."""

T = TypeVar("T")


class SimWorld:
    """Everything outside the daemon, at one instant of virtual time."""

    def __init__(
        self, loop: SimLoop, streams: RandomStreams, fault_plan: FaultPlan, coverage: Coverage
    ) -> None:
        self.loop = loop
        self.streams = streams
        self.fault_plan = fault_plan
        self.coverage = coverage
        self.machines: dict[str, SimNode] = {}
        self.runs: dict[str, SimRun] = {}
        self.guards: dict[tuple[str, str, int], SimGuard] = {}
        self.isolators: dict[str, tuple[str, ...]] = {}
        self.skew_s = 0.0
        self.epoch = 0
        self.taken_over_at = 0.0
        self.source_fails = False
        self.is_finished = False
        self.poll_s = 3.0
        """How long a look at a run's progress takes, about."""
        self.run_s = (20.0, 80.0)
        """How long a run takes, at least and at most."""
        self.commit_s = 0.0
        """How long the disk takes for a batch of commits."""
        self.job_faults: JobFaults | None = None
        self.is_forged = False
        self.old_checkpoint: tuple[str, str] | None = None
        self.trace: list[str] = []
        self.triggers: dict[str, Callable[[], object]] = {}
        self.checker = Checker(self.now, loop.time, lambda: self.epoch)

    def on_plan(self, rollout: str, plan: Plan) -> None:
        """Hear what a rollout's plan is; only isolators for every node are required of each run."""
        self.checker.plans[rollout] = plan
        self.isolators[rollout] = tuple(spec.kind for spec in plan.isolate if spec.where is None)

    # -- time and luck

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        return START + self.loop.time() + self.skew_s

    async def latency(self, mean_s: float) -> None:
        """Take a while."""
        await asyncio.sleep(self.streams.latency.expovariate(1.0 / mean_s))

    def stop_faults(self) -> None:
        """Let nothing go wrong any more, and mend what is broken."""
        self.fault_plan = NoFaults()
        self.source_fails = False
        if self.job_faults is not None:
            self.job_faults.is_active = False
        for machine in self.machines.values():
            machine.up, machine.fails_checks, machine.stuck, machine.listed = True, False, False, True
            machine.disputed = machine.has_twin = machine.paused = False
            machine.available = machine.initialized = True
            machine.listed_as, machine.has_address = "", True
            machine.traffic = machine.traffic_unknown = False
            self.uncordon(machine)

    def record(self, text: str) -> None:
        """Write a line of the trace, and let happen what waits for it."""
        self.trace.append(f"{self.loop.time():.3f} {text}")
        if text in self.triggers:
            self.triggers[text]()

    async def cut_power(self, process: SimProcess) -> NoReturn:
        """End a process here and now, as a power cut does: nothing after this line is ever run."""
        self.record(f"cut {process.name}")
        process.alive = False
        await self.loop.create_future()
        raise AssertionError("a dead process went on")

    async def run_effect(
        self, by: SimProcess, label: str, action: Callable[[], T], *, on_refused: Callable[[], T]
    ) -> T:
        """Let a daemon change something: well, or as the mischief will have it."""
        if self.is_finished:
            return on_refused()
        outcome = self.fault_plan.next_outcome(label)
        await self.latency(0.5)
        if self.is_finished:  # whoever was on their way when all ended is only being buried
            return on_refused()
        if outcome is EffectOutcome.CUT_BEFORE:
            await self.cut_power(by)
        if outcome is EffectOutcome.FAILS:
            self.record(f"refused {label}")
            return on_refused()
        self.record(label)
        result = action()
        if outcome is EffectOutcome.TWICE:
            result = action()
        if outcome is EffectOutcome.CUT_AFTER:
            await self.cut_power(by)
        # What is slow is the answer.  An act that lands long after its daemon was deposed, as slow ones
        # would, nothing but a fence on the node could refuse; there is one for runs.
        await asyncio.sleep(SLOW_ANSWER_S if outcome is EffectOutcome.SLOW else 0.0)
        await self.latency(0.2)
        if outcome is EffectOutcome.ANSWER_LOST:
            raise TimeoutError(f"no answer to {label}")
        return result

    # -- in and out of service

    def isolate(self, node: str, kind: str, rollout: str, *, cordon_only: bool) -> None:
        """Set one bit for a rollout."""
        bit = self.machines[node].isolation_flag(kind)
        bit.cordon_only = cordon_only and (bit.cordon_only or not bit.is_set)
        bit.is_set, bit.set_by_rollout = True, rollout
        self.checker.feed_oracle("isolated", rollout=rollout, node=node)

    def restore(self, node: str, kind: str, rollout: str, prior: Any, holder: str = "") -> None:
        """Make one bit what it was before, or leave a cordon standing for whoever holds the node."""
        machine = self.machines[node]
        bit = machine.isolation_flag(kind)
        was_set = prior is not None and prior["isolated"]
        if bit.set_by_other and not was_set:
            self.checker.report_violation(f"{rollout} undid a foreign cordon of {node}")
            bit.set_by_other = False
        bit.left_for_hold = (
            kind == HOLD_AWARE_KIND
            and bool(holder)
            and bool(bit.left_for_hold or bit.set_by_rollout)
            and not was_set
        )
        bit.is_set, bit.set_by_other = was_set or bit.left_for_hold, was_set
        bit.cordon_only = False
        machine.undone_at = self.loop.time()
        had, bit.set_by_rollout = bit.set_by_rollout, ""
        if machine.isolating_rollouts:
            return
        machine.is_inspected = False
        if had:
            self.checker.feed_oracle("back", rollout=rollout, node=node)
            self.checker.outages.on_back(node)

    def return_left_node(self, node: str) -> None:
        """Put a node in service that was left out of it for whoever held it."""
        for bit in self.machines[node].isolation_flags.values():
            if bit.left_for_hold:
                bit.is_set = bit.left_for_hold = False
                self.coverage.count("fault:held-during-attempt")

    def undo_isolation_by_other(self, machine: SimNode) -> bool:
        """An operator puts a node in service that we isolated; say whether there was anything to undo."""
        active_flags = [
            bit
            for bit in machine.isolation_flags.values()
            if bit.set_by_rollout and bit.is_set and not bit.set_by_other
        ]
        for bit in active_flags:
            bit.is_set, bit.undone_by_other_at = False, self.loop.time()
        if active_flags:
            self.record(f"an operator puts {machine.name} in service")
        return bool(active_flags)

    def put_in_service(self, machine: SimNode) -> None:
        """An operator puts a node in service by hand that nothing but a hold says to be isolated."""
        for bit in machine.isolation_flags.values():
            rollout, bit.set_by_rollout = bit.set_by_rollout, ""
            bit.is_set = bit.set_by_other
            if rollout and not machine.isolating_rollouts:
                self.checker.feed_oracle("back", rollout=rollout, node=machine.name)
        machine.is_inspected = False

    def cordon(self, machine: SimNode) -> bool:
        """Another operator takes a node out of service, unless we are at it; say whether they did.

        A bit has no owner: what is set while an undo may still be repeated cannot be told from ours.
        """
        may_be_repeated = (
            self.loop.time() < machine.undone_at + UNDO_REPEAT_S or self.checker.may_be_isolated(machine.name)
        )
        if machine.is_inspected or machine.isolating_rollouts or may_be_repeated:
            return False
        bit = machine.isolation_flag(SHARED_KIND)
        bit.is_set = bit.set_by_other = True
        self.record(f"foreign cordon {machine.name}")
        return True

    def uncordon(self, machine: SimNode) -> None:
        """The other operator puts back what they took out."""
        bit = machine.isolation_flag(SHARED_KIND)
        if bit.set_by_other and not bit.set_by_rollout:
            bit.is_set = bit.set_by_other = machine.is_inspected = False

    # -- guards

    def arm_guard(self, node: str, rollout: str, attempt: int, after_s: float) -> None:
        """Let a node restore its version after a silence; a second guard of an attempt is the first."""
        key = rollout, node, attempt
        if key not in self.guards:
            for guard in self.guards.values():
                if guard.node == node and guard.state is GuardState.ARMED:
                    self.end_guard(guard, GuardState.RESTORED, "daemon")
            deadline = self.loop.time() + after_s
            guard = self.guards[key] = SimGuard(node, self.machines[node].version, after_s, deadline)
            self.loop.call_from_world(after_s, lambda: self._await_deadline(guard))

    def _await_deadline(self, guard: SimGuard) -> None:
        left_s = guard.deadline - self.loop.time()
        if guard.state is GuardState.ARMED and left_s > 0:
            self.loop.call_from_world(left_s, lambda: self._await_deadline(guard))
        elif guard.state is GuardState.ARMED:
            self.record(f"guard of {guard.node} restores")
            self.coverage.count("guard:timer")
            self.end_guard(guard, GuardState.RESTORED, "timer")

    def end_guard(self, guard: SimGuard | None, end: GuardState, by: str = "") -> None:
        """Confirm or restore, whichever comes first; what is restored may be restored again."""
        if guard is None or (guard.state is not GuardState.ARMED and guard.state is not end):
            return
        guard.by = by if guard.state is GuardState.ARMED else guard.by
        guard.state = end
        self.coverage.count(f"guard:{end}")
        if end is GuardState.RESTORED:
            self.machines[guard.node].version = guard.version

    # -- runs

    def spawn(self, handle: str, request: RunRequest) -> None:
        """Start a run's wrapper; it claims its run a moment later."""
        if handle not in self.runs:
            self.runs[handle] = SimRun(handle, request)
        run = self.runs[handle]
        self.loop.call_from_world(self.streams.latency.expovariate(1.0 / 0.1), lambda: self._claim(run))

    def _claim(self, run: SimRun) -> None:
        if run.claimed_by or not run.has_wrapper:
            return
        run.claimed_by = "wrapper"
        self.loop.call_from_world(self.streams.latency.expovariate(1.0 / 1.0), lambda: self._begin(run))

    def _begin(self, run: SimRun) -> None:
        machine = self.machines[run.request.node]
        if not run.has_wrapper:
            return
        if not machine.up:
            run.result = Failed(f"{machine.name} was unreachable", code=FailureCode.UNREACHABLE)
            return
        if run.request.check_only:
            machine.check_runs.append(run)
            running = machine.checks_of(self.epoch)
            if run.handle in running and len(running) > 1:
                self.checker.report_violation(f"{', '.join(running)} run at once")
            self.record(f"begin {run.handle}")
            self.loop.call_from_world(self.streams.latency.random() * 20.0, lambda: self._end_check(run))
            return
        if is_prepare_run(run.handle):
            self.checker.preparations.on_run_started(run.handle, machine.name)
        else:
            self.checker.on_run_started(
                run.handle,
                machine.name,
                run.request.rollout,
                machine.isolating_rollouts,
                self._missing_isolators(run),
            )
        if machine.runs and (is_prepare_run(run.handle) or any(map(is_prepare_run, machine.runs))):
            self.checker.report_violation(f"{run.handle} begins while {', '.join(machine.runs)} runs")
        machine.runs[run.handle] = run
        if run.request.kind != PLAYBOOK_RUN:
            self.checker.changes.on_applied(run.request)
            self.checker.clusters.on_applied(run.request)
            machine.version = noted_text(run.request)
            # The network of a new cluster comes from the change.
            machine.available |= machine.initialized and machine.kind is NodeKind.CLUSTER
        run.percent = 10.0
        self.record(f"begin {run.handle}")
        fate = self.fault_plan.next_run_fate()
        shortest_s, longest_s = self.run_s
        length_s = shortest_s + self.streams.latency.random() * (longest_s - shortest_s)
        if fate is RunFate.ESCAPED:
            run.ignored_signals = 1
        if fate in (RunFate.KILLED, RunFate.ORPHANED, RunFate.ESCAPED):
            orphan = fate is not RunFate.KILLED
            self.loop.call_from_world(
                length_s * self.streams.latency.random(), lambda: self.kill(run, orphan=orphan)
            )
        if fate is RunFate.HANGS:
            length_s = run.request.timeout_s
        result = Ok("changed") if fate is not RunFate.FAILS else Failed("a task failed: no such package")
        result = Failed("its time limit passed") if fate is RunFate.HANGS else result
        if fate is RunFate.LOSES_NODE:
            result = Failed("the node went silent in the middle", code=FailureCode.LOST)
        self.loop.call_from_world(length_s, lambda: self._end(run, result))

    def _end_check(self, run: SimRun) -> None:
        """Say what a run in check mode would change; nothing of it is left on the node."""
        if not run.has_wrapper or run.result is not None:
            return
        machine = self.machines[run.request.node]
        run.would_change = machine.version != run.request.variables.get("version")
        run.result = Ok("checked") if machine.up else Failed(f"{machine.name} was unreachable")
        self.coverage.count(f"check-mode:{'differs' if run.would_change else 'compliant'}")

    def _missing_isolators(self, run: SimRun) -> list[str]:
        """Return the isolators of the run's rollout that do not stand on its node, since longer than now."""
        machine = self.machines[run.request.node]
        kinds = self.isolators.get(run.request.rollout, ())
        cleared = [kind for kind in kinds if not machine.isolation_flag(kind).is_set]
        return [
            kind
            for kind in cleared
            if machine.isolation_flag(kind).undone_by_other_at < self.loop.time() - ISOLATION_LOSS_GRACE_S
        ]

    def _end(self, run: SimRun, result: Ok | Failed) -> None:
        machine = self.machines[run.request.node]
        if run.ignored_signals and run.handle in machine.runs:
            run.result = run.result or (result if run.has_wrapper else None)
            return
        if machine.runs.pop(run.handle, None) is None:
            return
        self.record(f"end {run.handle}")
        if is_prepare_run(run.handle):
            if isinstance(result, Ok):
                self.checker.preparations.on_run_ended(run.handle, machine.name)
            if run.request.variables.get("may_disturb") and self.fault_plan.chance("install-disturbs", 0.1):
                machine.service_starts += 1
                self.checker.preparations.on_node_disturbed(run.handle, machine.name)
        else:
            if isinstance(result, Ok) and run.request.kind == PLAYBOOK_RUN:
                machine.version = str(run.request.variables.get("version", "?"))
            self.checker.on_run_ended(machine.name, run.request.rollout)
        if run.has_wrapper and run.result is None:
            run.result, run.percent = result, 100.0

    def kill(self, run: SimRun, *, orphan: bool) -> None:
        """End a run's wrapper without a word; its work on the node goes on if it is orphaned."""
        if run.result is not None or not run.has_wrapper:
            return
        run.has_wrapper = False
        self.record(f"kill {run.handle}")
        if not orphan:
            self._remove_run(run)

    def cancel(self, run: SimRun) -> None:
        """End a run, its wrapper and, unless it ignores signals, its work."""
        self._end_work(run)
        cancelled = Failed("cancelled", code=FailureCode.INTERFERENCE)
        run.has_wrapper, run.result = False, run.result or cancelled

    def _remove_run(self, run: SimRun) -> None:
        is_gone = self.machines[run.request.node].runs.pop(run.handle, None) is not None
        if is_gone and not is_prepare_run(run.handle):
            self.checker.on_run_ended(run.request.node, run.request.rollout)

    def _end_work(self, run: SimRun) -> bool:
        if run.ignored_signals and run.handle in self.machines[run.request.node].runs:
            run.ignored_signals -= 1
            return False
        self._remove_run(run)
        return True

    def kill_stale_runs(self, node: str, why: str) -> list[str]:
        """End the processes of all runs on a node; return the runs whose processes are left."""
        left = []
        for run in list(self.machines[node].runs.values()):
            if not self._end_work(run):
                left.append(run.handle)
            if run.has_wrapper and run.result is None:
                run.result = Failed(why)
        return left

    def lose_power(self) -> None:
        """End every wrapper: the daemon's whole machine went down."""
        self.coverage.count("fault:machine-down")
        for run in self.runs.values():
            self.kill(run, orphan=self.streams.faults.random() < 0.5)

    # -- the inventory

    def labels(self) -> Mapping[str, Mapping[str, str]]:
        """Return the labels of all nodes that the inventory has."""
        return {m.name: m.labels for m in self.machines.values() if m.listed}

    def listed(self) -> Sequence[SimNode]:
        """Return the nodes that the inventory has."""
        return [machine for machine in self.machines.values() if machine.listed]


def is_prepare_run(handle: str) -> bool:
    """Return whether a run is of a prepare stage, by its handle."""
    return ".prepare." in handle
