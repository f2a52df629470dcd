"""One simulation, from its seed to its result.

In the fault period the daemon walks its rollouts while nodes, networks, disks,
users and the power fail by the seed.  Then the faults stop, a user resolves what
is left, and within a limit every rollout must end with no node isolated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from machines.facts.index import Index
from machines.states import IN_FLIGHT_PHASES, Phase
from rolloutd.engine.state import State
from rolloutd.errors import AlreadyRunning, NotFound, StoreFailed
from rolloutd.ports import GuardState
from rolloutd.settings import Settings
from rolloutd.store import backend_of
from rolloutd.store.audit_comparison import compare_with_audit
from tests.sim import plans, suggested_commands, workspace
from tests.sim.cluster_faults import ClusterFaults
from tests.sim.daemon_process import DaemonProcess
from tests.sim.fault_plan import FaultPlan
from tests.sim.fault_schedule import FaultSchedule
from tests.sim.forger import FORGERY_PROBABILITY, forge_votes, settle_forgeries
from tests.sim.inventory_faults import InventoryFaults
from tests.sim.job_faults import JobFaults
from tests.sim.loop import CURRENT, SimLoop
from tests.sim.people import OLGA, SAM, SimUsers
from tests.sim.random_streams import Coverage, RandomStreams
from tests.sim.random_user import RandomUser
from tests.sim.recovery_user import RecoveryUser
from tests.sim.scenario import Scenario, SimResult
from tests.sim.staged_file_damage import damage_staged_files
from tests.sim.workspace import LogErrorHandler, capture_errors
from tests.sim.world import SimWorld

RESTART_DELAY_S = 5.0
"""When the service manager starts a daemon again that has ended."""

RECOVERY_LIMIT_S = 4 * 86_400.0
"""Within so much virtual time of peace everything must have come to its end: a few windows' worth."""

RECOVERY_INTERVAL_S = 120.0
"""Interval between two passes of the user who settles what is left, in virtual time."""

DRIFT_INTERVAL_S = 900.0
"""Mean time between two manual changes."""

TRAIN_INTERVAL_S = 3600.0
"""How often people change a train, about: most outages are over by then."""

TRAFFIC_INTERVAL_S = 20.0
"""How often traffic comes to some node: often enough that it comes between a look and an isolation."""

MAX_STEPS = 400_000
"""Steps after which a simulation is not getting anywhere; a long one takes some 60,000."""


