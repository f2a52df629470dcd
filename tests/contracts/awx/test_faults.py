"""What AWX does to a run that is not as it seems: no run is lost, none is doubled on the node."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from machines.model.rollout import FailureCode
from rolloutd.adapters.awx import events, http
from rolloutd.adapters.awx import runner as runner_module
from rolloutd.adapters.awx.module_wrapper import SECOND_JOB
from rolloutd.contracts.runner import Work
from rolloutd.errors import NotFound, RunnerUnavailable
from rolloutd.ports import Failed, Ok, RunState, Unknown, wait_for_end
from tests.contracts.awx.backend import OTHER_PIN, PIN, AwxBackend, open_backend, open_scripted
from tests.support.fake_awx.objects import Job

pytestmark = pytest.mark.servers

BEGUN = ("playbook_on_start", "playbook_on_play_start", "playbook_on_task_start")
WHOLE = (*BEGUN, "runner_on_ok", "playbook_on_stats")


@pytest.fixture
async def awx(tmp_path: Path) -> AsyncIterator[AwxBackend]:
    async with open_backend(tmp_path) as backend:
        yield backend


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[AwxBackend]:
    async with open_scripted(tmp_path) as backend:
        yield backend


async def started(awx: AwxBackend) -> tuple[runner_module.AwxRunner, str, Job]:
    """Start a run whose job is running."""
    runner = awx.open_runner()
    handle = await runner.start(awx.request(Work.SUCCEEDS, "r1"))
    job = only_job(awx)
    awx.fake.jobs.begin(job, PIN)
    return runner, handle, job


def only_job(awx: AwxBackend) -> Job:
    (job,) = awx.fake.jobs.by_id.values()
    return job


async def ended(runner: runner_module.AwxRunner, handle: str) -> RunState:
    async with asyncio.timeout(60):
        return await wait_for_end(runner, handle)


async def test_lost_answer_of_launch_is_found(scripted: AwxBackend) -> None:
    scripted.fake.lost_answers = 1
    runner, handle, job = await started(scripted)
    assert handle == "r1"
    scripted.fake.jobs.emit_playbook(job, *WHOLE)
    scripted.fake.jobs.end(job, "successful", "")
    assert isinstance((await ended(runner, handle)).result, Ok)


@pytest.mark.long
async def test_late_launch_runs_on_no_host(awx: AwxBackend) -> None:
    """The launch is committed while it is waited out; the run begins with another claim, once."""
    awx.fake.late_commits = 1
    runner = awx.open_runner()
    request = awx.request(Work.SUCCEEDS, "r1", fencing_token="3.10 aaaa 1000")
    starting = asyncio.create_task(runner.start(request))
    async with asyncio.timeout(30):
        while not any(host.enabled is False for each in awx.fake.inventories.values() for host in each.hosts):
            await asyncio.sleep(0.01)
    (late,) = awx.fake.commit_late()
    handle = await starting
    assert handle == "r1~2"
    assert isinstance((await ended(runner, handle)).result, Ok)
    assert await awx.begun() == ["r1"]
    assert not any(each["event"] == "playbook_on_task_start" for each in late.events)


async def test_claim_without_job_is_waited_out(scripted: AwxBackend) -> None:
    """A daemon ended between its claim and its launch; a suspended one can launch nothing later."""
    scripted.fake.late_commits = 1
    first = scripted.open_runner()
    starting = asyncio.create_task(first.start(scripted.request(Work.SUCCEEDS, "r1")))
    async with asyncio.timeout(30):
        while scripted.fake.requests["POST", "job_templates/N/launch/"] == 0:
            await asyncio.sleep(0.01)
    starting.cancel()
    second = scripted.open_runner()
    with pytest.raises(NotFound):
        await second.get_state("r1")
    assert await second.start(scripted.request(Work.SUCCEEDS, "r1")) == "r1~2"
    abandoned = [host.enabled for each in scripted.fake.inventories.values() for host in each.hosts]
    assert abandoned == [False, True]


async def test_late_job_of_abandoned_claim_never_started(scripted: AwxBackend) -> None:
    """The daemon that waited it out was killed; its successor finds a job that had no host."""
    scripted.times = replace(scripted.times, late_launch_s=3600.0)
    scripted.fake.late_commits = 1
    starting = asyncio.create_task(scripted.open_runner().start(scripted.request(Work.SUCCEEDS, "r1")))
    async with asyncio.timeout(30):
        while scripted.fake.requests["PATCH", "hosts/N/"] == 0:
            await asyncio.sleep(0.01)
    starting.cancel()
    (late,) = scripted.fake.commit_late()
    scripted.fake.jobs.begin(late, PIN)
    scripted.fake.jobs.emit_playbook(late, *BEGUN[:2])
    stats = {"event": "playbook_on_stats", "event_data": {"processed": {}}, "created": 0.0}
    scripted.fake.jobs.emit(late, stats)
    scripted.fake.jobs.end(late, "successful", "")
    runner = scripted.open_runner()
    with pytest.raises(NotFound):
        await runner.get_state("r1")
    assert await runner.start(scripted.request(Work.SUCCEEDS, "r1")) == "r1~2"


async def test_events_are_read_up_to_gap(scripted: AwxBackend) -> None:
    runner, handle, job = await started(scripted)
    scripted.fake.jobs.emit_playbook(job, *BEGUN, "runner_on_ok", "playbook_on_task_start")
    random.Random(5).shuffle(job.events)
    late = job.events.pop([each["counter"] for each in job.events].index(3))
    state = await runner.get_state(handle)
    assert (state.task, [event.offset async for event in runner.read_events(handle)]) == ("", [1, 2])
    job.events.append(late)
    state = await runner.get_state(handle)
    assert state.task == "work"
    assert [event.offset async for event in runner.read_events(handle)] == [1, 2, 3, 4, 5]
    scripted.fake.jobs.emit_playbook(job, "runner_on_ok", "playbook_on_stats")
    scripted.fake.jobs.end(job, "successful", "")
    assert isinstance((await ended(runner, handle)).result, Ok)


async def test_job_that_begins_twice_is_unknown(scripted: AwxBackend) -> None:
    runner, handle, job = await started(scripted)
    scripted.fake.jobs.emit_playbook(job, *BEGUN)
    job.counter = 0
    scripted.fake.jobs.emit_playbook(job, *WHOLE)
    scripted.fake.jobs.end(job, "successful", "")
    result = (await ended(runner, handle)).result
    assert isinstance(result, Unknown)
    assert "begun twice" in result.text


@pytest.mark.parametrize(("lost", "expected"), [("runner_on_ok", Ok), ("playbook_on_stats", Unknown)])
async def test_lost_events_leave_only_what_they_showed(
    scripted: AwxBackend, lost: str, expected: type
) -> None:
    runner, handle, job = await started(scripted)
    scripted.fake.jobs.is_lost = lambda _, event: event["event"] == lost and event["counter"] > 4
    scripted.fake.jobs.emit_playbook(job, *BEGUN, "runner_on_ok", "playbook_on_task_start", *WHOLE[3:])
    scripted.fake.jobs.end(job, "successful", "")
    assert isinstance((await ended(runner, handle)).result, expected)


async def test_status_that_turns_is_waited_for(scripted: AwxBackend) -> None:
    runner, handle, job = await started(scripted)
    scripted.fake.jobs.emit_playbook(job, *BEGUN)
    scripted.fake.jobs.reap(job)
    assert (await runner.get_state(handle)).result is None
    scripted.fake.jobs.emit_playbook(job, "runner_on_ok", "playbook_on_stats")
    scripted.fake.jobs.end(job, "successful", "")
    assert isinstance((await ended(runner, handle)).result, Ok)


@pytest.mark.parametrize(
    ("status", "explanation", "events", "result", "says"),
    [
        (
            "failed",
            "reaped due to instance shutdown",
            BEGUN,
            Unknown,
            "how it ended",
        ),
        ("error", "", BEGUN, Unknown, "does not know"),
        ("canceled", "", BEGUN, Unknown, "cancelled in AWX"),
        ("failed", "", BEGUN, Unknown, "lost"),
        ("failed", "", WHOLE, Unknown, "its status is failed"),
        ("successful", "", (), Unknown, "lost"),
        ("failed", "", (), Failed, "ansible-playbook could not run"),
        ("failed", "", (*BEGUN, "runner_on_failed"), Failed, 'task "work" failed on n0'),
        ("failed", "Job terminated due to timeout", BEGUN, Failed, "time limit of 5m passed"),
    ],
)
async def test_result_needs_evidence_of_playbook(
    scripted: AwxBackend, status: str, explanation: str, events: tuple[str, ...], result: type, says: str
) -> None:
    runner, handle, job = await started(scripted)
    scripted.fake.jobs.emit_playbook(job, *events)
    scripted.fake.jobs.end(job, status, explanation)
    state = await ended(runner, handle)
    assert type(state.result) is result, state.result
    assert says in getattr(state.result, "text", "")


@pytest.mark.parametrize(
    ("output", "status", "result", "says"),
    [
        (f"{SECOND_JOB} (7-a): job 7-b is refused\r\n", 4, Unknown, "begun twice"),
        ("Killed\r\n", 137, Unknown, "ended by signal 9"),
        ("", -9, Unknown, "ended by signal 9"),
        ("ImportError: no module named dnf\r\n", 1, Failed, "no module named dnf"),
    ],
)
async def test_module_without_result_is_judged_by_its_end(
    scripted: AwxBackend, output: str, status: int, result: type, says: str
) -> None:
    """A terminal of ssh has one stream, so that what a module's wrapper says is in its standard output."""
    runner, handle, job = await started(scripted)
    ssh = "Shared connection to 127.0.0.1 closed.\r\n"
    answer = {"msg": "Module result deserialization failed.", "module_stdout": output, "module_stderr": ssh}
    scripted.fake.jobs.emit_playbook(job, *BEGUN)
    scripted.fake.jobs.emit_playbook(job, "runner_on_failed", res={**answer, "rc": status})
    scripted.fake.jobs.emit_playbook(job, "playbook_on_stats", failures={"n0": 1})
    scripted.fake.jobs.end(job, "failed", "")
    state = await ended(runner, handle)
    assert type(state.result) is result, state.result
    assert says in getattr(state.result, "text", "")


