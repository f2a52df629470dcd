"""All runners as one: a playbook goes to the runner that the settings name for its node.

A change goes to the runner of its kind, which is created when the first rollout needs it.

The id of a run, and so its handle, names the runner's place, by which the next daemon finds it: `PLACE=RUN`.
The runner of this machine adds no place, so its handles are those of every version of rolloutd.  A runner
that does not answer, or refuses, is waited for; what it does not begin is no failure of a node.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from machines.model.events import Event, RolloutOpened
from machines.model.limits import RunnerProblem, part_of_runner, runner_of
from machines.model.plan import PLAYBOOK_RUN
from rolloutd import ports
from rolloutd.engine.state import State
from rolloutd.errors import AdapterFailed, NotFound, Refused, RolloutdError, RunnerUnavailable
from rolloutd.plugin import LOCAL_RUNNER
from rolloutd.ports.guards import adapter_errors, answers_of_system

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_S = 30.0
"""Interval of asking whether a runner is available, and how long it may take to answer.

A start that fails says so at once.
"""

PROBLEM_CHECK_S = 5.0
"""The same while one is not: nodes wait for it."""

RETRY_S = (1.0, 2.0, 5.0, 10.0, 15.0)
"""Pauses before a call is made again that the runner did not answer; the last one is repeated."""

END_MARGIN_S = 300.0
"""Time after its own limit in which a run has ended: its wait to be started, and its end."""

FOLLOW_TRIES = 3
"""Tries to follow a run: a passing fault, such as no memory left, is over by then."""

FOLLOW_RETRY_S = 5.0
"""Pause between two such tries; the run continues meanwhile."""

PLACE_DIGITS = 8
"""Hexadecimal digits of a runner's place in handles: a settings file has few runners."""

_PLACED = re.compile(rf"([a-z0-9-]+\.[0-9a-f]{{{PLACE_DIGITS}}})=(.*)", re.DOTALL)


async def follow_with_retries(
    follow: Callable[[], Awaitable[T | ports.Failed | ports.Unknown]],
    may_follow_again: Callable[[], Awaitable[bool]],
) -> T | ports.Failed | ports.Unknown | None:
    """Follow a run to its end; None if it may not be followed again, the last fault after the last try.

    A run that the daemon cannot follow continues, so the next try finds it as after a restart; or it starts
    the run.  `may_follow_again` makes the pause before another try, and checks that this daemon still leads.
    """
    for _ in range(FOLLOW_TRIES - 1):
        outcome = await follow()
        if not isinstance(outcome, ports.Failed | ports.Unknown):
            return outcome
        if not await may_follow_again():
            return None
    return await follow()


