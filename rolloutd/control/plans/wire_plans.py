"""Models of the API's responses about plans and configurations."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from rolloutd.control.daemons.wire_daemons import ChosenRunner
from rolloutd.control.nodes.wire_nodes import TaskChange
from rolloutd.control.rollouts import wire
from rolloutd.control.wire_errors import Diagnostic

RecordName = Literal["current", "previous", "invalid"]

DifferenceKind = Literal["new", "same", "changed"]


class Validation(TypedDict):
    """The result of `plan validate`."""

    valid: bool
    errors: list[Diagnostic]


class Submission(TypedDict):
    """The result of `plan submit`; `existing` if the plan has a rollout already.

    `superseded` are the rollouts of the same plan name that were cancelled for this one.
    """

    rollout: str
    digest: str
    state: wire.RolloutState
    existing: bool
    superseded: list[str]


class UploadResponse(TypedDict):
    """The content hash of an uploaded tree."""

    upload: str


class Hashes(TypedDict):
    """The hashes of a plan's three parts, and of the whole: the digest."""

    change: str
    scope: str
    policy: str
    whole: str


class PlanContent(TypedDict):
    """A rollout's plan in canonical form, its pinned source and its hashes."""

    content: dict[str, Any]
    source: wire.Source
    digest: str
    hashes: Hashes


class PreviewTarget(TypedDict):
    """A node that the plan would change; `cannot_start` is why it could not start now."""

    node: str
    team: str | None
    pools: list[str]
    wave: str
    position: int
    runner: ChosenRunner | None
    cannot_start: wire.Reason | None


class PreviewWave(TypedDict):
    """A wave and its nodes, in order."""

    wave: str
    nodes: list[str]
    max_parallel: int | None
    soak_s: float
    gate: str | None


class PreviewPool(TypedDict):
    """A pool of the plan's targets; `members` counts all known nodes."""

    pool: str
    targets: int
    members: int
    max_unavailable: int


class EligibleVoters(TypedDict):
    """Who may vote at a gate: the owners, and the members of each team that owns a target."""

    owner: list[str]
    teams: dict[str, list[str]]


class PreviewRequirement(TypedDict):
    """How many votes a gate wants."""

    owner: int
    each_team: int
    four_eyes: bool


class PreviewGate(TypedDict):
    """A gate and its voters."""

    gate: str
    needs: PreviewRequirement
    answerable_by: EligibleVoters


class PreviewStage(TypedDict):
    """A prepare stage: on how many nodes, and what it sends there.

    `bytes` is null while a build has not made the artifacts, `seconds` at the rate limit null without one.
    """

    stage: str
    kind: str
    nodes: int
    bytes: int | None
    seconds: float | None


class PreviewValue(TypedDict):
    """A value of one target, as people vote for it; of a secret its reference and digest."""

    node: str
    stage: str
    name: str
    value: str


class PlanDuration(TypedDict):
    """How long a plan takes, as `forecast` says: keys as there; `warning`: it takes longer than a month."""

    ends_at: wire.Instants
    work_s: wire.Seconds
    bottleneck: wire.Bottleneck | None
    train: wire.TrainForecast | None
    assumptions: list[wire.AssumptionText]
    warning: str | None


class PreviewTrain(TypedDict):
    """An open rollout that is to change the same nodes: a train with it saves that many outages.

    `joins`: the submit makes that train, because both plans say `train`.  `problem` is why it cannot.
    """

    rollout: str
    nodes_shared: int
    joins: bool
    problem: str | None


class Preview(TypedDict):
    """What a plan would do; `forecast` is null where none was ready in time.

    `trains` are the open rollouts with more than a tenth of their nodes, or of the plan's, in common.
    """

    targets: list[PreviewTarget]
    waves: list[PreviewWave]
    pools: list[PreviewPool]
    prepare: list[PreviewStage]
    values: list[PreviewValue]
    free_joiners: int
    gates: list[PreviewGate]
    traffic_probes: list[str]
    not_probed: list[str]
    not_isolated: list[str]
    source: wire.Source
    digest: str
    hashes: Hashes
    warnings: list[str]
    trains: list[PreviewTrain]
    forecast: PlanDuration | None


class ConfigurationEvidence(TypedDict):
    """The step that failed, and its result."""

    step: str
    text: str


