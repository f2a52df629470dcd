"""The smallest working new part of each kind, as edits of the product, each with a proof that it works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Part:
    """A new part: `edits` are (file, code, what follows it), `files` new files, `proof` must pass."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    proof: str
    files: Mapping[str, str] = field(default_factory=dict)


LABELLED: Final = '''

@dataclass(frozen=True, slots=True)
class NodeLabelled:
    """A person labelled a node."""

    node: str
    label: str
    actor: Actor
    at: float
'''

EVENT: Final = Part(
    "an event that only the audit has",
    (
        (
            "machines/model/trust_events.py",
            "    command: tuple[str, ...]\n    actor: Actor\n    reason: str\n    at: float\n",
            LABELLED,
        ),
        ("machines/model/trust_events.py", "ShellOpened | LeaderSteppedDown", " | NodeLabelled"),
        (
            "rolloutd/texts/event_text.py",
            "    \"RequestDenied\": lambda f: f\"was refused {f['call']}: {f['why']}\",\n",
            "    \"NodeLabelled\": lambda f: f\"labelled {f['node']} {f['label']}\",\n",
        ),
    ),
    """
from machines.facts.apply import writes
from machines.model.trust_events import NodeLabelled
from machines.model.rollout import DAEMON
from rolloutd.texts import event_text
from tests.machines.builders import T0, index_of, nodes_of
event = NodeLabelled("n1", "spare", DAEMON, T0)
index = index_of(nodes_of({"t": ["n1"]}))
index.apply(event)
assert writes(event, index, T0) == ()
assert "NodeLabelled" in event_text._FORMATTERS
""",
)

FIELD: Final = Part(
    "a field of an answer",
    (
        ("rolloutd/control/trains/wire_trains.py", "    wait_s: float\n", "    count: int\n"),
        (
            "rolloutd/control/trains/handlers.py",
            '        "wait_s": train.wait_s,\n',
            '        "count": len(train.rollouts),\n',
        ),
    ),
    """
import asyncio
from types import SimpleNamespace
from machines.model.rollout import DAEMON
from machines.model.train import Train
from rolloutd.control.trains.handlers import train_response
from tests.machines.builders import T0, index_of, nodes_of, submit
index = index_of(nodes_of({"t": ["n1"]}))
submit(index, "R")
train = Train("t", ("R",), by=DAEMON, at=T0, wait_s=60.0, approvals={})
assert asyncio.run(train_response(SimpleNamespace(index=index), train))["count"] == 1
""",
)

PURPOSE: Final = Part(
    "a step with a purpose",
    (
        ("machines/workflow/steps.py", '    VERIFY = "verify"\n', '    WARM_UP = "warm-up"\n'),
        (
            "machines/workflow/steps.py",
            "    Purpose.VERIFY: Rule(StepAction.CHECK, Phase.VERIFYING, _LOST_CHECK),\n",
            "    Purpose.WARM_UP: Rule(StepAction.CHECK, Phase.VERIFYING, _LOST_CHECK),\n",
        ),
        (
            "machines/workflow/steps.py",
            "        *_rows(Purpose.VERIFY, isolated),\n",
            '        *_rows(Purpose.WARM_UP, isolated, "warm."),\n',
        ),
    ),
    """
from dataclasses import replace
from machines.model.actions import RunCheck
from machines.model.rollout import Target
from machines.states import Phase
from machines.workflow.next_action import next_action
from machines.workflow.recording import intent_of, record_of
from machines.workflow.situation import Situation
from machines.model.step_record import Ok
from tests.machines.builders import T0, plan_of
target = Target("R", "n1", "t", (), "fleet", 1, phase=Phase.VERIFYING, attempt=1, since=T0)
first = next_action(Situation(plan_of(), target, (), T0, 0.0))
done = record_of(intent_of(first, target, T0), Ok(), T0)
second = next_action(Situation(plan_of(), target, (done,), T0, 0.0))
assert isinstance(second, RunCheck) and second.step.startswith("warm.")
""",
)