async def test_second_begin_shows_in_any_early_event(scripted: AwxBackend) -> None:
    """AWX may have lost the first event of one of the two."""
    runner, handle, job = await started(scripted)
    scripted.fake.jobs.emit_playbook(job, *BEGUN)
    job.counter = 0
    scripted.fake.jobs.is_lost = lambda _, event: event["counter"] == 1
    scripted.fake.jobs.emit_playbook(job, *WHOLE)
    scripted.fake.jobs.end(job, "successful", "")
    result = (await ended(runner, handle)).result
    assert isinstance(result, Unknown)
    assert "begun twice" in result.text


async def test_deleted_job_is_unknown(scripted: AwxBackend) -> None:
    runner, handle, job = await started(scripted)
    del scripted.fake.jobs.by_id[job.id]
    result = (await ended(runner, handle)).result
    assert isinstance(result, Unknown)
    assert "deleted in AWX" in result.text


async def test_job_that_runs_for_ever_is_unknown(
    scripted: AwxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "END_MARGIN_S", -300.0)
    runner, handle, _ = await started(scripted)
    result = (await ended(runner, handle)).result
    assert isinstance(result, Unknown)
    assert "past all limits" in result.text


async def test_page_that_names_itself_as_next_ends(scripted: AwxBackend) -> None:
    runner, handle, job = await started(scripted)
    scripted.fake.jobs.emit_playbook(job, *BEGUN)

    async def repeat(request: web.Request) -> web.StreamResponse | None:
        if not request.path.endswith("/job_events/"):
            return None
        return web.json_response({"results": job.events, "next": request.path})

    scripted.fake.intercept = repeat
    assert (await runner.get_state(handle)).task == "work"
    assert len([event async for event in runner.read_events(handle)]) == 3


