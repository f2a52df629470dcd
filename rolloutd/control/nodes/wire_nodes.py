"""Models of the API's responses about the nodes of rollouts."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rolloutd.control.daemons.wire_daemons import ChosenRunner
from rolloutd.control.rollouts.wire import Minutes, Reason


class Node(TypedDict):
    """A node of a rollout, as `nodes` shows it.

    `runner` executes its run now; null without a run, and where one runner executes all of them.
    """

    node: str
    team: str | None
    pools: list[str]
    phase: str
    wave: str
    outcome: str | None
    attempt: int
    isolated: bool
    since: str | None
    step: str | None
    percent: float | None
    runner: str | None
    reason: Reason | None
    admitted_at: str | None
    minutes: Minutes


class Nodes(TypedDict):
    """A rollout's nodes in their order, as of audit entry `seq`.

    `next` is the `after` of the next page, null at the end.
    """

    nodes: list[Node]
    seq: int
    next: str | None


class Failure(TypedDict):
    """The step that failed, and its message; `code` is the sort of failure."""

    id: str
    node: str
    attempt: int
    step: str
    message: str
    at: str
    code: str


class Failures(TypedDict):
    """The unresolved failures that an approval at `proceed` may cover, and how many are left out."""

    failures: list[Failure]
    omitted: int


class Step(TypedDict):
    """One step of an attempt; `output` is null if it belongs to another team."""

    attempt: int
    step: str
    action: str
    number: int
    state: str
    began_at: str
    at: str
    text: str
    output: str | None


class NodeDetail(Node):
    """A node of a rollout, with every step of every attempt."""

    steps: list[Step]
    failure: Failure | None


class NodeReason(TypedDict):
    """Why a node does not move; `reason` is null if it moves or is done.

    `trouble` is the daemon's own, such as a full disk; null when there is none.  `runner` is null if no
    runner is for the node.  `is_selected` is false if its labels no longer match the plan's targets.
    """

    node: str
    phase: str
    outcome: str | None
    isolated: bool
    is_selected: bool
    reason: Reason | None
    runner: ChosenRunner | None
    trouble: str | None


class LogLine(TypedDict):
    """One line of a node's log; `offset` is where the next line begins."""

    offset: int
    at: str
    kind: str
    text: str
    attempt: NotRequired[int]
    step: NotRequired[str]
    fields: NotRequired[dict[str, Any]]


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


class ComparedNode(TypedDict):
    """A node against the canaries: its seconds so far, its changed tasks, and what is unlike them.

    `time` is `slower` or `faster` than all canaries by half or more; `changed_tasks` is null without a log.
    `extra_tasks` changed on no canary, `missing_tasks` on every canary and not here.
    """

    node: str
    wave: str
    phase: str
    seconds: float
    time: Literal["usual", "slower", "faster"]
    changed_tasks: list[str] | None
    extra_tasks: list[str]
    missing_tasks: list[str]


class Comparison(TypedDict):
    """The canaries' times and changed tasks, and the nodes of now against them, outliers first."""

    rollout: str
    canary_wave: str
    canaries: list[ComparedNode]
    low_s: float | None
    high_s: float | None
    nodes: list[ComparedNode]
    omitted: int


class LeftFile(TypedDict):
    """A fence, guard, checkpoint or artifact on a node; `found` would be removed, `reason` is why it is kept.

    With `what: node` the node as a whole is not clean.
    """

    node: str
    what: str
    path: str
    result: Literal["removed", "kept", "found"]
    reason: str | None


class CleanLine(TypedDict):
    """What ended rollouts left on one node, or a heartbeat."""

    kind: Literal["node", "heartbeat"]
    node: NotRequired[str]
    files: NotRequired[list[LeftFile]]


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


class TaskChange(TypedDict):
    """A task that would change a node; `diff` is the changed lines, if the task reports them."""

    task: str
    diff: str | None


class ImpactLine(TypedDict):
    """What check mode says of one target, or a heartbeat; `problem` is what it cannot say, and why."""

    kind: Literal["node", "heartbeat"]
    node: NotRequired[str]
    compliance: NotRequired[Literal["compliant", "would-change", "unknown"]]
    changes: NotRequired[list[TaskChange]]
    problem: NotRequired[str | None]