class ConfigurationRecord(TypedDict):
    """A configuration that a rollout gave to a node.

    `content` is the hash of `values`, in which keyed hashes stand for secrets; `change` is
    the hash of what the rollout does; `evidence` is of one that failed.
    """

    content: str
    change: str
    rollout: str
    at: str
    values: dict[str, Any]
    evidence: ConfigurationEvidence | None


class NodeConfiguration(TypedDict):
    """A node's records: what passed last, what passed before it, what failed last."""

    current: ConfigurationRecord | None
    previous: ConfigurationRecord | None
    invalid: ConfigurationRecord | None


class ValueDifference(TypedDict):
    """One value that differs; null where it is absent."""

    name: str
    before: Any
    after: Any


class NodeDifference(TypedDict):
    """The values that differ between two records of a node."""

    node: str
    before: RecordName
    after: RecordName
    differences: list[ValueDifference]


class DifferenceGroup(TypedDict):
    """Nodes for which a plan would change the same values; `new`: they have no record to compare with.

    A long value is cut, as a text.  `not_shown` is the number of differences beyond the limit of the answer.
    """

    nodes: list[str]
    state: DifferenceKind
    differences: list[ValueDifference]
    not_shown: int


class PlanDifferences(TypedDict):
    """What a plan would change for which nodes, the largest group first."""

    groups: list[DifferenceGroup]


Verdict = TypedDict(
    "Verdict",
    {
        "id": str,
        "change": str,
        "class": str,
        "rollout": str,
        "node": str,
        "step": str,
        "text": str,
        "at": str,
    },
)
"""A content that failed on a node, and the class of hosts that does not get it again; `all` is every node."""


class Verdicts(TypedDict):
    """The verdicts that are not cleared, oldest first."""

    verdicts: list[Verdict]


class ClearedVerdict(TypedDict):
    """The verdict that was cleared."""

    id: str


class PlanValue(TypedDict):
    """A value of a plan, as people write it; durations have units."""

    path: str
    value: str


class PlanDifference(TypedDict):
    """A value that differs from the previous rollout's plan; null where that plan has no such value.

    Beyond the limit of the answer, the last one has in `path` how many further ones there are.
    """

    path: str
    before: str | None
    after: str | None


class PlaybookText(TypedDict):
    """A file that the plan runs; `text` is null if it cannot be shown, and `note` says why."""

    path: str
    text: str | None
    note: str | None


class CommandText(TypedDict):
    """A shell command that the plan or a team's own check runs, and its place there."""

    path: str
    text: str


class FileDifference(TypedDict):
    """A file that differs from the previous rollout's source; `diff` is null for one that is not text."""

    path: str
    change: Literal["added", "removed", "changed"]
    diff: str | None


class BlastRadius(TypedDict):
    """What starts once a gate opens: nodes until the next gate, and how many of them at once at most."""

    nodes: int
    teams: list[str]
    at_once: int
    work: wire.Work | None
    traffic_probed: bool


class ApprovalEffect(TypedDict):
    """The missing votes that the caller's approval gives; `refused` is why it would not be accepted."""

    owner: bool
    teams: list[str]
    opens: bool
    refused: str | None


class GateReview(TypedDict):
    """A gate that is not open: what it starts, and what the caller's approval means there."""

    gate: str
    wave: str | None
    blast_radius: BlastRadius
    your_approval: ApprovalEffect


class Review(TypedDict):
    """What to read before a vote; `previous` is the latest approved rollout of this plan and owner.

    `files` are what the playbooks import.  `unseen` names what runs and is not shown, and did not run in
    `previous` either.  `plan` is without defaults, and has the `values` with their targets;
    `plan_differences` and `file_differences` are to `previous`.  `overrides` are the verdicts against which
    the plan was submitted.
    """

    rollout: str
    previous: str | None
    gates: list[GateReview]
    playbooks: list[PlaybookText]
    files: list[PlaybookText]
    commands: list[CommandText]
    unseen: list[str]
    file_differences: list[FileDifference]
    checks: list[str]
    plan: list[PlanValue]
    plan_differences: list[PlanDifference]
    overrides: list[Verdict]


class NodeImpact(TypedDict):
    """A node that would change; `problem` is why there may be more."""

    node: str
    changes: list[TaskChange]
    problem: str | None


class UnknownImpact(TypedDict):
    """A node of which check mode cannot say whether it would change."""

    node: str
    problem: str


class Impact(TypedDict):
    """What check mode says of a plan's targets, as `plan preview --impact --json` shows it."""

    would_change: list[NodeImpact]
    unknown: list[UnknownImpact]
    compliant: list[str]
