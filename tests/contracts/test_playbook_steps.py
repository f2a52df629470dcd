"""The isolator and the check `playbook`: runs that a restarted daemon finds again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutd.adapters.ansible.registration import PLAYBOOK_ISOLATOR
from rolloutd.adapters.playbook_steps import PlaybookCheck, PlaybookIsolator, run_name
from rolloutd.contracts import IsolatorBackend, IsolatorContract, SystemClock
from rolloutd.ports import (
    AdapterContext,
    Failed,
    Host,
    IsolationStatus,
    Isolator,
    Ok,
    StepContext,
    StepResult,
)
from tests.contracts.fakes.runner import FakeRunHost, Script, playbook_context
from tests.contracts.fakes.sources import SOURCE
from tests.contracts.runner_backends import AnsibleBackend
from tests.contracts.ssh_fixtures import step_context


def playbook_isolator(backend: FakeRunHost) -> PlaybookIsolator:
    return PlaybookIsolator(playbook_context(backend))


PLAYBOOKS = {"file": "isolate.yml", "undo": "deisolate.yml"}


FLAG_PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks: [{{name: flag, ansible.builtin.raw: {command}}}]
"""


class FlagIsolator:
    """The isolator as the daemon uses it: with a source whose playbooks set and remove a flag file."""

    def __init__(self, ansible: AnsibleBackend) -> None:
        self.host, self.params, self.clock = ansible.host(), PLAYBOOKS, SystemClock()
        self._source, self._flag = ansible.source, ansible.directory / "flag"
        (ansible.tree / "isolate.yml").write_text(FLAG_PLAYBOOK.format(command=f"touch {self._flag}"))
        (ansible.tree / "deisolate.yml").write_text(FLAG_PLAYBOOK.format(command=f"rm -f {self._flag}"))
        context = AdapterContext(ansible.shell, self.clock, ansible.runner(), ansible.inventory, None)
        self._isolator = PlaybookIsolator(context)
        self.isolator: Isolator = self

    async def inspect(self, ctx: StepContext) -> IsolationStatus:
        return await self._isolator.inspect(replace(ctx, source=self._source))

    async def isolate(self, ctx: StepContext) -> StepResult:
        return await self._isolator.isolate(replace(ctx, source=self._source))

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        return await self._isolator.return_to_service(replace(ctx, source=self._source))

    async def is_isolated(self) -> bool:
        return self._flag.exists()

    async def isolate_from_outside(self) -> None:
        self._flag.touch()


@pytest.mark.servers
class TestPlaybookIsolator(IsolatorContract):
    registration, can_inspect = PLAYBOOK_ISOLATOR, False

    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[IsolatorBackend]:
        ansible = AnsibleBackend(directory)
        try:
            yield FlagIsolator(ansible)
        finally:
            await ansible.close()


async def test_playbooks_isolate_and_return_once_per_key() -> None:
    backend = FakeRunHost({"isolate.yml": Script.OK, "deisolate.yml": Script.OK})
    ctx = replace(step_context(Host("n1"), PLAYBOOKS), source=SOURCE)
    assert not (await playbook_isolator(backend).inspect(ctx)).is_isolated
    for _ in range(2):
        assert isinstance(await playbook_isolator(backend).isolate(ctx), Ok)
    assert isinstance(await playbook_isolator(backend).return_to_service(ctx), Ok)
    assert backend.started_runs == [
        run_name(ctx, "do"),
        run_name(ctx, "undo"),
    ]


async def test_a_playbook_that_fails_fails_the_step() -> None:
    backend = FakeRunHost({"isolate.yml": Script.FAIL})
    ctx = replace(step_context(Host("n1"), PLAYBOOKS), source=SOURCE)
    assert isinstance(await playbook_isolator(backend).isolate(ctx), Failed)
    assert isinstance(await playbook_isolator(backend).return_to_service(ctx), Failed)


def test_run_names_are_safe_and_tell_keys_apart() -> None:
    names = {
        run_name(step_context(Host("n1"), {}, key=key), "do")
        for key in ("r1/n1/1/isolate.0", "r1/n1/2/isolate.0", "r1-n1-1-isolate.0", "..//x")
    }
    assert len(names) == 4
    assert all(name[0].isalnum() and "/" not in name and len(name) < 100 for name in names)


# -- the check `playbook` alone -------------------------------------------------


async def test_failed_task_is_the_failure_of_a_playbook_check() -> None:
    backend = FakeRunHost({"verify.yml": Script.OK, "fails.yml": Script.FAIL})
    check = PlaybookCheck(playbook_context(backend))
    ctx = replace(step_context(Host("n1"), {"file": "fails.yml"}, key="r1.n1.1.verify.0.1"), source=SOURCE)
    assert await check.check(ctx) == Failed('task "install package" failed on n1: no such package')
    passing = replace(ctx, params={"file": "verify.yml"}, idempotency_key="r1.n1.1.verify.1.1")
    assert isinstance(await check.check(passing), Ok)


async def test_restarted_daemon_finds_the_run_of_a_playbook_check() -> None:
    backend = FakeRunHost({"verify.yml": Script.OK})
    ctx = replace(step_context(Host("n1"), {"file": "verify.yml"}, key="r1.n1.1.verify.0.1"), source=SOURCE)
    for _ in range(2):
        assert isinstance(await PlaybookCheck(playbook_context(backend)).check(ctx), Ok)
    assert backend.started_runs == ["r1.n1.1.verify.0.1"]
