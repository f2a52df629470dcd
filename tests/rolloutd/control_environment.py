"""A daemon's facts with a real control socket before them: real index, real rules, real HTTP.

Nodes move when a test commits what a driver would have committed.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from machines.facts.projection import Projection
from machines.model.events import Event, GateOpened, NodesDiscovered, PhaseMoved, StepRecorded
from machines.model.node import Node, NodeHealth, NodeKind, Observation
from machines.model.plan import GateName
from machines.model.rollout import Failure
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Outcome, Phase, Trigger, next_phase
from rolloutd.adapters.ssh.person_shell import shell_command
from rolloutd.configuration.documents import configuration_hash, intended_configuration
from rolloutd.control.client import Client
from rolloutd.control.identity import Account, CachedNameService
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.routes import Services
from rolloutd.control.server import ControlServer
from rolloutd.engine.background.audit_monitor import AuditMonitor
from rolloutd.engine.background.drift_checks import DriftChecker
from rolloutd.engine.background.node_cleaning import NodeCleaner
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.forecasts import Forecaster
from rolloutd.engine.state import State
from rolloutd.forecast.__main__ import answer_text
from rolloutd.ports import Checkpoints, Peers, RunnerStatus, StandbyDaemon
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits, compile_plan
from rolloutd.store import Store
from tests.contracts.fakes.checkpoints import FakeCheckpoints
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.leadership import FakeLeadership, Seat
from tests.contracts.fakes.node_files import FakeNodeFiles
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner, Script
from tests.contracts.fakes.sources import FakeSourceStore, find_source
from tests.contracts.fakes.store import MemoryStore

URL = "https://git.example/infra/playbooks.git"

PLAN = f"""\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {{name: sysctl, owner: infra}}
spec:
  source: {{git: "{URL}", ref: main}}
  targets: ""
  soak: 10m
  isolate: [{{command: {{do: "true", undo: "true"}}}}]
  maintain: {{playbook: site.yml}}
  rollback: {{playbook: undo.yml}}
  verify: [{{reachable: {{}}}}]
  gates:
    start: {{owner: 1}}
    continue: {{owner: 1, each_team: 1}}
    proceed: {{owner: 1}}
"""

REBOOT_GATE = {"owner": 1, "each_team": 1}
REBOOTS: dict[str, Any] = {
    "listen": "127.0.0.1:1",
    "groups": {"workers": {"ids": {"machine-1": "p1"}, "owner": "infra", "gate": REBOOT_GATE}},
}
"""A group of machines that reboot themselves; only a test that listens uses the address."""

SETTINGS: dict[str, Any] = {
    "teams": {
        "infra": {"members": ["olga", "oscar"]},
        "payments": {"members": ["paul"]},
        "search": {"members": ["@searchers"]},
        "idle": {"members": ["ida"]},
    },
    "admins": ["@wheel"],
    "pools": {"team": {"max_unavailable": 1}, "rack": {"max_unavailable": 2}},
}

ACCOUNTS = {
    "olga": Account(1001, "olga", frozenset()),
    "oscar": Account(1002, "oscar", frozenset()),
    "paul": Account(1003, "paul", frozenset()),
    "sara": Account(1004, "sara", frozenset({"searchers"})),
    "ida": Account(1005, "ida", frozenset()),
    "adam": Account(1006, "adam", frozenset({"wheel"})),
    "nora": Account(1007, "nora", frozenset()),
}

NODES = tuple(
    Node(name, sources=("hosts",), labels={"team": team, "rack": rack})
    for name, team, rack in (
        ("p1", "payments", "r1"),
        ("p2", "payments", "r2"),
        ("s1", "search", "r1"),
        ("s2", "search", "r2"),
    )
)


KUBERNETES_NODES = tuple(replace(node, kind=NodeKind.KUBERNETES) for node in NODES)


class FakeNameService:
    """This machine's name service, as far as a test needs one: whoever is sitting there now."""

    def __init__(self) -> None:
        self.current = ACCOUNTS["olga"]

    async def account(self, uid: int) -> Account:
        """Return whoever the test has put there."""
        return self.current


