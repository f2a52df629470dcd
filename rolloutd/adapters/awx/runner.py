"""Runner whose playbooks AWX runs.

A run is an inventory with the run's name and one host (claims.py), and the job that was launched with it.  So
each daemon finds it again by the name, from any machine.  A launch is sent once for each claim.  If no job
answers for it, the claim's host is turned off and the launch is waited out: only then has the run never
started, and it begins with another claim.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time
from weakref import WeakValueDictionary

from machines.model.rollout import FailureCode
from rolloutd import ports
from rolloutd.adapters.ansible.progress import Progress
from rolloutd.adapters.ansible.run_directory import MAX_START_ATTEMPTS
from rolloutd.adapters.ansible.stale_processes import run_id_on, run_name
from rolloutd.adapters.awx.claims import ACTIVE, Claim, Claims, run_facts
from rolloutd.adapters.awx.events import EventFold, instant, read_events
from rolloutd.adapters.awx.http import PAGE_SIZE, AnswerLost, AwxClient, AwxRefused, Query
from rolloutd.adapters.awx.launch_checks import LaunchChecks, groups_of
from rolloutd.adapters.awx.preflight import find_problems
from rolloutd.adapters.awx.result import EndedRun, evaluate, is_lost
from rolloutd.adapters.awx.stored_runs import StoredRuns
from rolloutd.adapters.awx.templates import Template, Templates, TemplateUnusable
from rolloutd.errors import AdapterFailed, NotFound, RunnerUnavailable

log = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 25.0
"""Limit of the wait for a cancelled job's end; AWX asks its own process for 5 s."""

CANCEL_ON_NODE_TIMEOUT_S = 10.0
"""Limit of ending a cancelled run's processes on the node."""

PENDING_LIMIT_S = 120.0
"""Time after which a job that AWX has not begun says that AWX is full."""

MAX_FINISHED_RUNS = 100
"""Runs that are over and kept in memory, each with the end of its output: 2 MB in all."""

END_MARGIN_S = 600.0
"""Time after its own limit in which a job is over; AWX first fetches the project and an image."""

COMPARED_EVENTS = 10
"""First events of a job by which a second begin shows; AWX may have lost some of them."""

UNMEASURED_PARALLEL = 50
"""Runs at once as the forecast has it; AWX's own capacity is not known to its users."""


@dataclass(frozen=True, slots=True)
class AwxTimes:
    """Seconds between two questions about a run, and of the settings `late_launch` and `late_events`."""

    poll_s: float = 1.0
    late_launch_s: float = 130.0
    late_events_s: float = 75.0


