"""How far the nodes of one rollout are prepared, kept by events.

Each pending node that is not prepared has one place: its next stage, and whether it waits, runs or failed
there.  A decision asks for the places of a stage, so its cost does not grow with the fleet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field

from machines.model.node import Node
from machines.model.preparation import (
    CLEANUP,
    MAX_CLEANUP_TRIES,
    PREPARED,
    Preparation,
    PreparationState,
    PrepareKind,
    PrepareStage,
)
from machines.model.rollout import Rollout, Target
from machines.states import Phase

Position = tuple[int, int, str]
"""Order of preparation: the number of the wave, the position in it, the node."""

BUILD_NODE = ""
"""The node of a build's row: it is of the whole rollout."""


@dataclass(slots=True)
class StagePlaces:
    """The pending nodes that wait for this stage, or failed in it; `waiting` in the order of preparation."""

    waiting: list[Position] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RolloutPreparations:
    """The rows of one rollout, and the place of each of its nodes."""

    rollout: Rollout
    rows: dict[tuple[str, str], Preparation] = field(default_factory=dict)
    stages: dict[str, StagePlaces] = field(default_factory=dict)
    active: set[tuple[str, str]] = field(default_factory=set)
    """The (node, stage) that run, whatever became of the node or the rollout meanwhile."""
    _places: dict[str, tuple[str, Position]] = field(default_factory=dict)
    _waves: dict[str, int] = field(default_factory=dict)
    _contents: dict[tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]], str] = field(
        default_factory=dict
    )
    _spent_s: float = 0.0
    _prepared: Counter[str] = field(default_factory=Counter)
    """On how many nodes each stage is done."""

    def __post_init__(self) -> None:
        self._waves = {wave.name: number for number, wave in enumerate(self.rollout.plan.waves)}
        self.stages = {stage.name: StagePlaces() for stage in self.rollout.prepare_stages}

    def copy(self) -> RolloutPreparations:
        """Return preparations of their own: a later change of these does not change them."""
        made = copy(self)
        made.rows, made.active, made._places = self.rows.copy(), self.active.copy(), self._places.copy()
        made._prepared = self._prepared.copy()
        made.stages = {
            name: StagePlaces(each.waiting.copy(), each.failed.copy()) for name, each in self.stages.items()
        }
        return made

    @property
    def unprepared(self) -> int:
        """How many pending nodes have a stage left."""
        return len(self._places)

    def unprepared_after(self, wave: str) -> int:
        """Return how many pending nodes of the waves after this one have a stage left."""
        number = self._waves[wave]
        return sum(position[0] > number for _, position in self._places.values())

    def next_stage(self, node: str) -> str | None:
        """Return the name of the node's next stage, None when it has none."""
        place = self._places.get(node)
        return None if place is None else place[0]

    def build_row(self, stage: PrepareStage) -> Preparation | None:
        return self.rows.get((BUILD_NODE, stage.name))

    def failed_row(self, node: str) -> Preparation | None:
        """Return the row of the stage at which a pending node failed, or with BUILD_NODE that of a build."""
        names = self.stages if node == BUILD_NODE else (self.next_stage(node) or "",)
        rows = (self.rows.get((node, name)) for name in names)
        return next((row for row in rows if row is not None and row.state is PreparationState.FAILED), None)

    def spent_s(self, now: float) -> float:
        """Return the seconds that the latest attempt of each stage took on all nodes together."""
        return self._spent_s + sum(duration_s(self.rows[key], now) for key in self.active)

    def node_spent_s(self, node: str, now: float) -> float:
        """Return the seconds that the latest attempt of each stage took on this node."""
        rows = (self.rows.get((node, name)) for name in self.stages)
        return sum(duration_s(row, now) for row in rows if row is not None)

    def record(self, row: Preparation) -> None:
        replaced = self.rows.get((row.node, row.stage))
        is_active = row.state is PreparationState.RUNNING
        if replaced is not None and (row.node, row.stage) not in self.active:
            self._spent_s -= duration_s(replaced, replaced.at)
        if not is_active:
            self._spent_s += duration_s(row, row.at)
        self._prepared[row.stage] += row.state in PREPARED
        if replaced is not None:
            self._prepared[row.stage] -= replaced.state in PREPARED
        self.rows[row.node, row.stage] = row
        (self.active.add if is_active else self.active.discard)((row.node, row.stage))

    def needs_cleanup(self, node: str) -> bool:
        """Return whether this rollout brought something to the node and has not removed it."""
        cleaned = self.rows.get((node, CLEANUP))
        # A cleanup that keeps failing is given up, or a node that is gone would be asked for ever.
        if cleaned is not None and (
            cleaned.state is PreparationState.DONE or cleaned.attempt >= MAX_CLEANUP_TRIES
        ):
            return False
        rows = (self.rows.get((node, name)) for name in self.stages)
        return any(row is not None and row.state is not PreparationState.SKIPPED for row in rows)

    def is_proven(self, stage: PrepareStage) -> bool:
        """Return whether the stage is done, undisturbed, on one node at least."""
        return self._prepared[stage.name] > 0

    def place(self, target: Target, node: Node | None) -> None:
        """Put a target where it belongs now; it is removed when it is not pending, or prepared."""
        # Taken out by its old place, which the new row may no longer give.
        self.remove(target.node)
        if target.phase is not Phase.PENDING or node is None:
            return
        stage = next((each for each in self.stages_for(node) if not self.is_done(each, node)), None)
        if stage is None:
            return
        position = (self._waves.get(target.wave, len(self._waves)), target.position, target.node)
        self._places[target.node] = (stage.name, position)
        places, row = self.stages[stage.name], self.rows.get((target.node, stage.name))
        if row is not None and row.state is PreparationState.FAILED:
            places.failed.add(target.node)
        elif row is None or row.state is not PreparationState.RUNNING:
            insort(places.waiting, position)

    def remove(self, node: str) -> None:
        place = self._places.pop(node, None)
        if place is None:
            return
        places = self.stages[place[0]]
        places.failed.discard(node)
        # While its stage runs or has failed, the node is not in the queue.
        at = bisect_left(places.waiting, place[1])
        if at < len(places.waiting) and places.waiting[at] == place[1]:
            del places.waiting[at]

    def content(self, stage: PrepareStage, node: Node) -> str:
        """Return the digest of the stage on this node; computed once for the same artifacts."""
        # Nodes with the same artifacts share a digest: over a large manifest it costs milliseconds.
        read = tuple(each.positions_for(node) if each.applies_to(node) else () for each in stage.reads)
        key = (stage.name, stage.positions_for(node), read)
        if key not in self._contents:
            self._contents[key] = stage.content_for(node)
        return self._contents[key]

    def stages_for(self, node: Node) -> Iterable[PrepareStage]:
        """Yield the stages with something to do on this node, in order."""
        for stage in self.rollout.prepare_stages:
            if stage.kind is PrepareKind.BUILD or not stage.applies_to(node):
                continue
            is_awaited = stage.built_by and stage.built_by not in self.rollout.built
            if stage.kind is not PrepareKind.COPY or is_awaited or stage.artifacts_for(node):
                yield stage

    def compared_stages(self, node: Node) -> tuple[PrepareStage, ...]:
        """Return the stages whose artifacts are compared on the node before it takes a slot."""
        return tuple(each for each in self.stages_for(node) if each.is_compared)

    def is_done(self, stage: PrepareStage, node: Node) -> bool:
        row = self.rows.get((node.name, stage.name))
        # A manifest that was built again makes the stage due again, although its row says done.
        return row is not None and row.state in PREPARED and row.content == self.content(stage, node)


def duration_s(row: Preparation, now: float) -> float:
    """Return how long the latest attempt took, or has taken if it runs."""
    return max(0.0, (now if row.state is PreparationState.RUNNING else row.at) - row.began_at)


def preparations_of(
    rollout: Rollout, rows: Iterable[Preparation], targets: Iterable[Target], nodes: Mapping[str, Node]
) -> RolloutPreparations:
    found = RolloutPreparations(rollout)
    for row in rows:
        found.record(row)
    for target in targets:
        found.place(target, nodes.get(target.node))
    return found
