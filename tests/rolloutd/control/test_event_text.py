"""What happened, told in the journal and under the audit: one of a thing is not several."""

from __future__ import annotations

import pytest

from machines.model.events import Event, NodesRemoved, PreparationRecorded, RunOutputPruned
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import DAEMON
from rolloutd.control import event_text
from rolloutd.engine import transition_log
from rolloutd.text import format_exceptions, pluralize


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (NodesRemoved(("n1",)), "the inventory no longer has 1 node"),
        (NodesRemoved(("n1", "n2")), "the inventory no longer has 2 nodes"),
        (RunOutputPruned("r", 1, 86_400.0, 0.0), "r: output of 1 run is removed, 1d after its end"),
    ],
)
def test_the_journal_tells_one_as_one(event: Event, told: str) -> None:
    assert transition_log.describe_event(event) == told


FAILED_STAGE = "prepare stage one failed in try 2: text; next try at 1970-01-01T00:01:00Z"


@pytest.mark.parametrize(
    ("state", "node", "lines"),
    [
        ("running", "n1", []),
        ("skipped", "n1", [("INFO", "r/n1: prepare stage one skipped: text [test]")]),
        ("disturbed", "n1", []),  # its transition to failed is logged
        ("done", "", []),  # the manifest of the build is logged
        ("failed", "", [("WARNING", f"r: {FAILED_STAGE} [test]")]),
        ("failed", "n1", [("WARNING", f"r/n1: {FAILED_STAGE} [test]")]),
    ],
)
def test_end_of_stage_is_logged(
    state: str, node: str, lines: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rolloutd.transition")
    row = Preparation(
        "r", node, "one", 2, PreparationState(state), "", 0.0, 0.0, text="text", not_before=60.0
    )
    transition_log.log_events([PreparationRecorded(row)], DAEMON, "test")
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == lines
    assert all(getattr(each, "rollout", "") == "r" for each in caplog.records)


@pytest.mark.parametrize(("targets", "told"), [(1, "1 target"), (3, "3 targets")])
def test_the_audit_tells_one_as_one(targets: int, told: str) -> None:
    fields = {"name": "somaxconn", "targets": [{}] * targets}
    assert (
        event_text.describe_event({"event": "RolloutOpened", "fields": fields})
        == f"submitted somaxconn, {told}"
    )


def test_rollback_in_the_audit_says_so() -> None:
    fields = {"source": "failed", "target": "isolating", "attempt": 2, "rolling_back": True, "text": "bad"}
    text = event_text.describe_event({"event": "PhaseMoved", "fields": fields})
    assert text == "failed \u2192 isolating (rollback), attempt 2: bad"


def test_a_plural_of_its_own() -> None:
    assert pluralize(2, "process", "processes") == "2 processes"


def test_rolled_back_nodes_are_not_named_skipped() -> None:
    assert [format_exceptions(*counts) for counts in ((3, 1), (1, 1), (2, 0), (0, 0))] == [
        "2 skipped, 1 rolled back",
        "1 rolled back",
        "2 skipped",
        "",
    ]