WORK: Final = Part(
    "a kind of work on a node",
    (
        (
            "machines/facts/node_work.py",
            "    RELEASE = ReasonCode.RELEASING.value\n",
            "    BENCHMARK = ReasonCode.BENCHMARK.value\n",
        ),
        (
            "machines/facts/node_work.py",
            "    WorkKind.RELEASE: _ROLLOUTS | {WorkKind.RELEASE},\n",
            "    WorkKind.BENCHMARK: frozenset(WorkKind),\n",
        ),
        ("machines/model/reasons.py", '    RELEASING = "releasing"\n', '    BENCHMARK = "benchmark"\n'),
        (
            "rolloutd/texts/reason_text.py",
            (
                "    ReasonCode.RELEASING: lambda node, _: "
                'f"{node} is being returned to service after a hold",\n'
            ),
            '    ReasonCode.BENCHMARK: lambda node, _: f"{node} is being measured",\n',
        ),
    ),
    """
from machines.facts.node_work import NodeWork, WorkKind
from machines.model.decision import Admit
from machines.scheduler.decide import decide
from rolloutd.texts.reason_text import describe
from tests.machines.builders import T0, index_of, nodes_of, reason_of, submit
index = index_of(nodes_of({"t": ["n1"]}))
submit(index)
assert decide(index, T0).of(Admit)
index.record_work(NodeWork(WorkKind.BENCHMARK, "n1"))
assert not decide(index, T0).of(Admit)
assert describe(reason_of(index, "R", "n1", T0)) == "n1 is being measured"
""",
)

FRONT_END: Final = Part(
    "a front end",
    (
        (
            "rolloutd/app.py",
            '                tasks.create_task(_run_later(daemon, forecaster.run), name="forecast"),\n',
            '                tasks.create_task(_run_later(daemon, partial(serve, state)), name="mailbox"),\n',
        ),
        (
            "rolloutd/app.py",
            "from rolloutd.engine.daemon import Daemon\n",
            "from rolloutd.mailbox.server import serve\n",
        ),
    ),
    """
import asyncio, tempfile
from pathlib import Path
import rolloutd.app
from rolloutd.mailbox.server import read
from tests.rolloutd.control_environment import control_environment
async def main(directory):
    async with control_environment(directory) as inside:
        rollout = await inside.submit()
        await read(inside.state, f"olga infra pause {rollout}")
        assert inside.state.index.rollout(rollout).paused is not None
with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory)))
""",
    {
        "rolloutd/mailbox/__init__.py": "",
        "rolloutd/mailbox/server.py": '''"""Commands by lines of a pipe: NAME TEAM pause ROLLOUT."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from machines.model.rollout import Actor, ActorKind
from rolloutd.commands.execution import UserCommand, execute, resolve_live
from rolloutd.commands.rollout_commands import pause
from rolloutd.engine.state import State


@dataclass(frozen=True, slots=True)
class Sender:
    """A person, by the name that the line has (a Principal)."""

    user: str
    teams: frozenset[str]
    admin: bool = False

    @property
    def actor(self) -> Actor:
        return Actor(ActorKind.SERVICE, f"mailbox:{self.user}")


async def serve(state: State) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        await read(state, line)


async def read(state: State, line: str) -> None:
    user, team, _, rollout = line.split()
    resolved = await resolve_live(state, rollout)
    command = UserCommand("pause: by mail", lambda *of: pause(*of, "by mail"), resolved)
    await execute(state, Sender(user, frozenset({team})), command)
''',
    },
)

