"""Commands of a plan that name variables: people see the template unless the variable may be shown."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import quote

import pytest

from rolloutd.adapters.ssh.check import SshCheck
from rolloutd.adapters.ssh.command import CommandIsolator, CommandProbe
from rolloutd.adapters.ssh.shell import ShellResult
from rolloutd.engine.background.checks_outside_attempts import check_outside_attempt
from rolloutd.engine.drivers.isolation import Isolation, OtherAttempts
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.drivers.traffic_probes import probe_traffic
from rolloutd.ports import Busy, Failed, Host, IsolationStatus, Ok, StepResult, Unknown
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import checks_of

SECRET = "Zq7x'token with spaces/and\\slashes"
"""It changes its form in a shell, in quotes and in a URL."""

COMMAND = "drain --key {{ vars.psk }}"

QUOTED = SECRET.replace("\\", "\\\\")

TEXT = (
    PLAN.replace("{playbook: site.yml}", f'{{playbook: site.yml, vars: {{psk: "{QUOTED}", n: "7"}}}}')
    .replace('{do: "true", undo: "true"}', f'{{do: "{COMMAND}", undo: "{COMMAND}", look: "{COMMAND}"}}')
    .replace(
        "verify: [{reachable: {}}]",
        f'verify: [{{reachable: {{}}}}, {{ssh: {{run: "{COMMAND}", equals: "{{{{ vars.psk }}}}"}}}},'
        ' {ssh: {run: "count {{ vars.n }}", exit: 7}}]\n'
        f'  traffic: [{{command: {{run: "{COMMAND}"}}}}]',
    )
)


class EchoingShell:
    """A node whose shell prints the command that it cannot run, as `set -x` does."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        self.commands.append(command)
        return ShellResult(1, f"+ {command}", f"{command}: failed")


def session_of(inside: ControlEnvironment, rollout: str, shell: EchoingShell) -> NodeSession:
    adapters = AdapterSet(
        FakeRunner(inside.run_host),
        {"command": CommandIsolator(shell, inside.clock)},  # type: ignore[arg-type]
        {"ssh": SshCheck(shell, inside.clock)},  # type: ignore[arg-type]
        find_source,
        {"command": CommandProbe(shell, inside.clock)},  # type: ignore[arg-type]
    )
    return NodeSession(inside.state, adapters, rollout, "p1")


def texts(result: StepResult | IsolationStatus) -> str:
    return f"{result.text} {getattr(result, 'output', '')}"


async def results(session: NodeSession) -> list[StepResult | IsolationStatus]:
    """Return what each command of the plan gives: isolator, check and probe, as the daemon records it."""
    plan, isolation = session.node_plan(), Isolation(session, StepJournal(session), OtherAttempts(session))
    (isolator,) = plan.isolate
    context = await session.step_context(isolator)
    given: list[StepResult | IsolationStatus] = [
        await session.capture_errors(session.adapters.isolators["command"].isolate(context)),
        await session.capture_errors(isolation._inspect(isolator, None)),
        await probe_traffic(session, plan.traffic[0]),
    ]
    for spec in plan.verify[1:]:
        context = await session.step_context(spec)
        given.append(await session.capture_errors(session.adapters.checks["ssh"].check(context)))
        given.append(await check_outside_attempt(checks_of(session), spec))
    return given


async def test_result_shows_template_of_hidden_variable(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=TEXT)
        shell = EchoingShell()
        given = await results(session_of(inside, rollout, shell))
        assert all(shlex.split(each)[-1] in (SECRET, "7") for each in shell.commands)
        assert [each for each in map(texts, given) if "Zq7x" in each or "token" in each] == []
        assert all(COMMAND in texts(each) or "count {{ vars.n }}" in texts(each) for each in given)
        traffic = inside.state.index.traffic_of(rollout, "p1")
        assert traffic is not None
        assert COMMAND in traffic.text


async def test_result_shows_value_that_plan_or_settings_allow(tmp_path: Path) -> None:
    async with control_environment(tmp_path, show_vars=["n"]) as inside:
        rollout = await inside.start(text=TEXT.replace("maintain:", "show_vars: [psk]\n  maintain:"))
        given = await results(session_of(inside, rollout, EchoingShell()))
        assert all("Zq7x" in texts(each) or "count 7" in texts(each) for each in given)


FORMS = {
    "as it is": SECRET,
    "in a command": shlex.quote(SECRET),
    "in an error": repr(SECRET),
    "in a URL": f"https://x.example/{quote(SECRET, safe='')}",
    "cut": f"`{SECRET[:12]}...` failed",
    "cut within quotes": f"`{SECRET[:12]}` exits 1",
    "cut at the end": f"n1 is busy: {SECRET[:12]}",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
async def test_each_form_of_hidden_value_is_replaced(tmp_path: Path, text: str) -> None:
    async with control_environment(tmp_path) as inside:
        session = session_of(inside, await inside.start(text=TEXT), EchoingShell())
        given = (Ok(text), Failed("", text), Busy(text), Unknown(text), IsolationStatus(None, None, text))
        for result in given:
            assert "Zq7x" not in texts(session.without_hidden(result))


async def test_short_hidden_value_is_replaced_as_word(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        session = session_of(inside, await inside.start(text=TEXT), EchoingShell())
        assert session.without_hidden(Ok("`count 7` on web-77")).text == "`count {{ vars.n }}` on web-77"