class RoutedRunners:
    """ports.Runners by the rules of the settings."""

    def __init__(
        self,
        state: State,
        runners: Mapping[str, ports.Runner],
        changes: Mapping[str, ports.Runner] | None = None,
    ) -> None:
        """`runners` by name, with that of this machine, which also has the runs of earlier settings.

        `changes` are the runners of changes by kind; it may create each when it is asked for.
        """
        self._state = state
        self._runners = dict(runners)
        self._changes: Mapping[str, ports.Runner] = {} if changes is None else changes
        self._statuses = {name: runner.status for name, runner in runners.items()}
        self._parts: dict[str, dict[str, RunnerProblem]] = {}
        """Why a runner cannot reach parts of what it changes, by runner and part."""
        self._unasked: dict[str, RunnerProblem] = {}
        """Why no change of a kind begins whose runner was not needed yet."""
        limited = {name: each for name, each in runners.items() if isinstance(each, ports.LimitsSources)}
        state.source_limits = limited
        state.digest_secret = self.digest_secret
        self._names = {_place(name, runner): name for name, runner in runners.items() if name != LOCAL_RUNNER}
        self._deadlines: dict[str, float] = {}
        """Until when a runner's silence about a run is waited out, epoch seconds."""
        self.artifacts = _StoredRuns(self)

    @property
    def statuses(self) -> Mapping[str, ports.RunnerStatus]:
        return self._statuses

    @property
    def stores(self) -> Mapping[str, ports.ArtifactStore]:
        """What the runners keep of ended runs, by runner."""
        return {
            name: each.artifacts for name, each in self._runners.items() if isinstance(each, ports.StoresRuns)
        }

    def may_remove_at(self, name: str) -> bool:
        """Return whether ended runs of a runner may go: with `observe_only` those of this machine alone."""
        return name == LOCAL_RUNNER or not self._state.index.limits.observe_only

    async def watch(self) -> None:
        """Ask until cancelled whether the runners are available, more often while one is not."""
        # Until it was asked no node starts: it would be isolated, and then wait for a runner that is down.
        unasked = RunnerProblem("not asked yet", self._state.now())
        for name, runner in self._runners.items():
            if name != LOCAL_RUNNER and runner.status.problem is None:
                runner.status.problem = unasked
        unneeded = RunnerProblem("it is asked once a rollout needs it", self._state.now(), is_unneeded=True)
        self._unasked = dict.fromkeys(self._changes.keys() - self._runners.keys(), unneeded)
        self._publish_problems()
        # Each by itself: one that does not answer must not delay what is known of the others.
        async with asyncio.TaskGroup() as tasks:
            for name in self._runners:
                tasks.create_task(self._watch(name), name=f"runner {name}")
            await self._watch_needed_changes(tasks)

    async def _watch_needed_changes(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to watch the runner of each kind of change once a rollout needs it."""
        opened = asyncio.Event()

        def on_commit(events: Sequence[Event], _: float) -> None:
            if any(isinstance(event, RolloutOpened) for event in events):
                opened.set()

        self._state.commit_listeners.append(on_commit)
        try:
            while self._unasked:
                rollouts = self._state.index.rollouts.values()
                needed = frozenset[str]().union(*(each.plan.run_kinds for each in rollouts))
                for kind in sorted(needed & self._unasked.keys()):
                    try:
                        with adapter_errors(f"change {kind}"):
                            self._find(kind)
                    except RolloutdError as error:
                        self._unasked[kind] = RunnerProblem(str(error), self._state.now())
                        self._publish_problems()
                        continue
                    self._runners[kind].status.problem = self._unasked.pop(kind)
                    tasks.create_task(self._watch(kind), name=f"runner {kind}")
                await opened.wait()
                opened.clear()
        finally:
            self._state.commit_listeners.remove(on_commit)

    async def _watch(self, name: str) -> None:
        while True:
            await self._check(name)
            has_problem = self._runners[name].status.problem is not None or bool(self._parts.get(name))
            await self._state.clock.sleep(PROBLEM_CHECK_S if has_problem else CHECK_S)

    async def _check(self, name: str) -> None:
        try:
            with adapter_errors(f"runner {name}"):
                async with asyncio.timeout(CHECK_S):
                    runner = self._runners[name]
                    await runner.check_available()
                    parts = await runner.find_part_problems() if isinstance(runner, ports.HasParts) else {}
        except (RolloutdError, TimeoutError) as error:
            self._record(name, error)
        else:
            self._record(name, None)
            self._record_parts(name, parts)

    def _record(self, name: str, error: Exception | None) -> None:
        """Record whether a runner is available, so that the rules know it."""
        if isinstance(error, RunnerUnavailable) and error.part:
            known = {part: each.detail for part, each in self._parts.get(name, {}).items()}
            self._record_parts(name, {**known, error.part: str(error)})
            return
        status, before = self._runners[name].status, self._runners[name].status.problem
        if error is None:
            status.problem = None
        else:
            since = self._state.now() if before is None else before.since
            is_full = isinstance(error, RunnerUnavailable) and error.is_full
            status.problem = RunnerProblem(str(error) or "no answer in time", since, is_full)
        if status.problem == before:
            return
        log.log(
            logging.INFO if error is None else logging.WARNING, "runner %s: %s", name, error or "available"
        )
        self._publish_problems()

    def _record_parts(self, name: str, problems: Mapping[str, str]) -> None:
        """Record which parts of what it changes a runner cannot reach."""
        now, before = self._state.now(), self._parts.get(name, {})
        parts = {
            part: before[part] if part in before and before[part].detail == text else RunnerProblem(text, now)
            for part, text in problems.items()
        }
        if parts == before:
            return
        for part in sorted(parts.keys() ^ before.keys()):
            log.info("runner %s at %s: %s", name, part, problems.get(part, "available"))
        self._parts[name] = parts
        self._publish_problems()

    def _publish_problems(self) -> None:
        known = {key: each.problem for key, each in self.statuses.items() if each.problem is not None}
        of_parts = {
            part_of_runner(name, part): problem
            for name, parts in self._parts.items()
            for part, problem in parts.items()
        }
        problems = {**self._unasked, **known, **of_parts}
        self._state.index.record_runner_problems(problems)
        self._state.wake_up()

    # -- which runner

    def _find(self, name: str) -> ports.Runner:
        """Return a runner of the settings, or that of a kind of change; raises NotFound."""
        if name not in self._runners:
            if name not in self._changes:
                raise NotFound(f"change {name}: not installed; install its package and restart rolloutd")
            self._runners[name] = self._changes[name]
            self._statuses[name] = self._runners[name].status
        return self._runners[name]

    def run_id_for(self, name: str, node: str, kind: str = PLAYBOOK_RUN) -> str:
        runner_name: str | None = kind
        if kind == PLAYBOOK_RUN:
            is_known = node in self._state.index.nodes
            runner_name = self._name_for(self._state.host(node)) if is_known else LOCAL_RUNNER
        if runner_name is None:
            return name  # start() waits until the settings have a runner for the node
        runner = self._find(runner_name)
        own = runner.run_id_here(name) if isinstance(runner, ports.OnOneMachine) else name
        return self.handle_of(runner_name, own)

    def is_elsewhere(self, handle: str) -> bool:
        name, own = self.resolve(handle)
        if name is None:
            return True
        runner = self._runners[name]
        return isinstance(runner, ports.OnOneMachine) and runner.is_elsewhere(own)

    def resolve(self, handle: str) -> tuple[str | None, str]:
        """Return the runner that a handle names, None for one that is not there, and its own handle."""
        match = _PLACED.fullmatch(handle)
        if match is None:
            return LOCAL_RUNNER, handle
        kind = match[1].rpartition(".")[0]
        if kind in self._changes:
            return (kind if _place(kind, self._find(kind)) == match[1] else None), match[2]
        return self._names.get(match[1]), match[2]

    def handle_of(self, name: str, own: str) -> str:
        return own if name == LOCAL_RUNNER else f"{_place(name, self._runners[name])}={own}"

    def _name_for(self, host: ports.Host) -> str | None:
        """Return the name of a host's runner, None without one; this machine itself has its own runner."""
        node = self._state.index.nodes.get(host.name)
        if node is None or host.connection.get("ansible_connection") == "local":
            return LOCAL_RUNNER
        rule = runner_of(self._state.index.limits.runners, node)
        return None if rule is None else rule.name

    def _name_for_start(self, request: ports.RunRequest) -> str:
        """Return the runner of a run that begins or is found again; raises RunnerUnavailable without one."""
        if request.kind != PLAYBOOK_RUN:
            return request.kind
        name, own = self.resolve(request.run_id)
        if name is None:
            raise AdapterFailed(
                f"{request.run_id}: the settings no longer name its runner; its state is unknown"
            )
        local = self._runners[LOCAL_RUNNER]
        machine = local.run_id_here("") if isinstance(local, ports.OnOneMachine) else ""
        names_machine = bool(machine) and own.endswith(machine)
        name = name if own != request.run_id or names_machine else self._name_for(request.host)
        if name is None:
            raise RunnerUnavailable(f"{request.node}: no runner of the settings is for it")
        return name

    # -- ports.Runs

    async def start(self, request: ports.RunRequest) -> str:
        name, inner = await self._ask_when_available(request, lambda runner, own: runner.start(own))
        handle = self.handle_of(name, inner)
        self._deadlines[handle] = self._state.now() + request.timeout_s + END_MARGIN_S
        return handle

    async def read_previous(self, request: ports.RunRequest) -> str | None:
        async def read(runner: ports.Runner, own: ports.RunRequest) -> str | None:
            return await runner.read_previous(own) if isinstance(runner, ports.RecordsPrevious) else None

        return (await self._ask_when_available(request, read))[1]

    async def digest_secret(self, kind: str, host: ports.Host, name: str, key: str) -> str:
        """Return a digest of a secret of a node that a plan's value names; raises RolloutdError."""
        runner = self._find(kind)
        if not isinstance(runner, ports.DigestsSecrets):
            raise Refused("no-secrets", f"change {kind}: its values cannot name secrets; use another value")
        with adapter_errors(f"change {kind}"):
            return await runner.digest_secret(host, name, key)

    async def _ask_when_available(
        self, request: ports.RunRequest, ask: Callable[[ports.Runner, ports.RunRequest], Awaitable[T]]
    ) -> tuple[str, T]:
        """Ask about a run as soon as its runner is available; its status shows the node meanwhile."""
        since, own = self._state.now(), replace(request, run_id=self.resolve(request.run_id)[1])
        retries = iter(RETRY_S)
        while True:
            name = None
            try:
                name = self._name_for_start(request)
                with self._answers(name):
                    self._state.require_leadership()
                    answer = await ask(self._find(name), own)
                break
            except RunnerUnavailable as error:
                if name is not None:
                    self._record(name, error)
            with self._shown_waiting(name, request.node, since):
                await self._state.clock.sleep(next(retries, RETRY_S[-1]))
            if request.kind != PLAYBOOK_RUN and request.node in self._state.index.nodes:
                # A cluster may have got the identity meanwhile that its change waits for.
                own = replace(own, host=self._state.host(request.node))
        if self._runners[name].status.problem is not None:
            self._record(name, None)
        return name, answer

    def _answers(self, name: str) -> AbstractContextManager[None]:
        """Guard a call of a runner of the settings: the system behind it may answer anything."""
        return answers_of_system(f"runner {name}") if name in self._names.values() else nullcontext()

    @contextmanager
    def _shown_waiting(self, name: str | None, node: str, since: float) -> Iterator[None]:
        # A node without a runner is among those of this machine's, so that its reason is asked for.
        waiting = self._runners[name or LOCAL_RUNNER].status.waiting
        waiting.setdefault(node, since)
        try:
            yield
        finally:
            if waiting.get(node) == since:
                del waiting[node]

    async def get_state(self, handle: str) -> ports.RunState:
        return await self._follow(handle, lambda runner, own: runner.get_state(own))

    async def wait_for_change(self, handle: str) -> ports.RunState:
        return await self._follow(handle, lambda runner, own: runner.wait_for_change(own))

    async def _follow(
        self, handle: str, ask: Callable[[ports.Runner, str], Awaitable[ports.RunState]]
    ) -> ports.RunState:
        """Ask about a run; a runner that does not answer is asked again until the run must have ended."""
        name, own = self.resolve(handle)
        if name is None:
            return ports.RunState(ports.Unknown(f"{handle}: the settings no longer name its runner"))
        until = self._deadlines.get(handle, self._state.now() + END_MARGIN_S)
        retries = iter(RETRY_S)
        while True:
            try:
                with self._answers(name):
                    state = await ask(self._runners[name], own)
            except RunnerUnavailable as error:
                self._record(name, error)
                if self._state.now() >= until:
                    return ports.RunState(
                        ports.Unknown(f"runner {name} has not answered since the run must be over: {error}")
                    )
                await self._state.clock.sleep(next(retries, RETRY_S[-1]))
                continue
            if state.result is not None:
                self._deadlines.pop(handle, None)
            return state

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[ports.RunEvent]:
        runner, own = self._runner_with(handle)
        async for event in runner.read_events(own, offset):
            yield event

    async def cancel(self, handle: str) -> None:
        runner, own = self._runner_with(handle)
        await runner.cancel(own)

    async def discard(self, handle: str) -> None:
        runner, own = self._runner_with(handle)
        await runner.discard(own)
        self._deadlines.pop(handle, None)

    async def clean_up_stale_runs(
        self, host: ports.Host, *, timeout_s: float, fencing_token: str = ""
    ) -> ports.Ok | ports.Failed | ports.Unknown:
        """End what the node's unfinished runs left, each in its own way: changes, and then playbooks."""
        left = {self.resolve(handle)[0] for handle in await self._state.store.unfinished_runs(host.name)}
        changes = [kind for kind in self._changes if kind in left]
        playbooks = [self._name_for(host) or LOCAL_RUNNER] if left - set(changes) or not changes else []
        result: ports.Ok | ports.Failed | ports.Unknown = ports.Ok()
        for name in (*changes, *playbooks):
            runner = self._find(name)
            result = await runner.clean_up_stale_runs(host, timeout_s=timeout_s, fencing_token=fencing_token)
            if not isinstance(result, ports.Ok):
                break
        return result

    async def keep_connections(self, nodes: Collection[str]) -> None:
        for runner in self._runners.values():
            if isinstance(runner, ports.KeepsConnections):
                await runner.keep_connections(nodes)

    def _runner_with(self, handle: str) -> tuple[ports.Runner, str]:
        name, own = self.resolve(handle)
        if name is None:
            raise NotFound(f"{handle}: the settings no longer name its runner, which has the run")
        return self._runners[name], own


class _StoredRuns:
    def __init__(self, runners: RoutedRunners) -> None:
        self._runners = runners

    async def list_artifacts(self) -> Sequence[ports.Artifact]:
        listed: list[ports.Artifact] = []
        for name, store in self._runners.stores.items():
            if not self._runners.may_remove_at(name):
                continue
            try:
                with adapter_errors(f"runner {name}"):
                    artifacts = await store.list_artifacts()
            except (RolloutdError, TimeoutError) as error:  # what the others have is removed all the same
                log.warning("runner %s: its ended runs cannot be listed: %s", name, error)
                continue
            listed += (replace(each, name=self._runners.handle_of(name, each.name)) for each in artifacts)
        return sorted(listed, key=lambda each: each.name)

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        runner, own = self._runners.resolve(name)
        store = None if runner is None else self._runners.stores.get(runner)
        if runner is not None and not self._runners.may_remove_at(runner):
            return False  # it was listed before the settings changed
        try:
            return store is None or await store.remove(own, unmodified_since=unmodified_since)
        except RunnerUnavailable:
            return False  # until the next time


def _place(name: str, runner: ports.Runner) -> str:
    """Return a runner's place as handles name it."""
    return f"{name}.{hashlib.sha256(runner.place.encode()).hexdigest()[:PLACE_DIGITS]}"