@dataclass(slots=True)
class ControlEnvironment:
    """The facts, the clock, and ways to act on them."""

    state: State
    clock: FakeClock
    name_service: FakeNameService
    client: Client
    server: ControlServer
    run_host: FakeRunHost
    sources: FakeSourceStore
    audit_monitor: AuditMonitor
    refresh_calls: list[int] = field(default_factory=list)
    kept: KeptAnswers = field(default_factory=KeptAnswers)
    observes_nodes: bool = False

    async def restart(self) -> None:
        """Forget what a daemon that is started again does not load."""
        limits, settings = self.state.index.limits, self.state.settings
        self.state.index = Projection.build(
            await self.state.store.load_snapshot(),
            limits,
            lambda content: compile_plan(content, teams=settings.teams),
        )
        self.observe_all_up()

    async def observe(self, nodes: Sequence[str]) -> None:
        """Look at nodes, if the test has given the daemon eyes."""
        if self.observes_nodes:
            self.observe_all_up()

    async def request(self, who: str, method: str, path: str, *args: Any) -> Any:
        """Ask as somebody; `method` is one of the client's."""
        self.name_service.current = ACCOUNTS[who]
        call: Callable[..., Any] = getattr(self.client, method)
        return await asyncio.to_thread(call, path, *args)

    async def stream_lines(
        self,
        path: str,
        count: int | None = None,
        *,
        who: str | None = None,
        method: str = "GET",
        body: Any = None,
        **query: Any,
    ) -> list[dict[str, Any]]:
        """Return lines of a stream: so many, or all until it ends."""
        if who is not None:
            self.name_service.current = ACCOUNTS[who]

        def read() -> list[dict[str, Any]]:
            found = []
            stream = self.client.stream(path, query, method=method, body=body)
            for line in stream:
                found.append(line)
                if len(found) == count:
                    break
            stream.close()  # type: ignore[attr-defined]
            return found

        return await asyncio.to_thread(read)

    async def commit(self, *events: Event) -> None:
        """Commit as the daemon."""
        await self.state.commit(events, cause="test")

    async def submit(self, who: str = "olga", text: str = PLAN, **more: Any) -> str:
        """Submit a plan and return its rollout."""
        body = {"file": "plan.yaml", "text": text} | more
        answer = await self.request(who, "post", "/v1/plans/submit", body)
        return str(answer["rollout"])

    async def start(self, **more: Any) -> str:
        """Return a rollout whose start gate is open."""
        rollout = await self.submit(**more)
        await self.vote("olga", rollout, "start")
        await self.commit(GateOpened(rollout, GateName.START, "", self.clock.now()))
        return rollout

    async def vote(self, who: str, rollout: str, gate: str, yes: bool = True, **more: Any) -> Any:
        """Vote."""
        body = {"gate": gate, "yes": yes, "reason": "because"} | more
        if gate == "proceed" and yes and "shown" not in more:
            nodes = more.get("nodes")
            failures = (await self.request(who, "get", f"/v1/rollouts/{rollout}/failures"))["failures"]
            body["shown"] = [each["id"] for each in failures if nodes is None or each["node"] in nodes]
        return await self.request(who, "post", f"/v1/rollouts/{rollout}/votes", body)

    def observe_all_up(self) -> None:
        """Let all nodes be seen up, now."""
        now = self.clock.now()
        self.state.index.record_observations(
            [Observation(node.name, NodeHealth.UP, now) for node in NODES], now
        )

    async def transition(self, rollout: str, node: str, trigger: Trigger, **more: Any) -> None:
        """Take one edge, as the daemon or a driver would."""
        target = self.state.index.target(rollout, node)
        self.clock.advance(1)
        self.observe_all_up()
        await self.commit(
            PhaseMoved(
                rollout=rollout,
                node=node,
                trigger=trigger,
                source=target.phase,
                target=next_phase(trigger, target.phase, more.get("outcome")),
                attempt=target.attempt + 1 if trigger is Trigger.ADMITTED else target.attempt,
                at=self.clock.now(),
                **more,
            )
        )

    async def isolate(self, rollout: str, node: str) -> None:
        """Admit a node and isolate it."""
        await self.transition(rollout, node, Trigger.ADMITTED)
        await self.commit(StepRecorded(self.step(rollout, node, "isolate.0.command"), isolated=True))
        await self.transition(rollout, node, Trigger.ISOLATED)

    async def run_playbook(self, rollout: str, node: str) -> None:
        """Begin the run of an isolated node, which gives it its configuration."""
        found = self.state.index.rollout(rollout)
        variables = self.state.connections.get(node, {})
        given = found.plan, found.source, variables, self.state.redaction_key
        document = intended_configuration(*given, self.state.settings.show_vars)
        run = self.step(rollout, node, "run.configure", StepAction.RUN)
        await self.commit(StepRecorded(run, content=configuration_hash(*given), document=document))

    async def fail(self, rollout: str, node: str, *, isolated: bool = True) -> None:
        """Bring a node to failed: in its playbook, or before anything isolated it."""
        if self.phase(rollout, node) is Phase.PENDING:
            await (
                self.isolate(rollout, node) if isolated else self.transition(rollout, node, Trigger.ADMITTED)
            )
        if self.phase(rollout, node) is Phase.MAINTAINING:
            await self.run_playbook(rollout, node)
        target = self.state.index.target(rollout, node)
        failure = Failure(
            f"{node}#{target.attempt}", node, target.attempt, "run.configure", "broken", self.clock.now()
        )
        await self.transition(rollout, node, Trigger.FAILED, failure=failure)

    async def finish(self, rollout: str, node: str) -> None:
        """Bring a node to done."""
        await self.isolate(rollout, node)
        await self.run_playbook(rollout, node)
        await self.transition(rollout, node, Trigger.MAINTAINED)
        undone = self.step(rollout, node, "isolate.0.command", StepAction.REVERT)
        checked = self.step(rollout, node, "verify.0.reachable", StepAction.CHECK)
        await self.commit(StepRecorded(checked), StepRecorded(undone, isolated=False))
        await self.transition(rollout, node, Trigger.VERIFIED, outcome=Outcome.CHANGED)

    def step(
        self, rollout: str, node: str, name: str, action: StepAction = StepAction.APPLY, **more: Any
    ) -> StepRecord:
        """Return a step of the node's attempt that went well."""
        now = self.clock.now()
        attempt = self.state.index.target(rollout, node).attempt
        return StepRecord(rollout, node, attempt, name, action, 1, StepState.OK, now, now, **more)

    def phase(self, rollout: str, node: str) -> Phase:
        """Return a node's phase."""
        return self.state.index.target(rollout, node).phase


