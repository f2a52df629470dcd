"""Which runner executes a node's playbooks and changes, and what keeps a runner from work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from machines.model.node import Node
from machines.model.selector import Selector


@dataclass(frozen=True, slots=True)
class RunnerRule:
    """A runner of the settings, and the nodes that it is for; the first rule that matches a node counts.

    `parallel`: how many nodes it may have in flight; None leaves that to its own queue.
    """

    name: str = ""
    match: Selector = field(default_factory=Selector)
    parallel: int | None = None


@dataclass(frozen=True, slots=True)
class RunnerProblem:
    """Why a runner begins nothing: it is full, it is down or refuses, or no rollout has needed it yet.

    `since` is epoch seconds.
    """

    detail: str
    since: float
    is_full: bool = False
    is_unneeded: bool = False


def runner_of(rules: Sequence[RunnerRule], node: Node) -> RunnerRule | None:
    """Return the rule of the runner that executes a node's playbooks; None if there is none.

    The key `kind` of a selector is the node's kind, as in a plan's items.
    """
    labels = {**node.labels, "kind": node.kind.value}
    return next((rule for rule in rules if rule.match.matches(labels)), None)


def part_of_runner(kind: str, part: str) -> str:
    """Return how a problem names what a change's runner cannot reach: a source of nodes, or one node."""
    return f"{kind}@{part}"
