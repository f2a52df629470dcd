"""Which runner a node has, and what its absence keeps from starting: before any slot of a pool is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from machines.facts.projection import Projection
from machines.model.decision import Admit
from machines.model.limits import Limits, RunnerProblem, RunnerRule, runner_of
from machines.model.node import Node, NodeHealth, Observation
from machines.model.reasons import ReasonCode
from machines.model.selector import Selector, parse_selector
from machines.scheduler.decide import decide
from machines.states import Outcome, Trigger
from tests.machines.builders import T0, admit, index_of, nodes_of, observed_up, reason_of, submit, transition

LOCAL_RULE = RunnerRule("local")
FRA = RunnerRule("fra", parse_selector("site=fra"))
NODES = nodes_of({"a": ["n1", "n2"], "b": ["n3"], "c": ["n4"]}, site={"n1": "fra", "n2": "fra", "n3": "fra"})


def fleet(*rules: RunnerRule) -> Projection:
    """Return an open rollout over n1 and n2 of team a, n3 and n4; n1 to n3 are in Frankfurt."""
    index = index_of(NODES, limits=Limits(runners=rules))
    index.record_observations(observed_up(NODES, T0), T0)
    submit(index, max_parallel=9)
    return index


def starts(index: Projection) -> list[str]:
    return [each.node for each in decide(index, T0).of(Admit)]


@pytest.mark.parametrize(
    ("labels", "name"),
    [({"site": "fra"}, "fra"), ({"site": "ams"}, "local"), ({}, "local")],
)
def test_first_matching_runner_counts(labels: dict[str, str], name: str) -> None:
    rule = runner_of((FRA, LOCAL_RULE), Node("n", labels=labels))
    assert rule is not None
    assert rule.name == name


def test_kind_of_node_chooses_runner() -> None:
    rules = (RunnerRule("fra", parse_selector("kind=kubernetes")), LOCAL_RULE)
    assert runner_of(rules, Node("n", labels={"kind": "kubernetes"})) == LOCAL_RULE


def test_node_without_runner_waits() -> None:
    index = fleet(FRA)
    assert starts(index) == ["n1", "n3"]
    assert reason_of(index, "R", "n4", T0).code is ReasonCode.NO_RUNNER


def test_runner_down_takes_no_slot() -> None:
    index = fleet(FRA, LOCAL_RULE)
    index.record_runner_problems({"fra": RunnerProblem("no answer", T0 - 5.0)})
    assert starts(index) == ["n4"]
    reason = reason_of(index, "R", "n1", T0)
    assert (reason.code, reason.since) == (ReasonCode.RUNNER_DOWN, T0 - 5.0)
    assert reason.params == {"runner": "fra", "match": "site=fra", "detail": "no answer"}
    index.record_runner_problems({})
    assert starts(index) == ["n1", "n3", "n4"]


def test_runner_that_refuses_as_full_is_runner_full() -> None:
    index = fleet(FRA, LOCAL_RULE)
    index.record_runner_problems({"fra": RunnerProblem("quota exceeded", T0, is_full=True)})
    assert reason_of(index, "R", "n1", T0).code is ReasonCode.RUNNER_FULL


def test_decision_starts_no_more_than_runner_takes() -> None:
    index = fleet(RunnerRule("fra", FRA.match, parallel=1), LOCAL_RULE)
    assert starts(index) == ["n1", "n4"]
    admit(index, "n1")
    assert starts(index) == ["n4"]
    reason = reason_of(index, "R", "n3", T0)
    assert reason.code is ReasonCode.RUNNER_FULL
    assert reason.params == {"runner": "fra", "match": "site=fra", "active": 1, "parallel": 1}


def test_next_node_starts_when_runner_has_room() -> None:
    index = fleet(RunnerRule("fra", FRA.match, parallel=1), LOCAL_RULE)
    admit(index, "n1")
    index.record_backoffs(decide(index, T0).backoffs)
    transition(index, "n1", Trigger.ISOLATION_ABORTED)
    assert "n1" in starts(index)
    admit(index, "n1")
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, "n1", trigger)
    index.record_backoffs(decide(index, T0).backoffs)
    assert starts(index) == ["n4"]
    transition(index, "n1", Trigger.VERIFIED, Outcome.CHANGED)
    # Of another team, so only the runner is what it waited for.
    index.record_observations([Observation("n2", NodeHealth.DOWN, T0 + 1.0)], T0 + 1.0)
    assert starts(index) == ["n3", "n4"]


def test_label_that_moves_node_to_other_runner_lets_it_start() -> None:
    index = fleet(FRA, LOCAL_RULE)
    index.record_runner_problems({"fra": RunnerProblem("no answer", T0)})
    assert "n3" not in starts(index)
    index.record_backoffs(decide(index, T0).backoffs)
    moved = index.fork()
    moved._write_node(Node("n3", labels={"team": "b", "site": "ams"}))
    assert "n3" in starts(moved)


class CountingSelector(Selector):
    """A selector that counts how often it is asked."""

    asked: ClassVar[list[None]] = []

    def matches(self, labels: Mapping[str, str]) -> bool:
        self.asked.append(None)
        return super().matches(labels)


def test_full_runner_costs_little_for_each_node() -> None:
    nodes = nodes_of({f"t{number}": [f"n{number}"] for number in range(60)})
    index = index_of(nodes, limits=Limits(runners=(RunnerRule("fra", CountingSelector(), parallel=20),)))
    index.record_observations(observed_up(nodes, T0), T0)
    submit(index, max_parallel=60)
    for node in starts(index):
        admit(index, node)
    CountingSelector.asked.clear()
    assert starts(index) == []
    assert index.in_flight() == 20
    assert len(CountingSelector.asked) <= 3 * len(nodes)


def test_node_in_flight_counts_at_runner_of_its_labels() -> None:
    index = fleet(RunnerRule("fra", FRA.match, parallel=1), LOCAL_RULE)
    admit(index, "n1")
    assert starts(index) == ["n4"]
    index.record_backoffs(decide(index, T0).backoffs)
    index._write_node(Node("n1", labels={"team": "a", "site": "ams"}))
    assert starts(index) == ["n3", "n4"]
    index.update_limits(Limits(runners=(RunnerRule("fra", FRA.match), RunnerRule("local", parallel=1))))
    assert starts(index) == ["n3"]
