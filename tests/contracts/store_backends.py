"""Stores to judge, and events to judge them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from machines.model.events import Event, PhaseMoved, RolloutOpened
from machines.model.node import Node
from machines.model.plan import Digest, GateName, Plan
from machines.model.rollout import DAEMON, Actor, ActorKind, Failure, FailureCode, Target, Vote
from machines.model.selector import Selector
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Outcome, Phase, Trigger
from rolloutd.ports import AuditEntry
from rolloutd.store import Store, open_store
from tests.contracts.fakes.store import MemoryState, MemoryStore
from tests.support.postgresql import Postgresql

ALICE = Actor(ActorKind.PERSON, "alice", 1000)
BOB = Actor(ActorKind.PERSON, "bob", 1001)
DIGEST = Digest("change-1", "scope-1", "policy-1", "whole-1")


def plan_of(content: Mapping[str, Any]) -> Plan:
    """Return a plan of which only the name matters to a store."""
    return Plan(content["name"], "infra", Selector(()), (), (), ())


class StoreBackend(Protocol):
    """One kind of store, and its disk."""

    committed_seqs: list[int]
    first_epoch: int
    removes_entries: bool

    async def open(self) -> Store:
        """Open the store; again means after a restart."""
        ...


class MemoryBackend:
    """The fake."""

    first_epoch = 1
    removes_entries = True

    def __init__(self, _: Path) -> None:
        self.committed_seqs: list[int] = []
        self._memory = MemoryState()

    async def open(self) -> Store:
        return MemoryStore(compile=plan_of, committed=self._on_commit, memory=self._memory)

    def _on_commit(self, entries: tuple[AuditEntry, ...]) -> None:
        self.committed_seqs.extend(entry.seq for entry in entries)


class SqliteBackend:
    """SQLite, in its own thread."""

    first_epoch = 1
    removes_entries = True
    inline = False

    def __init__(self, state_dir: Path) -> None:
        self.committed_seqs: list[int] = []
        self._state_dir = state_dir

    async def open(self) -> Store:
        return await open_store(
            self._state_dir, compile_plan=plan_of, on_commit=self._on_commit, inline=self.inline
        )

    def _on_commit(self, entries: tuple[AuditEntry, ...]) -> None:
        self.committed_seqs.extend(entry.seq for entry in entries)


class InlineSqliteBackend(SqliteBackend):
    """SQLite as a simulation runs it: no thread."""

    inline = True


class PostgresqlBackend:
    """A real PostgreSQL, each session in its own thread."""

    first_epoch = 1 << 32  # of the first timeline
    removes_entries = False  # the daemon's role has no right to
    inline = False

    def __init__(self, state_dir: Path, server: Postgresql) -> None:
        self.committed_seqs: list[int] = []
        self.state_dir = state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        self.server = server
        self.database = server.emptied_database()

    async def open(self) -> Store:
        return await open_store(
            self.state_dir,
            self.server.address(self.database),
            compile_plan=plan_of,
            on_commit=self._on_commit,
            inline=self.inline,
        )

    def _on_commit(self, entries: tuple[AuditEntry, ...]) -> None:
        self.committed_seqs.extend(entry.seq for entry in entries)


BACKENDS = (
    MemoryBackend,
    SqliteBackend,
    InlineSqliteBackend,
    pytest.param(PostgresqlBackend, marks=pytest.mark.servers("postgresql")),
)
"""Parameters of a fixture that make_backend() makes a store of."""


def make_backend(request: pytest.FixtureRequest, state_dir: Path) -> StoreBackend:
    kind = request.param
    more = (request.getfixturevalue("postgresql"),) if kind is PostgresqlBackend else ()
    backend: StoreBackend = kind(state_dir, *more)
    return backend


async def write(
    store: Store, *events: Event, actor: Actor = DAEMON, at: float = 100.0
) -> tuple[AuditEntry, ...]:
    """Commit the events as one transaction."""
    return await store.commit(events, actor=actor, cause="test", at=at)


def target(node: str, position: int = 0, rollout: str = "r1", **more: Any) -> Target:
    """Return a pending target."""
    return Target(rollout, node, "payments", ("team/payments", "rack/r1"), "fleet", position, **more)


def rollout_opened(
    rollout: str = "r1", nodes: Sequence[str] = ("n1", "n2"), digest: Digest = DIGEST, at: float = 1.0
) -> RolloutOpened:
    """Return a submit of a plan with these targets."""
    targets = tuple(target(node, position, rollout) for position, node in enumerate(nodes))
    content = {"name": f"plan-{rollout}", "nested": {"b": [1, 2.5, None, True], "a": "é"}}
    source = {"kind": "upload", "pin": "0" * 8}
    return RolloutOpened(rollout, content["name"], content, source, digest, "selector-1", ALICE, at, targets)


def phase_moved(
    node: str, trigger: Trigger, source: Phase, to: Phase, attempt: int = 1, **more: Any
) -> PhaseMoved:
    """Return a move in r1; a failure of its own if it leads to failed."""
    at = more.pop("at", 10.0)
    if to is Phase.FAILED and "failure" not in more:
        code = FailureCode.UNKNOWN
        more["failure"] = Failure(f"{node}#{attempt}", node, attempt, "verify.0", "it is broken", at, code)
    return PhaseMoved(more.pop("rollout", "r1"), node, trigger, source, to, attempt, at, **more)


def moves_to_done(node: str, rollout: str = "r1") -> tuple[PhaseMoved, ...]:
    """Return a node's way from pending to done."""
    t, p = Trigger, Phase
    return (
        phase_moved(node, t.ADMITTED, p.PENDING, p.ISOLATING, rollout=rollout),
        phase_moved(node, t.ISOLATED, p.ISOLATING, p.MAINTAINING, rollout=rollout),
        phase_moved(node, t.MAINTAINED, p.MAINTAINING, p.VERIFYING, rollout=rollout),
        phase_moved(node, t.VERIFIED, p.VERIFYING, p.DONE, rollout=rollout, outcome=Outcome.CHANGED),
    )


def step(state: StepState, node: str = "n1", number: int = 1, **more: Any) -> StepRecord:
    """Return a step of r1's first attempt."""
    name, at = more.pop("step", "isolate.0.command"), more.pop("at", 20.0)
    began, attempt = more.pop("began_at", 20.0), more.pop("attempt", 1)
    action = more.pop("action", StepAction.APPLY)
    return StepRecord("r1", node, attempt, name, action, number, state, at, began, **more)


def vote(name: str = "v1", **more: Any) -> Vote:
    """Return a yes of Alice's."""
    return Vote(name, GateName.START, "whole-1", ALICE, True, "looks good", 5.0, ("infra",), **more)


def node(name: str, **labels: str) -> Node:
    """Return a node of one source."""
    return Node(name, sources=("ansible",), labels=labels)
