"""JSON shapes of configurations: records of a node, and differences."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

RecordName = Literal["current", "previous", "invalid"]
DifferenceKind = Literal["new", "same", "changed"]


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
    """Nodes for which a plan would change the same values; `new`: they have no record to compare with."""

    nodes: list[str]
    state: DifferenceKind
    differences: list[ValueDifference]


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