ISOLATOR: Final = Part(
    "an isolator",
    (
        (
            "pyproject.toml",
            '[project.entry-points."rolloutd.isolators"]\n',
            'flag = "rolloutd.adapters.flag:ISOLATOR"\n',
        ),
    ),
    """
import asyncio
from pathlib import Path
import tomllib
from pkgutil import resolve_name
from rolloutd.plugin import Registration
groups = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
entry = groups["rolloutd.isolators"]["flag"]
registration = resolve_name(entry)
assert isinstance(registration, Registration)
assert hasattr(resolve_name(registration.factory)(None), "return_to_service")
""",
    {
        "rolloutd/adapters/flag.py": '''"""An isolator by a file: while it exists, a node gets no traffic."""

from __future__ import annotations

from pathlib import Path

from rolloutd.plugin import Params, Registration
from rolloutd.ports import AdapterContext, IsolationStatus, Ok, StepContext, StepResult


class FlagParams(Params):
    """Writes a file for each node that is out of service."""

    directory: str


class FlagIsolator:
    def __init__(self, context: AdapterContext) -> None:
        pass

    async def inspect(self, ctx: StepContext) -> IsolationStatus:
        exists = _flag(ctx).exists()
        prior = {"isolated": exists} if ctx.prior is None else ctx.prior
        return IsolationStatus(exists, prior, "isolated" if exists else "in service")

    async def isolate(self, ctx: StepContext) -> StepResult:
        _flag(ctx).touch()
        return Ok("isolated")

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        if not ctx.prior["isolated"]:
            _flag(ctx).unlink(missing_ok=True)
        return Ok("in service")


def _flag(ctx: StepContext) -> Path:
    return Path(str(ctx.params["directory"])) / ctx.host.name


ISOLATOR = Registration("rolloutd.adapters.flag:FlagIsolator", FlagParams)
''',
    },
)

RUNNER: Final = Part(
    "a runner",
    (
        (
            "pyproject.toml",
            '[project.entry-points."rolloutd.runners"]\n',
            'notes = "rolloutd.adapters.notes:RUNNER"\n',
        ),
    ),
    """
import asyncio
import tempfile
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from rolloutd.errors import NotFound
from rolloutd.plugin import Registration
from rolloutd.ports import Host, Ok, PinnedSource, RunRequest
groups = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
registration = resolve_name(groups["rolloutd.runners"]["notes"])
assert isinstance(registration, Registration)
async def walk(directory):
    context = SimpleNamespace(params={"directory": directory})
    for _ in range(2):
        runner = resolve_name(registration.factory)(context)
        handle = await runner.start(RunRequest("r1", Host("n1"), PinnedSource("git", "1"), "site.yml"))
        assert (await runner.get_state(handle)).result == Ok("noted")
    await runner.discard(handle)
    try:
        await runner.get_state(handle)
    except NotFound:
        return
    raise AssertionError
with tempfile.TemporaryDirectory() as directory:
    asyncio.run(walk(directory))
""",
    {
        "rolloutd/adapters/notes.py": '''"""A runner that notes runs, each over at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from rolloutd.errors import NotFound
from rolloutd.plugin import Params, Registration
from rolloutd.ports import (
    Failed,
    Host,
    Ok,
    RunEvent,
    RunnerContext,
    RunnerStatus,
    RunRequest,
    RunState,
    Unknown,
)


class NotesParams(Params):
    """Writes a file for each run."""

    directory: str


class NotesRunner:
    def __init__(self, context: RunnerContext) -> None:
        self.place = str(context.params["directory"])
        self.status = RunnerStatus(1000)

    async def check_available(self) -> None:
        pass

    async def start(self, request: RunRequest) -> str:
        self._note(request.run_id).write_text(request.playbook)
        return request.run_id

    async def get_state(self, handle: str) -> RunState:
        if not self._note(handle).exists():
            raise NotFound(f"there is no run {handle}")
        return RunState(Ok("noted"), 100.0)

    async def wait_for_change(self, handle: str) -> RunState:
        return await self.get_state(handle)

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        if not offset:
            yield RunEvent(1, 0.0, "task", self._note(handle).read_text())

    async def cancel(self, handle: str) -> None:
        pass

    async def discard(self, handle: str) -> None:
        self._note(handle).unlink(missing_ok=True)

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        return Ok()

    def _note(self, handle: str) -> Path:
        return Path(self.place) / handle


RUNNER = Registration("rolloutd.adapters.notes:NotesRunner", NotesParams)
''',
    },
)
