"""JSON shapes of preparation: how far nodes are, and what they remember of prepare stages."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class Prepared(TypedDict):
    """Of `total` nodes `done` have no prepare stage left."""

    done: int
    total: int


class Minutes(TypedDict):
    """Minutes in a slot, and minutes of preparation in service, each of the latest attempts."""

    slot: float
    prepare: float


class ForcedStage(TypedDict):
    """A prepare stage that runs also where it is done: on `nodes`, on all if that is empty."""

    stage: str
    nodes: list[str]


class Preparation(TypedDict):
    """One prepare stage on one node, or a build on its host.

    `content` is the digest of what the stage does there, "" while a build is awaited; `bytes` were sent.
    `seconds` are those of its latest attempt.  A `forced` stage runs also where it is done.
    """

    node: str
    stage: str
    state: Literal["waiting", "running", "done", "skipped", "failed", "disturbed"]
    content: str
    bytes: int
    text: str
    attempt: int
    seconds: float
    forced: bool


class Preparations(TypedDict):
    """The prepare stages of a rollout, by node in the order in which nodes are prepared."""

    rollout: str
    preparations: list[Preparation]


class CarriedArtifact(TypedDict):
    """An artifact that a checkpoint names, with its place on the node."""

    name: str
    version: str
    sha256: str
    path: str


class NodeCheckpoint(TypedDict):
    """A finished prepare stage, as the node remembers it."""

    plan: str
    stage: str
    content: str
    change: str
    rollout: str
    at: str
    artifacts: list[CarriedArtifact]


class NodeCheckpoints(TypedDict):
    """The checkpoints of a node; `text` says why they could not be read."""

    node: str
    text: str
    checkpoints: list[NodeCheckpoint]


class RolloutCheckpoints(TypedDict):
    """The checkpoints that a rollout's plan left on its nodes."""

    rollout: str
    nodes: list[NodeCheckpoints]


class ReportedArtifact(TypedDict):
    """An artifact that nodes should have: `expected` by the manifest, `found` on them ("" for none)."""

    site: str
    name: str
    expected: str
    found: str
    nodes: list[str]


class ArtifactReport(TypedDict):
    """Which digests the nodes of each site carry; `unreadable` nodes did not answer."""

    rollout: str
    artifacts: list[ReportedArtifact]
    unreadable: list[str]