async def test_endless_gap_counts_as_lost(scripted: AwxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WAITING", 2)
    runner, handle, job = await started(scripted)
    scripted.fake.jobs.is_lost = lambda _, event: event["counter"] == 1
    scripted.fake.jobs.emit_playbook(job, *BEGUN, "runner_on_ok")
    assert (await runner.get_state(handle)).task == "work"


async def test_endless_list_is_refused(scripted: AwxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_LIST_BYTES", 1000)

    async def repeat(request: web.Request) -> web.StreamResponse | None:
        return web.json_response({"results": [{"name": "x" * 300}], "next": request.path})

    scripted.fake.intercept = repeat
    with pytest.raises(RunnerUnavailable, match="longer than"):
        await scripted.open_runner().check_available()


async def test_job_that_never_began_is_never_started(scripted: AwxBackend) -> None:
    runner = scripted.open_runner()
    handle = await runner.start(scripted.request(Work.SUCCEEDS, "r1"))
    scripted.fake.jobs.end(only_job(scripted), "failed", "Previous Task Failed: project_update 7")
    result = (await ended(runner, handle)).result
    assert isinstance(result, Failed)
    assert result.code is FailureCode.NEVER_STARTED
    assert "Previous Task Failed" in result.text


async def test_other_commit_is_cancelled_and_unknown(scripted: AwxBackend) -> None:
    runner = scripted.open_runner()
    handle = await runner.start(scripted.request(Work.SUCCEEDS, "r1"))
    job = only_job(scripted)
    scripted.fake.jobs.begin(job, OTHER_PIN)
    result = (await ended(runner, handle)).result
    assert isinstance(result, Unknown)
    assert f"ran commit {OTHER_PIN[:12]}, not the pinned {PIN[:12]}" in result.text
    assert job.status == "canceled"


async def test_ignored_field_cancels_job(scripted: AwxBackend) -> None:
    """A template lost a prompt after it was read."""
    runner = scripted.open_runner()
    await runner.start(scripted.request(Work.SUCCEEDS, "r1"))
    for template in scripted.fake.templates.values():
        template.asks -= {"scm_branch"}
    handle = await runner.start(scripted.request(Work.SUCCEEDS, "r2"))
    result = (await ended(runner, handle)).result
    assert isinstance(result, Failed)
    assert result.code is FailureCode.NEVER_STARTED
    assert "without scm_branch" in result.text
    assert scripted.fake.jobs.by_id[max(scripted.fake.jobs.by_id)].status == "canceled"


@pytest.mark.parametrize("is_answered", [True, False])
async def test_job_without_a_field_is_ended_after_a_fault(scripted: AwxBackend, is_answered: bool) -> None:
    """AWX does not answer the cancel; or the launch, so that only the job itself says how it runs."""
    runner = scripted.open_runner()
    await runner.start(scripted.request(Work.SUCCEEDS, "r1"))
    for template in scripted.fake.templates.values():
        template.asks -= {"scm_branch"}
    scripted.fake.lost_answers = 0 if is_answered else 1

    async def cut_off(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=502) if request.path.endswith("/cancel/") else None

    scripted.fake.intercept = cut_off
    with pytest.raises(RunnerUnavailable):
        await runner.start(scripted.request(Work.SUCCEEDS, "r2"))
    scripted.fake.intercept = None
    result = (await ended(runner, await runner.start(scripted.request(Work.SUCCEEDS, "r2")))).result
    assert isinstance(result, Failed)
    assert "without scm_branch" in result.text
    assert scripted.fake.jobs.by_id[max(scripted.fake.jobs.by_id)].status == "canceled"


async def test_job_that_stays_pending_fills_runner(
    scripted: AwxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "PENDING_LIMIT_S", 0.0)
    runner = scripted.open_runner()
    handle = await runner.start(scripted.request(Work.SUCCEEDS, "r1"))
    assert (await runner.get_state(handle)).result is None
    with pytest.raises(RunnerUnavailable) as full:
        await runner.check_available()
    assert full.value.is_full


@pytest.mark.long
async def test_second_begin_of_job_is_refused_on_node(awx: AwxBackend) -> None:
    """AWX puts a running job back, whose playbook goes on, and begins it again."""
    runner = awx.open_runner()
    handle = await runner.start(awx.request(Work.NEVER_ENDS, "r1", fencing_token="3.10 aaaa 1000"))
    job = await awx.wait_for_job()
    first = awx.fake.jobs.processes[job.id]
    awx.fake.jobs.requeue(job)
    state = await ended(runner, handle)
    assert isinstance(state.result, Unknown), state.result
    assert "begun twice" in state.result.text
    first.kill()
    assert isinstance(await runner.clean_up_stale_runs(awx.host(), timeout_s=2.0), Ok)
    assert not await awx.has_work()


@pytest.mark.long
async def test_cancelled_in_awx_is_ended_by_clean_up(awx: AwxBackend) -> None:
    """What runs on the node goes on; a clean-up with a newer token also refuses what the job does next."""
    runner = awx.open_runner()
    handle = await runner.start(awx.request(Work.NEVER_ENDS, "r1", fencing_token="3.10 aaaa 1000"))
    job = await awx.wait_for_job()
    awx.fake.jobs.reap(job)
    assert isinstance((await ended(runner, handle)).result, Unknown)
    assert await awx.has_work()
    cleaned = await runner.clean_up_stale_runs(awx.host(), timeout_s=2.0, fencing_token="3.11 aaaa 1000")
    assert isinstance(cleaned, Ok), cleaned
    assert not await awx.has_work()
    late = await ended(
        runner, await runner.start(awx.request(Work.SUCCEEDS, "r2", fencing_token="3.9 aaaa 1000"))
    )
    assert isinstance(late.result, Failed)
    assert await awx.begun() == []


async def test_clean_up_cancels_active_jobs_of_node(scripted: AwxBackend) -> None:
    runner, _, job = await started(scripted)
    assert isinstance(await runner.clean_up_stale_runs(scripted.host(), timeout_s=2.0), Ok)
    assert job.status == "canceled"


async def test_failed_project_lets_nodes_wait(scripted: AwxBackend) -> None:
    """Before its launch, and at the launch of a template that was read before."""
    runner = scripted.open_runner()
    await runner.start(scripted.request(Work.SUCCEEDS, "r1"))
    (project,) = scripted.fake.projects.values()
    project.status = "failed"
    for says in ("refuses a launch", "the last update of project playbooks failed"):
        with pytest.raises(RunnerUnavailable, match=says):
            await runner.start(scripted.request(Work.SUCCEEDS, "r2"))
    project.status = "successful"
    assert await runner.start(scripted.request(Work.SUCCEEDS, "r2")) == "r2~2"


async def test_cut_off_before_launch_begins_again_at_once(scripted: AwxBackend) -> None:
    """No launch of the first claim was sent, so there is nothing to wait out."""
    scripted.times = replace(scripted.times, late_launch_s=3600.0)

    async def cut_off(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=502) if request.path.endswith("/hosts/") else None

    runner = scripted.open_runner()
    scripted.fake.intercept = cut_off
    with pytest.raises(RunnerUnavailable):
        await runner.start(scripted.request(Work.SUCCEEDS, "r1"))
    scripted.fake.intercept = None
    assert await runner.start(scripted.request(Work.SUCCEEDS, "r1")) == "r1~2"


async def test_retention_deletes_inventories_of_ended_runs(scripted: AwxBackend) -> None:
    runner, handle, job = await started(scripted)
    await runner.start(scripted.request(Work.SUCCEEDS, "r2"))
    stored = await runner.artifacts.list_artifacts()
    assert [each.name for each in stored] == ["r1", "r2"]
    assert not await runner.artifacts.remove(handle, unmodified_since=math.inf), "its job is active"
    scripted.fake.jobs.end(job, "successful", "")
    assert not await runner.artifacts.remove(handle, unmodified_since=stored[0].modified_at - 1)
    scripted.fake.is_cut_off = True
    assert not await runner.artifacts.remove(handle, unmodified_since=math.inf)
    assert await runner.artifacts.list_artifacts() == ()
    scripted.fake.is_cut_off = False
    assert await runner.artifacts.remove(handle, unmodified_since=math.inf)
    assert await runner.artifacts.remove(handle, unmodified_since=math.inf)
    assert [each.name for each in await runner.artifacts.list_artifacts()] == ["r2"]