def with_standby() -> FakeLeadership:
    """Return the leadership of a daemon with a standby."""
    leadership = FakeLeadership(Seat())
    leadership.peers = Peers("first", 1, 0.0, (StandbyDaemon("second", 0, 0.0),))
    return leadership


def settings_of(**changed: Any) -> Settings:
    """Return settings, changed as asked."""
    return Settings.model_validate(SETTINGS | changed)


@asynccontextmanager
async def control_environment(
    tmp_path: Path,
    *,
    store: Callable[[Any], Any] | None = None,
    nodes: Sequence[Node] = NODES,
    names: CachedNameService | None = None,
    group: str | None = None,
    checkpoints: Checkpoints | None = None,
    cleaner: Callable[[State], NodeCleaner] = lambda state: NodeCleaner(
        state, FakeNodeFiles(), FakeCheckpoints(), ()
    ),
    **changed: Any,
) -> AsyncIterator[ControlEnvironment]:
    """Serve a fleet of four nodes, two teams and two racks on a socket.

    With `names`, people are who the kernel says, and `group` may connect.
    """
    settings = settings_of(**changed)
    clock = FakeClock()

    def compile_content(content: Any) -> Any:
        return compile_plan(content, teams=settings.teams)

    opened_store: Store = (
        MemoryStore(compile=compile_content) if store is None else await store(compile_content)
    )
    index = Projection.build(await opened_store.load_snapshot(), compile_limits(settings), compile_content)
    state = State(index, opened_store, clock, settings, ChangeNotifier())
    state.runners = {"local": RunnerStatus(parallel=16)}
    await state.commit([NodesDiscovered(tuple(nodes))], cause="test")
    state.inventory_refreshed.set()
    run_host = FakeRunHost({"site.yml": Script.OK})
    sources = FakeSourceStore(tmp_path / "trees")
    sources.commit(URL, {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n"}, ["main"])
    refreshed: list[int] = []
    people, client = FakeNameService(), Client(tmp_path / "run" / "control.sock", 60.0)

    async def observe(asked: Sequence[str]) -> None:
        await env.observe(asked)

    runner = FakeRunner(run_host)
    check_mode, refresh = CheckMode(state, runner), lambda: refreshed.append(1)

    drift = DriftChecker(state, find_source, check_mode)

    async def do_nothing(*_: Any) -> Any:
        return ""

    async def run_in_memory(content: bytes, limit_s: float) -> list[bytes]:
        return (await answer_text(pickle.loads(content), opened_store)).encode().splitlines()

    audit_monitor = AuditMonitor(state)
    services = Services(
        *(state, runner, check_mode, drift, sources, clock.now(), "0.test", refresh, observe),
        prune_runs=lambda: None,
        verify_audit=audit_monitor.verify,
        compare_anchors=do_nothing,
        accept_inventory=do_nothing,
        pin_identity=do_nothing,
        checkpoints=checkpoints or FakeCheckpoints(),
        cleaner=cleaner(state),
        forecaster=Forecaster(state, run=run_in_memory if store is None else None),
        shell_command=partial(
            shell_command, on_host=settings.shell.host, on_kubernetes=settings.shell.kubernetes
        ),
        leadership=with_standby(),
        step_down=lambda: None,
    )
    path = tmp_path / "run" / "control.sock"
    server = ControlServer(services, path=path, group=group, accounts=names or people)
    env = ControlEnvironment(
        state, clock, people, client, server, run_host, sources, audit_monitor, refreshed, services.kept
    )
    await server.start()
    try:
        env.observe_all_up()
        yield env
    finally:
        await server.stop()
        await opened_store.close()
