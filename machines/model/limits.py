"""Limits of the settings, which every plan obeys, and its runners, with what keeps one from work.

A plan can add pool keys for its own rollout, with a budget of 1, and can widen nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from machines.model.node import Node
from machines.model.selector import Selector
from machines.model.windows import Window

DEFAULT_OBSERVATION_MAX_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class Budget:
    """How many of a pool's nodes may be down: a number, or a percentage of its members.

    A percentage is rounded down and at least 1; 0 closes the pool.
    """

    count: int | None = 1
    percent: int | None = None

    def resolve(self, member_count: int) -> int:
        if self.percent is None:
            return self.count if self.count is not None else 1
        # A small pool must be maintainable too: 10 % of five nodes is one node, not none.
        return max(1, member_count * self.percent // 100) if self.percent > 0 else 0


@dataclass(frozen=True, slots=True)
class PoolRule:
    """The budget of all pools of one key, and of the values that differ."""

    default: Budget = Budget(1)
    values: Mapping[str, Budget] = field(default_factory=dict)

    def budget_for(self, value: str) -> Budget:
        return self.values.get(value, self.default)


@dataclass(frozen=True, slots=True)
class DiskShortage:
    """Too little space is free for the files of a run; `since` is when that began (epoch seconds)."""

    free_bytes: int
    needed_bytes: int
    since: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rollout's decision broke an invariant or met another row; `until`: the next try (epoch seconds)."""

    problem: str
    until: float


@dataclass(frozen=True, slots=True)
class TeamRules:
    """A team's own rules; they only tighten the settings.

    Without windows the team adds no limit; its canaries are added to those of the settings.
    """

    team: str
    windows: tuple[Window, ...] = ()
    canaries: tuple[str, ...] = ()


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


class RunnerQueue(Protocol):
    """The runs of one runner: `parallel` bounds the active ones; `waiting` says by node since when.

    `problem` is why it begins nothing, None while it is available.
    """

    @property
    def parallel(self) -> int: ...
    @property
    def active(self) -> int: ...
    @property
    def waiting(self) -> Mapping[str, float]: ...
    @property
    def problem(self) -> RunnerProblem | None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the settings say about pools, windows and the whole fleet.

    `teams`: the teams of the settings, the only ones that can vote; None if unknown.  `runners` in the order
    in which a node is matched.  `workers`: how many nodes of a source may be in
    flight with changes.
    """

    pools: Mapping[str, PoolRule] = field(default_factory=lambda: {"team": PoolRule()})
    max_parallel: int = 64
    observe_within_s: float = DEFAULT_OBSERVATION_MAX_AGE_S
    team_windows: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    observe_only: bool = False
    teams: frozenset[str] | None = None
    runners: tuple[RunnerRule, ...] = (RunnerRule(),)
    workers: Mapping[str, int] = field(default_factory=dict)


def runner_of(rules: Sequence[RunnerRule], node: Node) -> RunnerRule | None:
    """Return the rule of the runner that executes a node's playbooks; None if there is none.

    The key `kind` of a selector is the node's kind, as in a plan's items.
    """
    labels = {**node.labels, "kind": node.kind.value}
    return next((rule for rule in rules if rule.match.matches(labels)), None)


def part_of_runner(kind: str, part: str) -> str:
    """Return how a problem names what a change's runner cannot reach: a source of nodes, or one node."""
    return f"{kind}@{part}"
