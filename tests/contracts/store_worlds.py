"""Stores to judge, and events to judge them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from machines.events import Event, PhaseMoved, RolloutOpened, StepAction, StepRecord, StepState
from machines.node import Node
from machines.plan import Digest, GateName, Plan
from machines.rollout import DAEMON, Actor, ActorKind, Failure, Target, Vote
from machines.selector import Selector
from machines.states import Outcome, Phase, Trigger
from rolloutd.ports import Entry, Store
from rolloutd.store import open_store
from tests.contracts.twins.store import Memory, MemoryStore

ALICE = Actor(ActorKind.PERSON, "alice", 1000)
BOB = Actor(ActorKind.PERSON, "bob", 1001)
DIGEST = Digest("change-1", "scope-1", "policy-1", "whole-1")


def plan_of(content: Mapping[str, Any]) -> Plan:
    """Return a plan of which only the name matters to a store."""
    return Plan(content["name"], "infra", Selector(()), (), (), ())


class World(Protocol):
    """One kind of store, and its disk."""

    told: list[int]

    async def open(self) -> Store:
        """Open the store; again means after a restart."""
        ...


class InMemory:
    """The twin."""

    def __init__(self, _: Path) -> None:
        self.told: list[int] = []
        self._memory = Memory()

    async def open(self) -> Store:
        return MemoryStore(compile=plan_of, committed=self._tell, memory=self._memory)

    def _tell(self, entries: tuple[Entry, ...]) -> None:
        self.told.extend(entry.seq for entry in entries)


class OnDisk:
    """SQLite, in its own thread."""

    inline = False

    def __init__(self, state_dir: Path) -> None:
        self.told: list[int] = []
        self._state_dir = state_dir

    async def open(self) -> Store:
        return await open_store(self._state_dir, compile=plan_of, committed=self._tell, inline=self.inline)

    def _tell(self, entries: tuple[Entry, ...]) -> None:
        self.told.extend(entry.seq for entry in entries)


class Inline(OnDisk):
    """SQLite as a simulation runs it: no thread."""

    inline = True


async def write(store: Store, *events: Event, actor: Actor = DAEMON, at: float = 100.0) -> tuple[Entry, ...]:
    """Commit the events as one transaction."""
    return await store.commit(events, actor=actor, cause="test", at=at)


def target(node: str, position: int = 0, rollout: str = "r1", **more: Any) -> Target:
    """Return a pending target."""
    return Target(rollout, node, "payments", ("team/payments", "rack/r1"), "fleet", position, **more)


def opened(
    rollout: str = "r1", nodes: Sequence[str] = ("n1", "n2"), digest: Digest = DIGEST, at: float = 1.0
) -> RolloutOpened:
    """Return a submit of a plan with these targets."""
    targets = tuple(target(node, position, rollout) for position, node in enumerate(nodes))
    content = {"name": f"plan-{rollout}", "nested": {"b": [1, 2.5, None, True], "a": "é"}}
    source = {"kind": "upload", "pin": "0" * 8}
    return RolloutOpened(rollout, content["name"], content, source, digest, "selector-1", ALICE, at, targets)


def moved(node: str, trigger: Trigger, source: Phase, to: Phase, attempt: int = 1, **more: Any) -> PhaseMoved:
    """Return a move in r1; a failure of its own if it leads to failed."""
    at = more.pop("at", 10.0)
    if to is Phase.FAILED and "failure" not in more:
        more["failure"] = Failure(f"{node}#{attempt}", node, attempt, "verify.0", "it is broken", at)
    return PhaseMoved(more.pop("rollout", "r1"), node, trigger, source, to, attempt, at, **more)


def whole_way(node: str, rollout: str = "r1") -> tuple[PhaseMoved, ...]:
    """Return a node's way from pending to done."""
    t, p = Trigger, Phase
    return (
        moved(node, t.ADMITTED, p.PENDING, p.ISOLATING, rollout=rollout),
        moved(node, t.ISOLATED, p.ISOLATING, p.MAINTAINING, rollout=rollout),
        moved(node, t.MAINTAINED, p.MAINTAINING, p.VERIFYING, rollout=rollout),
        moved(node, t.VERIFIED, p.VERIFYING, p.DONE, rollout=rollout, outcome=Outcome.CHANGED),
    )


def step(state: StepState, node: str = "n1", number: int = 1, **more: Any) -> StepRecord:
    """Return a step of r1's first attempt."""
    name, at = more.pop("step", "isolate.0.command"), more.pop("at", 20.0)
    began, attempt = more.pop("began_at", 20.0), more.pop("attempt", 1)
    action = more.pop("action", StepAction.DO)
    return StepRecord("r1", node, attempt, name, action, number, state, at, began, **more)


def vote(name: str = "v1", **more: Any) -> Vote:
    """Return a yes of Alice's."""
    return Vote(name, GateName.START, "whole-1", ALICE, True, "looks good", 5.0, ("infra",), **more)


def node(name: str, **labels: str) -> Node:
    """Return a node of one source."""
    return Node(name, sources=("ansible",), labels=labels)
