"""Verdicts: contents that failed on a class of hosts, so that the same mistake is not rolled out twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """A content that failed on a node, and the evidence; it holds for all hosts of the node's class.

    `change` is the hash of what the rollout did, `content` that of what its run gave to the node.
    `host_class` has the labels of the class, "" for one that the node lacks; without any it is all nodes.
    """

    id: str
    change: str
    content: str
    host_class: Mapping[str, str]
    rollout: str
    node: str
    step: str
    text: str
    at: float