@dataclass(slots=True)
class _TrackedRun:
    """The state of a run as last read; all of it can be read again.

    `unasked` names what AWX launched the job without, until it was cancelled for that.
    """

    claim: Claim
    job: int
    node: str
    events: EventFold
    state: Mapping[str, ports.JSON]
    unasked: str = ""
    running_since: float | None = None
    over_since: float | None = None
    is_complete: bool = False
    tracked_since: float = field(default_factory=time)
    result: ports.Ok | ports.Failed | ports.Unknown | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AwxRunner:
    """ports.Runner by job templates of an AWX."""

    def __init__(
        self,
        context: ports.RunnerContext,
        client: AwxClient,
        templates: Templates,
        times: AwxTimes | None = None,
    ) -> None:
        assert context.stale_runs is not None
        self._context = context
        self._client = client
        self._templates = templates
        self._claims = Claims(client)
        self._stale_runs: ports.StaleRuns = context.stale_runs
        self.artifacts = StoredRuns(templates, self._claims)
        self._times = times or AwxTimes()
        self._launch_checks = LaunchChecks(context, templates, self._stale_runs)
        self._runs: dict[str, _TrackedRun] = {}
        self._refused: dict[str, ports.Failed] = {}
        self._never_started: set[str] = set()
        self._start_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.status = ports.RunnerStatus(UNMEASURED_PARALLEL)

    # -- the port

    @property
    def place(self) -> str:
        params = self._context.params
        return f"{params['url']}{params['prefix']} {params['organization']}"

    def run_id_here(self, name: str) -> str:
        """Return an id that names this installation, because others may have rollouts of the same name."""
        return run_id_on(self._context.machine, name)

    def is_elsewhere(self, handle: str) -> bool:
        return False

    async def check_available(self) -> None:
        await self._templates.organization(is_asked_again=True)
        pending = [
            run
            for run in self._runs.values()
            if run.result is None
            and run.state.get("status") in ("pending", "waiting")
            and time() - run.tracked_since > PENDING_LIMIT_S
        ]
        if pending:
            text = f"{self._client.name}: job {pending[0].job} is pending for more than {PENDING_LIMIT_S:g} s"
            raise RunnerUnavailable(f"{text}; see its reason in AWX", is_full=True)

    async def find_missing_prerequisites(self) -> Sequence[str]:
        """Ask AWX for all that a run needs; an empty inventory is created and deleted."""
        return await find_problems(self._client, self._templates, self._claims)

    def source_problem(self, source: ports.PinnedSource) -> str:
        """Return why AWX cannot run the playbooks of a source; empty if it can."""
        try:
            self._templates.require_source(source.kind, source.url)
        except TemplateUnusable as error:
            return str(error)
        return ""

    async def start(self, request: ports.RunRequest) -> str:
        """Start the run; raises ValueError for an invalid run id."""
        request = replace(request, run_id=run_name(request.run_id))
        lock = self._start_locks.setdefault(request.run_id, asyncio.Lock())
        async with lock:
            return await self._start(request)

    async def get_state(self, handle: str) -> ports.RunState:
        if (refusal := self._refused.get(handle)) is not None:
            return ports.RunState(refusal)
        run = self._runs.get(handle) or await self._find(handle)
        async with run.lock:
            if run.result is None:
                await self._refresh(run)
        progress, began_at = run.events.progress, instant(run.state.get("started"))
        return progress.run_state(run.result, began_at)

    async def wait_for_change(self, handle: str) -> ports.RunState:
        before = self._version(handle)
        state = await self.get_state(handle)
        while state.result is None and self._version(handle) == before:
            await self._context.clock.sleep(self._times.poll_s)
            state = await self.get_state(handle)
        return state

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[ports.RunEvent]:
        if handle in self._refused:
            return
        run = self._runs.get(handle) or await self._find(handle)
        is_over = run.result is not None
        check_only = run.events.check_only
        async for event in read_events(self._client, run.job, offset, check_only=check_only, is_over=is_over):
            yield event

    async def cancel(self, handle: str) -> None:
        if (await self.get_state(handle)).result is not None:
            return
        run = self._runs[handle]
        # From here on the job begins on no host, also if AWX puts it back into its queue.
        run.claim = await self._claims.abandon(run.claim, run.node)
        await self._cancel_jobs([run.job])
        connection = self._context.inventory().hosts.get(run.node)
        if connection is None:
            raise AdapterFailed(
                f"{run.node}: the inventory no longer has it, so what its run left there is not ended"
            )
        host = ports.Host(run.node, connection=connection)
        left = await self._stale_runs.clean_up_stale_runs(host, timeout_s=CANCEL_ON_NODE_TIMEOUT_S)
        await self.get_state(handle)
        if not isinstance(left, ports.Ok):
            raise AdapterFailed(left.text)

    async def discard(self, handle: str) -> None:
        self._forget(handle)
        organization = await self._templates.organization()
        claim = await self._claims.find(organization, handle)
        if claim is not None:
            await self._claims.delete(claim)

    async def clean_up_stale_runs(
        self, host: ports.Host, *, timeout_s: float, fencing_token: str = ""
    ) -> ports.Ok | ports.Failed | ports.Unknown:
        """End the node's jobs in AWX, which could go on by `raw` tasks, then what they left on the node."""
        organization = await self._templates.organization()
        jobs = await self._claims.active_jobs(organization, host.name)
        await self._cancel_jobs([int(each["id"]) for each in jobs])
        return await self._stale_runs.clean_up_stale_runs(
            host, timeout_s=timeout_s, fencing_token=fencing_token
        )

    # -- starting

    async def _start(self, request: ports.RunRequest) -> str:
        for number in range(1, MAX_START_ATTEMPTS + 1):
            handle = ports.handle_of_start(request.run_id, number)
            if handle in self._runs or handle in self._refused:
                await self._end_unasked(handle)
                return handle
            if handle in self._never_started:
                continue
            organization = await self._templates.organization()
            claim = await self._claims.find(organization, handle)
            if claim is None:
                return await self._begin(organization, handle, request)
            if await self._adopt(handle, claim):
                return handle
        raise NotFound(
            f"run {request.run_id} has been claimed {MAX_START_ATTEMPTS} times and never launched; check AWX"
        )

    async def _begin(self, organization: int, handle: str, request: ports.RunRequest) -> str:
        """Claim and launch the run; a refusal is the result of a run that never began."""
        prepared = await self._launch_checks.check(request)
        if isinstance(prepared, ports.Failed):
            self._refused[handle] = prepared
            return handle
        await self._stale_runs.end_inherited(request.host, request.fencing_token)
        claim, is_new = await self._claims.take(organization, handle, run_facts(request, prepared.tasks))
        if not is_new:  # another daemon came first
            return await self._start(request)
        try:
            from_node = await self._launch_checks.prepare_node(request, handle, prepared.python)
            if isinstance(from_node, ports.Failed):
                await self._claims.abandon(claim, request.node)
                self._refused[handle] = from_node
                return handle
            variables = {**prepared.variables, **from_node}
            claim = await self._claims.fill(claim, request.node, variables, groups_of(request.host))
        except BaseException:
            self._never_started.add(handle)  # this claim is launched by nobody
            raise
        job = await self._launch(handle, claim, prepared.template, request)
        if job is None:
            if not await self._adopt(handle, claim):
                return await self._start(request)
            return handle
        self._track(handle, claim, job)
        await self._end_unasked(handle)
        return handle

    async def _launch(
        self, handle: str, claim: Claim, template: Template, request: ports.RunRequest
    ) -> Mapping[str, ports.JSON] | None:
        """Launch the job once; return None if AWX may have launched it without an answer."""
        body = {
            "inventory": claim.inventory,
            "extra_vars": dict(request.variables),
            "scm_branch": request.source.pin,
            "job_type": "check" if request.check_only else "run",
            "timeout": max(1, int(request.timeout_s)),
            "diff_mode": request.check_only,
        }
        path = f"job_templates/{template.id}/launch/"
        try:
            answer: Mapping[str, ports.JSON] = (
                await self._client.request("POST", path, body=body, accepted=(201,))
            )[1]
        except AnswerLost as error:
            log.warning("%s: the answer to its launch was lost: %s", request.run_id, error)
            return None
        except AwxRefused as error:
            self._never_started.add(handle)
            self._templates.forget()
            raise self._client.unavailable(
                f"template {template.name} refuses a launch ({error})", "see the template and its project"
            ) from None
        return answer

    async def _end_unasked(self, handle: str) -> None:
        """Cancel a job that AWX launched otherwise than it was asked to; a call that fails is repeated."""
        run = self._runs.get(handle)
        if run is None or not run.unasked:
            return
        await self.cancel(handle)
        text = f"AWX launched job {run.job} without {run.unasked}; let the template prompt for them"
        if run.state.get("started") is None:
            run.result = ports.Failed(text, code=FailureCode.NEVER_STARTED)
        else:
            run.result = ports.Unknown(text)
        run.unasked = ""

    async def _adopt(self, handle: str, claim: Claim) -> bool:
        """Find the job of a claim, or abandon the claim; return whether the run may have begun."""
        node = str(claim.facts.get("rolloutd_node", ""))
        if not node:
            raise AdapterFailed(
                f"inventory {claim.inventory}: it is not of a run of rolloutd; delete it in AWX"
            )
        jobs = await self._claims.jobs(claim)
        if not jobs:
            claim = await self._claims.abandon(claim, node)
            jobs = await self._wait_out_launch(claim)
        if jobs:
            run = self._track(handle, claim, jobs[0])
            if not claim.is_abandoned or await self._has_run(run):
                await self._end_unasked(handle)
                return True
            self._forget(handle)
        self._never_started.add(handle)
        return False

    async def _wait_out_launch(self, claim: Claim) -> Sequence[Mapping[str, ports.JSON]]:
        """Return the jobs of a launch that was on its way when its claim was abandoned."""
        until = self._context.clock.now() + self._times.late_launch_s
        while not (jobs := await self._claims.jobs(claim)) and self._context.clock.now() < until:
            await self._context.clock.sleep(self._times.poll_s)
        return jobs

    async def _has_run(self, run: _TrackedRun) -> bool:
        """Return whether the job of an abandoned claim may have run a task; it may have had no host."""
        if run.state.get("started") is None:
            await self._cancel_jobs([run.job])
        while run.result is None:
            await self._refresh(run)
            if run.result is None:
                await self._context.clock.sleep(self._times.poll_s)
        progress = run.events.progress
        if progress.task or progress.counts is not None:
            return True
        return not (run.state.get("started") is None or progress.has_stats or run.is_complete)

    # -- following

    async def _find(self, handle: str) -> _TrackedRun:
        """Find a run of an earlier daemon by its name; raises NotFound."""
        organization = await self._templates.organization()
        claim = await self._claims.find(organization, handle)
        if claim is None:
            raise NotFound(f"there is no run {handle} in {self._client.name}")
        jobs = await self._claims.jobs(claim)
        if not jobs:
            raise NotFound(f"run {handle} has no job in {self._client.name}")
        run = self._track(handle, claim, jobs[0])
        if claim.is_abandoned and not await self._has_run(run):
            self._forget(handle)
            raise NotFound(f"run {handle} was launched in {self._client.name} after it was abandoned")
        return run

    def _track(self, handle: str, claim: Claim, job: Mapping[str, ports.JSON]) -> _TrackedRun:
        facts = claim.facts
        check_only = bool(facts.get("rolloutd_check_only"))
        node = str(facts.get("rolloutd_node"))
        expected = int(facts.get("rolloutd_tasks") or 0)
        events = EventFold(Progress(node), expected, check_only=check_only)
        run = _TrackedRun(claim, int(job["id"]), node, events, job, unasked=_unasked(claim, job))
        self._runs[handle] = run
        self._count()
        return run

    def _forget(self, handle: str) -> None:
        self._runs.pop(handle, None)
        self._refused.pop(handle, None)
        self._count()

    def _count(self) -> None:
        self.status.active = sum(run.result is None for run in self._runs.values())

    def _version(self, handle: str) -> tuple[int, object, ports.JSON]:
        run = self._runs.get(handle)
        return (
            (0, None, None) if run is None else (run.events.next_counter, run.result, run.state.get("status"))
        )

    async def _refresh(self, run: _TrackedRun) -> None:
        """Read the job and its events; set the result once nothing more can come."""
        try:
            run.state = await self._client.get(f"jobs/{run.job}/")
        except AwxRefused as error:
            if error.status != 404:
                raise
            self._finish(run, ports.Unknown(f"job {run.job} of {run.node} was deleted in AWX"))
            return
        if run.state.get("started") is not None:
            await run.events.read_new(self._client, run.job)
        status, pin = run.state.get("status"), run.claim.facts.get("rolloutd_pin")
        if status in ACTIVE:
            run.over_since = None
            revision = run.state.get("scm_revision")
            if status == "running" and revision and revision != pin and not run.claim.is_abandoned:
                log.warning("job %d checked out %s, not %s: cancelled", run.job, revision, pin)
                run.claim = await self._claims.abandon(run.claim, run.node)
                await self._cancel_jobs([run.job])
            elif status == "running" and self._is_past_limits(run):
                text = f"job {run.job} of {run.node} is past all limits, and AWX has not ended it"
                self._finish(run, ports.Unknown(text))
            return
        now = self._context.clock.now()
        run.over_since = run.over_since or now
        is_complete = bool(run.state.get("event_processing_finished")) and not run.events.has_gap
        is_cancelled = status == "canceled" and run.claim.is_abandoned
        is_settled = is_cancelled or (is_complete and not is_lost(run.state))
        if not is_settled and now < run.over_since + self._times.late_events_s:
            return
        run.is_complete = is_complete
        run.events.accept_gaps()
        begins = await self._count_begins(run)
        ended = EndedRun(
            run.state,
            run.events,
            run.claim.facts,
            is_complete=is_complete,
            begins=begins,
            is_cancelled=is_cancelled,
        )
        self._finish(run, evaluate(ended))

    def _is_past_limits(self, run: _TrackedRun) -> bool:
        """Return whether a job was seen running for longer than it can: AWX loses sight of some."""
        now = self._context.clock.now()
        run.running_since = run.running_since or now
        return now > run.running_since + float(run.claim.facts.get("rolloutd_timeout_s") or 0) + END_MARGIN_S

    async def _count_begins(self, run: _TrackedRun) -> int:
        """Return how often AWX began the job: each begin counts its events from 1."""
        query: Query = {"counter__lte": COMPARED_EVENTS, "page_size": PAGE_SIZE}
        answer = await self._client.get(f"jobs/{run.job}/job_events/", query)
        return max(Counter(each.get("counter") for each in answer["results"]).values(), default=0)

    def _finish(self, run: _TrackedRun, result: ports.Ok | ports.Failed | ports.Unknown) -> None:
        run.result = result
        if run.events.progress.changed_tasks or not isinstance(result, ports.Ok):
            self._launch_checks.forget(run.node)
        finished = [handle for handle, each in self._runs.items() if each.result is not None]
        for handle in finished[: max(0, len(finished) - MAX_FINISHED_RUNS)]:
            del self._runs[handle]
        self._count()

    async def _cancel_jobs(self, jobs: Sequence[int]) -> None:
        """Cancel jobs and wait until AWX says that they are over."""
        for job in jobs:
            await self._client.request("POST", f"jobs/{job}/cancel/", accepted=(200, 202, 204, 404, 405))
        until = self._context.clock.now() + CANCEL_TIMEOUT_S
        for job in jobs:
            while (await self._client.get(f"jobs/{job}/")).get("status") in ACTIVE:
                if self._context.clock.now() >= until:
                    raise AdapterFailed(f"{self._client.name}: job {job} was cancelled and goes on; see AWX")
                await self._context.clock.sleep(self._times.poll_s)


def _unasked(claim: Claim, job: Mapping[str, ports.JSON]) -> str:
    """Return the fields of a job that are not as its claim has them, or that AWX has ignored."""
    facts = claim.facts
    wanted = {
        "inventory": claim.inventory,
        "scm_branch": facts.get("rolloutd_pin"),
        "job_type": "check" if facts.get("rolloutd_check_only") else "run",
        "playbook": facts.get("rolloutd_playbook"),
    }
    other = [name for name, value in wanted.items() if job.get(name) != value] if facts else []
    return ", ".join(sorted({*(job.get("ignored_fields") or {}), *other}))


def make_runner(context: ports.RunnerContext) -> AwxRunner:
    params = context.params
    ca_file = params.get("ca_file")
    client = AwxClient(
        f"runner {context.name}",
        f"{params['url']}{params['prefix']}",
        Path(params["token_file"]),
        Path(ca_file) if ca_file else None,
    )
    context.shared[f"awx {context.name}"] = client  # the daemon closes it
    templates = Templates(client, params["organization"], params["projects"])
    times = AwxTimes(late_launch_s=params["late_launch"], late_events_s=params["late_events"])
    return AwxRunner(context, client, templates, times)
