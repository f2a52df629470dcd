"""What of an AWX, a plan or a node a run cannot use: refused before the claim, with what to do."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from machines.model.rollout import FailureCode
from rolloutd.adapters.awx import http
from rolloutd.adapters.awx.events import to_event
from rolloutd.adapters.awx.tree import PlaybookTasks
from rolloutd.contracts.runner import Work
from rolloutd.errors import RunnerUnavailable
from rolloutd.ports import JSON, Failed, Ok, PinnedSource, RunRequest, wait_for_end
from tests.contracts.awx.backend import PIN, AwxBackend, open_scripted
from tests.contracts.awx.test_faults import WHOLE, only_job, started
from tests.support.awx_rights import REQUESTS
from tests.support.fake_awx import FakeAwx
from tests.support.fake_awx.server import TOKEN

PLANTED = "planted-Kx7"


@pytest.fixture
async def awx(tmp_path: Path) -> AsyncIterator[AwxBackend]:
    async with open_scripted(tmp_path, "/api/controller/v2") as backend:
        yield backend


async def refusal(awx: AwxBackend, request: RunRequest) -> str:
    """Return why a run cannot begin; nothing was created for it."""
    runner = awx.open_runner()
    result = (await wait_for_end(runner, await runner.start(request))).result
    assert isinstance(result, Failed)
    assert result.code is FailureCode.NEVER_STARTED
    assert not awx.fake.inventories
    assert len(result.text.split()) <= 30
    return result.text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (PinnedSource("tree", PIN), "playbooks of git only, not uploaded ones; name `git`"),
        (PinnedSource("git", PIN, url="https://git.example/other.git"), "add it to `projects`"),
    ],
)
async def test_source_that_awx_cannot_run_is_refused(
    awx: AwxBackend, source: PinnedSource, says: str
) -> None:
    assert says in await refusal(awx, replace(awx.request(Work.SUCCEEDS, "r1"), source=source))


def _drop_prompts(fake: FakeAwx) -> None:
    for each in fake.templates.values():
        each.asks -= {"inventory", "timeout"}


def _serialize_jobs(fake: FakeAwx) -> None:
    for each in fake.templates.values():
        each.allow_simultaneous = False


def _require_survey(fake: FakeAwx) -> None:
    for each in fake.templates.values():
        each.survey = ("reason",)


def _forbid_override(fake: FakeAwx) -> None:
    for each in fake.projects.values():
        each.allow_override = False


def _add_second(fake: FakeAwx) -> None:
    (project,) = fake.projects.values()
    fake.add_template("other", project, "succeeds.yml")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fake: fake.templates.clear(), "no job template of project playbooks for succeeds.yml"),
        (lambda fake: fake.projects.clear(), "project playbooks is not there or not visible"),
        (_drop_prompts, "does not prompt on launch for inventory, timeout; change it in AWX"),
        (_serialize_jobs, "runs one job at a time"),
        (_require_survey, "needs answers of a survey"),
        (_forbid_override, "does not allow a branch override"),
        (_add_second, "let the account launch only one"),
    ],
)
async def test_unusable_template_is_refused(
    awx: AwxBackend, change: Callable[[FakeAwx], object], says: str
) -> None:
    change(awx.fake)
    assert says in await refusal(awx, awx.request(Work.SUCCEEDS, "r1"))


async def test_secrets_are_refused_or_left_to_credentials(
    awx: AwxBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    request = awx.request(Work.SUCCEEDS, "r1")
    secret = replace(request, variables={**request.variables, "api_token": PLANTED})
    assert "variable api_token of the plan is secret" in await refusal(awx, secret)
    awx.variables = {"ansible_become_password": PLANTED, "db_password": PLANTED}
    assert "add it to `credential_variables`" in await refusal(awx, awx.request(Work.SUCCEEDS, "r2"))
    runner = awx.open_runner(credential_variables=["db_password"])
    handle = await runner.start(awx.request(Work.SUCCEEDS, "r3"))
    assert (await runner.get_state(handle)).result is None
    (host,) = next(iter(awx.fake.inventories.values())).hosts
    assert "ansible_ssh_private_key_file" not in host.variables
    for text in (awx.fake.stored_text(), caplog.text):
        assert PLANTED not in text
        assert TOKEN not in text


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda: web.json_response({"detail": f"no {TOKEN}"}, status=401), "refuses the account (no ***)"),
        (lambda: web.json_response({"detail": "You do not"}, status=403), "refuses the account (You do not)"),
        (lambda: web.Response(status=302, headers={"Location": "/login"}), "a redirect"),
        (lambda: web.Response(text="<html>", content_type="text/html"), "without JSON, as a login page"),
        (lambda: web.Response(status=502), "HTTP status 502"),
        (lambda: web.json_response({}, status=429), "HTTP status 429"),
        (lambda: web.json_response({"results": 7}), "is not a list of AWX"),
        (lambda: web.Response(body=b"[" * 70_000), "its answer is too long"),
    ],
)
async def test_useless_answer_is_problem_of_runner(
    awx: AwxBackend, answer: Callable[[], web.Response], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 65_536)

    async def intercept(_: web.Request) -> web.Response:
        return answer()

    awx.fake.intercept = intercept
    runner = awx.open_runner()
    with pytest.raises(RunnerUnavailable) as unavailable:
        await runner.start(awx.request(Work.SUCCEEDS, "r1"))
    text = str(unavailable.value)
    assert says in text
    assert TOKEN not in text
    assert len(text.split()) <= 25
    awx.fake.intercept = None
    await runner.start(awx.request(Work.SUCCEEDS, "r1"))
    assert only_job(awx)


async def test_token_is_read_for_each_request(awx: AwxBackend) -> None:
    runner = awx.open_runner()
    (awx.directory / "token").write_text("other-token")
    with pytest.raises(RunnerUnavailable, match="refuses the account"):
        await runner.check_available()
    (awx.directory / "token").write_text(TOKEN)
    await runner.check_available()
    (awx.directory / "token").unlink()
    with pytest.raises(RunnerUnavailable, match="set `token_file`"):
        await runner.check_available()


async def test_requests_need_no_more_than_documented_rights(awx: AwxBackend) -> None:
    """Everything that the runner asks of AWX, from start to discard."""
    awx.fake.lost_answers = 1
    runner, handle, job = await started(awx)
    awx.fake.jobs.emit_playbook(job, *WHOLE)
    awx.fake.jobs.end(job, "successful", "")
    assert isinstance((await wait_for_end(runner, handle)).result, Ok)
    second = await runner.start(awx.request(Work.SUCCEEDS, "r2"))
    await runner.cancel(second)
    await runner.clean_up_stale_runs(awx.host(), timeout_s=2.0)
    await runner.discard(handle)
    assert await runner.find_missing_prerequisites() == []
    assert set(awx.fake.requests) == set(REQUESTS)


async def test_long_list_of_events_is_read_whole(awx: AwxBackend) -> None:
    runner, handle, job = await started(awx)
    awx.fake.jobs.emit_playbook(job, *WHOLE[:3], *["runner_on_ok", "playbook_on_task_start"] * 250)
    awx.fake.jobs.emit_playbook(job, *WHOLE[3:])
    awx.fake.jobs.end(job, "successful", "")
    state = await wait_for_end(runner, handle)
    assert isinstance(state.result, Ok)
    assert state.result.text == "251 tasks on n0, 0 changed"
    assert len([event async for event in runner.read_events(handle)]) == job.emitted


def test_tasks_are_counted_with_imports_and_roles(tmp_path: Path) -> None:
    for name, text in {
        "site.yml": "- import_playbook: more.yml\n"
        "- hosts: all\n  roles: [web, {role: db}]\n  tasks:\n"
        "    - import_tasks: tasks/more.yml\n    - block: [{ping: }]\n      rescue: [{ping: }]\n",
        "more.yml": "- hosts: all\n  gather_facts: no\n  tasks: [{ping: }]\n",
        "tasks/more.yml": "[{ping: }, {ping: }]\n",
        "roles/web/tasks/main.yml": "[{ping: }]\n",
        "roles/db/tasks/main.yml": "[{command: x, check_mode: no, name: act at once}]\n",
        "loop.yml": "- import_playbook: loop.yml\n",
        "broken.yml": "- hosts: [\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tasks = PlaybookTasks.read(tmp_path, "site.yml")
    assert (tasks.count, tasks.defying) == (8, "act at once")
    assert PlaybookTasks.read(tmp_path, "loop.yml").count == 0
    assert PlaybookTasks.read(tmp_path, "broken.yml").count == 0


async def test_defying_playbook_is_refused_in_check_mode(awx: AwxBackend) -> None:
    text = "- hosts: all\n  tasks: [{command: x, check_mode: false, name: act at once}]\n"
    (awx.tree / "fails.yml").write_text(text)
    request = replace(awx.request(Work.FAILS, "r1"), check_only=True)
    assert (await refusal(awx, request)).startswith('check mode would execute task "act at once" on n0')


async def test_preflight_names_each_problem(awx: AwxBackend) -> None:
    _drop_prompts(awx.fake)
    awx.fake.tokens[TOKEN].organizations = frozenset()
    problems = await awx.open_runner().find_missing_prerequisites()
    assert len(problems) == 1 + len(awx.fake.templates)
    assert "give it `inventory admin`" in problems[0]
    assert all("does not prompt on launch for inventory, timeout" in each for each in problems[1:])
    _forbid_override(awx.fake)
    assert "does not allow a branch override" in (await awx.open_runner().find_missing_prerequisites())[1]
    awx.fake.is_cut_off = True
    (problem,) = await awx.open_runner().find_missing_prerequisites()
    assert "its answer was cut off" in problem


HIDDEN = {"changed": False, "censored": "hidden"}


@pytest.mark.parametrize(
    ("action", "result", "kind"),
    [
        ("raw", {"changed": False, "msg": "does not support check mode"}, "unchecked"),
        ("ansible.builtin.shell", HIDDEN, "unchecked"),
        ("copy", HIDDEN, "skipped"),
        ("raw", {"changed": False, "false_condition": "false"}, "skipped"),
        ("raw", {"changed": False, "results": [{"skipped": True}]}, "skipped"),
    ],
)
def test_task_that_check_mode_skipped_is_unchecked(action: str, result: dict[str, JSON], kind: str) -> None:
    data = {"task": "t", "task_action": action, "host": "n1", "res": result}
    event = to_event({"event": "runner_on_skipped", "event_data": data}, check_only=True)
    assert event is not None
    assert event["kind"] == kind