class Simulation:
    """A world, its users and the daemon processes in it."""

    def __init__(
        self,
        name: str,
        streams: RandomStreams,
        make_fault_plan: Callable[[Coverage], FaultPlan],
        scenario: Scenario,
        state_dir: Path,
        *,
        judges_whole_fleet: bool = True,
        max_steps: int = MAX_STEPS,
    ) -> None:
        self.judges_whole_fleet, self._max_steps = judges_whole_fleet, max_steps
        self.coverage = Coverage()
        self.loop = SimLoop(streams.schedule)  # type: ignore[abstract]  # what it lacks must raise
        self._fault_plan = make_fault_plan(self.coverage)
        self.world = SimWorld(self.loop, streams, self._fault_plan, self.coverage)
        self.name = name
        self._scenario = scenario
        self.state_dir = state_dir
        self.settings = scenario.settings
        self._daemons: list[DaemonProcess] = []
        self._users = SimUsers(self.world, self.newest_daemon)
        self._recovery_user = RecoveryUser(self._users)
        self.world.job_faults = JobFaults(streams.jobs, self._users)
        self.steps_to_crash = -1
        self.forgery_probability = FORGERY_PROBABILITY
        self.faults_stopped = False
        self._contents: dict[str, dict[str, Any]] = {}
        self._end: dict[str, str] = {}
        self.restart_at = 0.0
        for machine in scenario.machines:
            self.world.machines[machine.name] = machine
        checker = self.world.checker
        checker.nodes = checker.preparations.nodes = checker.cleaning.nodes = self.world.machines
        if judges_whole_fleet:
            checker.work.current_facts = self._current_facts
        checker.budgets.is_on = judges_whole_fleet
        checker.outages.on_joined = lambda: self.coverage.count("train:joined")
        checker.on_settings(scenario.settings)
        limits = (source.params.get("workers") for source in scenario.settings.inventory)
        checker.clusters.workers = next(limits, None)

    # -- the whole of it

    def run(self) -> SimResult:
        """Run it to its end, or to the first accusation, and return what it showed."""
        violations = self.world.checker.violations
        with self.loop.entered(), capture_errors(LogErrorHandler(self._on_log_error)):
            script = self.loop.create_task(self._script())
            while not script.done() and not violations and self.loop.steps < self._max_steps:
                if self.steps_to_crash >= 0:
                    self._on_step()
                if not self.loop.step():
                    break
        checker = self.world.checker
        if not script.done() and not violations:
            checker.report_violation(
                "it never came to its end" if self.loop.steps >= self._max_steps else "nothing stirs any more"
            )
        elif script.done() and script.exception() is not None:
            checker.report_violation(f"the simulation itself failed: {script.exception()!r}")
        for failure in self.loop.failures:
            if "never retrieved" not in failure.get("message", ""):
                checker.report_violation(f"a callback failed: {failure}")
        effects = getattr(self._fault_plan, "labels", [])
        verdict = SimResult(
            self.name,
            list(checker.violations),
            self.coverage,
            self.world.trace,
            self.loop.steps,
            effects,
            self._end,
        )
        self.world.is_finished = True
        with capture_errors(LogErrorHandler(lambda text: None)):
            self.loop.end_all_tasks()
        for life in self._daemons:
            life.close_files()
        return verdict

    def _on_log_error(self, text: str) -> None:
        """Accuse the daemon that logs this; one that was deposed and has not noticed knows old facts."""
        logging_daemon = next((life for life in self._daemons if life.process is CURRENT.get()), None)
        if logging_daemon is None or logging_daemon.epoch == self.world.epoch:
            self.world.checker.report_violation(text)

    def _on_step(self) -> None:
        if self.steps_to_crash > 0:
            self.steps_to_crash -= 1
        elif self.steps_to_crash == 0:
            self.steps_to_crash = -1
            life = self.newest_daemon()
            if life is not None:
                self.world.record(f"crash {life.process.name}")
                self.coverage.count("fault:crash")
                life.process.alive = False

    async def _script(self) -> None:
        restarter = self.loop.create_task(self._restart_daemons())
        await self._submit()
        acting = [self.loop.create_task(each) for each in self._actors()]
        if any("traffic" in spec for spec in self._scenario.specs) and self._scenario.action_interval_s:
            self.loop.create_task(self._generate_traffic())
        if any(spec.get("keep") for spec in self._scenario.specs):
            self.loop.create_task(self._let_nodes_drift())
        if any("prepare" in spec for spec in self._scenario.specs):
            self.loop.create_task(damage_staged_files(self))
        fault_period = self.loop.create_task(self._run_fault_period())
        recovery = self.loop.create_task(self._recover_periodically())
        await fault_period
        for task in acting:
            task.cancel()
        self.faults_stopped, self.steps_to_crash = True, -1
        self.world.record("peace")
        self.world.stop_faults()
        for life in self._daemons:
            if life.epoch < self.world.epoch:
                life.process.alive = False  # whoever started two ends one of them
        bound = self.loop.time() + RECOVERY_LIMIT_S
        while self._unfinished() and self.loop.time() < bound:
            await asyncio.sleep(30.0)
        for text in self._unfinished():
            self.world.checker.report_violation(
                f"after {RECOVERY_LIMIT_S / 86_400:.0f} days of peace: {text}"
            )
        recovery.cancel()
        restarter.cancel()
        await self._check_final_state()

    def _actors(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what lets things happen until the faults stop."""
        if not self._scenario.action_interval_s:
            return
        user, specs = RandomUser(self._users), self._scenario.specs
        yield user.act_randomly(self.world.streams.people, self._scenario.action_interval_s)
        yield user.supersede_at_return()
        yield InventoryFaults(self).run()
        if any("strategy" in spec for spec in specs):
            yield ClusterFaults(self).run()
        if self._scenario.is_train:
            yield self._change_train()
        if any("prepare" in spec for spec in specs):
            yield user.roll_out_again_and_clean()

    # -- lives

    def crash_daemon(self) -> None:
        """Crash the daemon at its next step."""
        self.steps_to_crash = 1

    def stop_daemon_for_minutes(self) -> None:
        """Crash the daemon at its next step; it is started again after two minutes."""
        self.crash_daemon()
        self.restart_at = self.loop.time() + 120.0

    def change_team_limit(self, nodes: int) -> None:
        """Let an admin write how many nodes of a team may be down, and have it read."""
        self.change_settings(plans.with_team_limit(self.settings, nodes))

    def change_settings(self, settings: Settings) -> None:
        """Let an admin write other settings and have them read: a daemon that misses it starts with them."""
        self.settings, daemon = settings, self.newest_daemon()
        if daemon is not None:
            daemon.run(daemon.reload(settings))

    def ask(self, request: Callable[[SimUsers], Coroutine[Any, Any, object]]) -> None:
        """Let an admin ask the daemon for something."""
        self.loop.create_task(request(self._users))

    def newest_daemon(self) -> DaemonProcess | None:
        """Return the daemon that answers people now."""
        return next((life for life in reversed(self._daemons) if life.alive), None)

    def _current_facts(self) -> Index | None:
        """Return the facts of the daemon that has the term; one that was deposed knows old ones."""
        life = self.newest_daemon()
        if life is None or life.state is None or life.epoch != self.world.epoch:
            return None
        return life.state.index

    def start_daemon(self) -> None:
        """Start the daemon."""
        number = len(self._daemons) + 1
        self._daemons.append(
            DaemonProcess(
                self.world,
                number,
                self.state_dir,
                self.settings,
                judges_whole_fleet=self.judges_whole_fleet,
            )
        )

    async def _restart_daemons(self) -> None:
        """Be the service manager: start the daemon whenever there is none."""
        while True:
            for life in self._daemons:
                if life.exit_error is None:
                    self._record_exit(life)
            if self.newest_daemon() is None and self.loop.time() >= self.restart_at:
                if self._daemons and not self.faults_stopped:
                    forge_votes(self.world, self.state_dir, self.forgery_probability)
                self.start_daemon()
            await asyncio.sleep(RESTART_DELAY_S)

    def _record_exit(self, daemon: DaemonProcess) -> None:
        """Take note of how a life ended."""
        if daemon.alive:
            return
        daemon.exit_error = StoreFailed("cut off")
        if daemon.task.done() and not daemon.task.cancelled():
            error = daemon.task.exception()
            daemon.exit_error = error or daemon.exit_error
            for each in _leaves(error):
                if not isinstance(each, StoreFailed | AlreadyRunning):
                    self.world.checker.report_violation(f"{daemon.process.name} died of {each!r}")
            self.coverage.count("fault:daemon-ended-itself")
            daemon.process.alive = False
        daemon.close_files()

    # -- trouble

    async def _submit(self) -> None:
        for number, spec in enumerate(self._scenario.specs, 1):
            name = f"R{number}"
            self._contents[name] = plans.content_of(f"plan{number}", spec)
            while not await self._try_submit(name):
                await asyncio.sleep(10.0)
        while self._scenario.is_train and not await self._users.make_train(list(self._contents)):
            await asyncio.sleep(10.0)

    async def _try_submit(self, name: str) -> bool:
        life = self.newest_daemon()
        if life is None or life.state is None or not life.state.inventory_refreshed.is_set():
            return False
        if name in life.state.index.rollouts:
            return True
        if not life.state.index.nodes:
            return False
        content = self._contents[name]
        content = self._contents[name] = plans.with_values(content, life.compile(content), life.state)
        plan = life.compile(content)
        if plan.pilot_node is not None and plan.pilot_node not in life.state.index.nodes:
            return False
        self.world.on_plan(name, plan)

        def submit(state: State) -> tuple[Any, ...]:
            return (
                plans.rollout_opened(
                    name,
                    self._contents[name],
                    plan,
                    state.index,
                    SAM.actor,
                    state.now(),
                    maybe_current=self._scenario.maybe_current or plan.skip_compliant,
                ),
            )

        return await self._users.run_command(SAM, "submit", submit)

    async def _run_fault_period(self) -> None:
        """Let things happen until the time of trouble is over, or where nothing happens until all is done."""
        until = self.loop.time() + self._scenario.fault_period_s
        if self._scenario.action_interval_s:
            await FaultSchedule(self).run(until, self._scenario.fault_probability)
        keeps = any(spec.get("keep") for spec in self._scenario.specs)
        while self.loop.time() < until and (keeps or self._unfinished()):
            await asyncio.sleep(30.0)
        await self._release_and_clean(until)

    async def _release_and_clean(self, until: float) -> None:
        """Roll out each further release of the first plan to its end, then clean all nodes."""
        for number, release in enumerate(self._scenario.releases, 2):
            name = f"R{number}"
            self._contents[name] = self._contents["R1"]
            while self.loop.time() < until and not await self._users.submit_again(OLGA, "R1", name, release):
                await asyncio.sleep(30.0)
            while self.loop.time() < until and self._unfinished():
                await asyncio.sleep(30.0)
        for node in self.world.machines if self._scenario.releases else ():
            while self.loop.time() < until and not await self._users.clean(node):
                await asyncio.sleep(30.0)

    async def _change_train(self) -> None:
        """Let people remove the train, and make it again in some other order."""
        trains = self.world.streams.trains
        while True:
            await asyncio.sleep(trains.expovariate(1.0 / TRAIN_INTERVAL_S))
            if await self._users.remove_train():
                await asyncio.sleep(trains.expovariate(1.0 / TRAIN_INTERVAL_S))
            names = list(self._contents)
            trains.shuffle(names)
            await self._users.make_train(names)

    async def _generate_traffic(self) -> None:
        """Be the clients: their traffic comes to nodes that are in service, and ends again."""
        traffic = self.world.streams.traffic
        while not self.faults_stopped:
            await asyncio.sleep(traffic.expovariate(1.0 / TRAFFIC_INTERVAL_S))
            machine = traffic.choice(list(self.world.machines.values()))
            blind, length_s = traffic.random() < 0.2, traffic.choice((5.0, 60.0, 600.0))
            if self.faults_stopped or (machine.isolating_rollouts and not blind):
                continue
            name = "traffic_unknown" if blind else "traffic"
            setattr(machine, name, True)
            self.loop.call_from_world(length_s, lambda m=machine, n=name: setattr(m, n, False))  # type: ignore[misc]

    async def _let_nodes_drift(self) -> None:
        """Undo the change on nodes here and there, where no rollout waits for one or works."""
        compliance = self.world.streams.compliance
        while not self.faults_stopped:
            await asyncio.sleep(compliance.expovariate(1.0 / DRIFT_INTERVAL_S))
            life = self.newest_daemon()
            if self.faults_stopped or life is None or life.state is None:
                continue
            index = life.state.index
            settled = [
                machine
                for machine in self.world.machines.values()
                if not machine.runs and all(t.phase is Phase.DONE for t in index.targets_on(machine.name))
            ]
            if settled:
                machine = compliance.choice(settled)
                machine.version = "old"
                self.world.record(f"{machine.name} drifts")

    # -- peace

    async def _recover_periodically(self) -> None:
        """Tidy up: at once where nobody else asks for anything, else once there is peace."""
        while True:
            await asyncio.sleep(RECOVERY_INTERVAL_S if self._scenario.action_interval_s else 20.0)
            self._check_suggested_commands()
            await self._settle_forgeries()
            if self.faults_stopped or not self._scenario.action_interval_s:
                for machine in self.world.machines.values():
                    self.world.uncordon(machine)
                await self._recovery_user.recover()
            elif self.world.streams.people.random() < self._scenario.approve_probability:
                await self._recovery_user.approve_and_resume()

    async def _settle_forgeries(self) -> None:
        process = self.newest_daemon()
        if self.world.is_forged and process is not None:
            await asyncio.wait({process.run(settle_forgeries(self.world, process))}, timeout=60.0)

    def _check_suggested_commands(self) -> None:
        """Try what people are told to do."""
        life = self.newest_daemon()
        if life is not None and life.state is not None and life.epoch == self.world.epoch:
            for text in suggested_commands.refused_suggestions(life.state):
                self.world.checker.report_violation(text)

    def _unfinished(self) -> list[str]:
        """Return what has not come to its end yet."""
        life = self.newest_daemon()
        if life is None or life.state is None or life.task.cancelling():
            return ["there is no daemon"]
        if self.world.is_forged:
            return ["the forged rows are not settled"]
        index = life.state.index
        found = [
            f"{name} has not ended"
            for name, rollout in index.rollouts.items()
            if not rollout.closed and not (rollout.plan.keep and index.all_done(name))
        ]
        for rollout in index.rollouts:
            found += [
                f"{target.node} of {rollout} is {target.phase}, isolated: {target.isolated}"
                for target in index.targets(rollout)
                if target.phase in IN_FLIGHT_PHASES or target.order is not None or target.isolated
            ]
        found += [
            f"{machine.name} is left isolated: {machine.isolation_flags}"
            for machine in self.world.machines.values()
            if any(bit.is_set for bit in machine.isolation_flags.values())
        ]
        if life.state.last_write_error and found:
            found.append(f"its trouble: {life.state.last_write_error}")
        return found

    async def _check_final_state(self) -> None:
        """Judge what is left when all is over."""
        life = self.newest_daemon()
        checker = self.world.checker
        if life is None or life.store is None or life.state is None:
            return
        if any(rollout.pilot_evidence is not None for rollout in life.state.index.rollouts.values()):
            self.coverage.count("pilot:evidence")
        life.store.check_last_commit()
        await life.run(life.store.compare_with_disk())
        report = compare_with_audit(backend_of(self.state_dir, workspace.postgresql))
        if not report.chain.ok:
            checker.report_violation(f"the audit is broken: {report.chain.message}")
        for (rollout, node, attempt), guard in self.world.guards.items():
            if guard.state is GuardState.ARMED:
                checker.report_violation(
                    f"the guard of {node} in {rollout}, attempt {attempt}, is left armed"
                )
        for row in report.mismatches:
            checker.report_violation(f"the audit does not account for {row}")
        for seq in report.unreadable:
            checker.report_violation(f"the audit cannot be replayed at entry {seq}")
        targets = [each for rollout in self._contents for each in await life.store.load_targets(rollout)]
        self._end = {name: machine.version for name, machine in self.world.machines.items()}
        self._end |= {
            f"what {m.name} has staged": " ".join(sorted(m.staged)) for m in self.world.machines.values()
        }
        self._end |= {f"{t.node} of {t.rollout}": f"{t.phase} {t.outcome}" for t in targets}
        for rollout, acknowledged in self._users.votes.items():
            try:
                stored = {vote.id for vote in (await life.store.load_rollout(rollout)).votes}
            except NotFound:
                continue  # deleted by a user, who had to confirm it
            for vote in acknowledged:
                if vote not in stored:
                    checker.report_violation(f"vote {vote} was acknowledged and lost")


def _leaves(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the errors in a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    elif error is not None:
        yield error
