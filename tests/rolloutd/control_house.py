"""A daemon's facts with a real control socket before them: real index, real rules, real HTTP.

Nodes move when a test commits what a driver would have committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machines.events import (
    Event,
    GateOpened,
    NodesSeen,
    PhaseMoved,
    StepAction,
    StepRecord,
    StepRecorded,
    StepState,
)
from machines.node import Node, Observation, Sight
from machines.plan import GateName
from machines.projection import Projection
from machines.rollout import Failure
from machines.states import Outcome, Phase, Trigger, edge
from rolloutd.compile import compile_limits, compile_plan
from rolloutd.control.client import Client
from rolloutd.control.identity import Account, NameService
from rolloutd.control.routes import Desk
from rolloutd.control.server import ControlServer
from rolloutd.ports import Store
from rolloutd.settings import Settings
from rolloutd.state import State
from rolloutd.state.feed import Feed
from tests.contracts.twins.clock import FakeClock
from tests.contracts.twins.runner import FakeRunner, FakeWorld, Script
from tests.contracts.twins.sources import FakeSources
from tests.contracts.twins.store import MemoryStore

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

PEOPLE = {
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


class People:
    """This machine's name service, as far as a test needs one: whoever is sitting there now."""

    def __init__(self) -> None:
        self.now = PEOPLE["olga"]

    async def account(self, uid: int) -> Account:
        """Return whoever the test has put there."""
        return self.now


@dataclass(slots=True)
class House:
    """The facts, the clock, and ways to act on them."""

    state: State
    clock: FakeClock
    people: People
    client: Client
    server: ControlServer
    world: FakeWorld
    sources: FakeSources
    refreshed: list[int] = field(default_factory=list)
    observing: bool = False

    async def restart(self) -> None:
        """Forget what a daemon that is started again does not load."""
        limits, settings = self.state.index.limits, self.state.settings
        self.state.index = Projection.build(
            await self.state.store.load(), limits, lambda content: compile_plan(content, teams=settings.teams)
        )
        self.see()

    async def observe(self, nodes: Sequence[str]) -> None:
        """Look at nodes, if the test has given the daemon eyes."""
        if self.observing:
            self.see()

    async def ask(self, who: str, method: str, path: str, *args: Any) -> Any:
        """Ask as somebody; `method` is one of the client's."""
        self.people.now = PEOPLE[who]
        call: Callable[..., Any] = getattr(self.client, method)
        return await asyncio.to_thread(call, path, *args)

    async def lines(self, path: str, count: int | None = None, **query: Any) -> list[dict[str, Any]]:
        """Return lines of a stream: so many, or all until it ends."""

        def read() -> list[dict[str, Any]]:
            found = []
            stream = self.client.stream(path, query)
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
        answer = await self.ask(who, "post", "/v1/plans/submit", body)
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
        return await self.ask(who, "post", f"/v1/rollouts/{rollout}/votes", body)

    def see(self) -> None:
        """Let all nodes be seen up, now."""
        now = self.clock.now()
        self.state.index.observed([Observation(node.name, Sight.UP, now) for node in NODES], now)

    async def move(self, rollout: str, node: str, trigger: Trigger, **more: Any) -> None:
        """Take one edge, as the daemon or a driver would."""
        target = self.state.index.target(rollout, node)
        self.clock.advance(1)
        self.see()
        await self.commit(
            PhaseMoved(
                rollout=rollout,
                node=node,
                trigger=trigger,
                source=target.phase,
                target=edge(trigger, target.phase, more.get("outcome")).target,
                attempt=target.attempt + 1 if trigger is Trigger.ADMITTED else target.attempt,
                at=self.clock.now(),
                **more,
            )
        )

    async def isolate(self, rollout: str, node: str) -> None:
        """Admit a node and isolate it."""
        await self.move(rollout, node, Trigger.ADMITTED)
        await self.commit(StepRecorded(self.step(rollout, node, "isolate.0.command"), isolated=True))
        await self.move(rollout, node, Trigger.ISOLATED)

    async def fail(self, rollout: str, node: str, *, isolated: bool = True) -> None:
        """Bring a node to failed: in its playbook, or before anything isolated it."""
        if self.phase(rollout, node) is Phase.PENDING:
            await (self.isolate(rollout, node) if isolated else self.move(rollout, node, Trigger.ADMITTED))
        target = self.state.index.target(rollout, node)
        failure = Failure(
            f"{node}#{target.attempt}", node, target.attempt, "run.configure", "broken", self.clock.now()
        )
        await self.move(rollout, node, Trigger.FAILED, failure=failure)

    async def finish(self, rollout: str, node: str) -> None:
        """Bring a node to done."""
        await self.isolate(rollout, node)
        await self.move(rollout, node, Trigger.MAINTAINED)
        undone = self.step(rollout, node, "isolate.0.command", StepAction.UNDO)
        checked = self.step(rollout, node, "verify.0.reachable", StepAction.CHECK)
        await self.commit(StepRecorded(checked), StepRecorded(undone, isolated=False))
        await self.move(rollout, node, Trigger.VERIFIED, outcome=Outcome.CHANGED)

    def step(
        self, rollout: str, node: str, name: str, action: StepAction = StepAction.DO, **more: Any
    ) -> StepRecord:
        """Return a step of the node's attempt that went well."""
        now = self.clock.now()
        attempt = self.state.index.target(rollout, node).attempt
        return StepRecord(rollout, node, attempt, name, action, 1, StepState.OK, now, now, **more)

    def phase(self, rollout: str, node: str) -> Phase:
        """Return a node's phase."""
        return self.state.index.target(rollout, node).phase


def settings_of(**changed: Any) -> Settings:
    """Return settings, changed as asked."""
    return Settings.model_validate(SETTINGS | changed)


@asynccontextmanager
async def house(
    tmp_path: Path,
    *,
    store: Callable[[Any], Any] | None = None,
    nodes: Sequence[Node] = NODES,
    names: NameService | None = None,
    group: str | None = None,
    **changed: Any,
) -> AsyncIterator[House]:
    """Serve a fleet of four nodes, two teams and two racks on a socket.

    With `names`, people are who the kernel says, and `group` may connect.
    """
    settings = settings_of(**changed)
    clock = FakeClock()

    def compiled(content: Any) -> Any:
        return compile_plan(content, teams=settings.teams)

    kept: Store = MemoryStore(compile=compiled) if store is None else await store(compiled)
    index = Projection.build(await kept.load(), compile_limits(settings), compiled)
    state = State(index, kept, clock, settings, Feed())
    await state.commit([NodesSeen(tuple(nodes))], cause="test")
    state.refreshed.set()
    world = FakeWorld({"site.yml": Script.OK})
    sources = FakeSources(tmp_path / "trees")
    sources.commit(URL, {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n"}, ["main"])
    refreshed: list[int] = []
    people, client = People(), Client(tmp_path / "run" / "control.sock", 60.0)

    async def observe(asked: Sequence[str]) -> None:
        await inside.observe(asked)

    runner = FakeRunner(world)
    desk = Desk(state, runner, sources, clock.now(), "0.test", lambda: refreshed.append(1), observe)
    path = tmp_path / "run" / "control.sock"
    server = ControlServer(desk, path=path, group=group, names=names or people)
    inside = House(state, clock, people, client, server, world, sources, refreshed)
    await server.start()
    try:
        inside.see()
        yield inside
    finally:
        await server.stop()
        await kept.close()
