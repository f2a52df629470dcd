"""Sentences for events, in the daemon's log and under the audit."""

from __future__ import annotations

from typing import Any

import pytest

from machines.model.events import (
    ChangeNeeded,
    Event,
    FreezeStarted,
    NodesDiscovered,
    NodesRemoved,
    PhaseMoved,
    PreparationRecorded,
    RolloutOpened,
    RunOutputPruned,
)
from machines.model.node import Node
from machines.model.plan import Digest
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import DAEMON, Actor, ActorKind, Target
from machines.model.windows import Freeze
from machines.states import Phase, Trigger
from rolloutd.engine import transition_log
from rolloutd.ports import AuditEntry
from rolloutd.store.audit_entries import add_sequence_number, draft_entries
from rolloutd.texts import event_text
from rolloutd.texts.formats import format_exceptions, pluralize

ANA = Actor(ActorKind.PERSON, "ana", 1000)


def logged_lines(
    caplog: pytest.LogCaptureFixture, event: Event, actor: Actor = DAEMON
) -> list[tuple[str, str]]:
    """Return the level and the text of the lines that the log has of an event."""
    caplog.set_level("INFO", "rolloutd.engine.transition_log")
    drafts = draft_entries(event, actor=actor, cause="test", at=0.0, digest=None)
    texts = [add_sequence_number(draft, number) for number, draft in enumerate(drafts, 1)]
    transition_log.log_entries(AuditEntry(number, text, "") for number, text in enumerate(texts, 1))
    return [(each.levelname, each.getMessage()) for each in caplog.records]


@pytest.mark.parametrize(
    ("event", "actor", "line"),
    [
        (NodesRemoved(("n1",)), DAEMON, "the inventory no longer has n1"),
        # A pin of an identity is a user's, but this sentence has a subject of its own.
        (NodesDiscovered((Node("n1"),)), ANA, "the inventory has n1"),
        (
            RunOutputPruned("r", 1, 86_400.0, 0.0),
            DAEMON,
            "r: removed the output of 1 run, 1d after the end",
        ),
        (FreezeStarted(Freeze("f1", "all", "sale", "ana", 0.0)), ANA, "ana froze all: sale"),
        (
            PhaseMoved("r", "n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, 1, 0.0),
            DAEMON,
            "r/n1: pending \u2192 isolating (admitted)",
        ),
    ],
)
def test_log_line_is_the_sentence_of_the_audit(
    event: Event, actor: Actor, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert logged_lines(caplog, event, actor) == [("INFO", f"{line} [test]")]


def test_large_event_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    names = tuple(f"n{number}" for number in range(1001))
    targets = tuple(Target("r", name, None, (), "fleet", 0) for name in names)
    digest = Digest("c", "s", "p", "whole")
    submitted = RolloutOpened("r", "somaxconn", {}, {}, digest, "", ANA, 0.0, targets)
    logged_lines(caplog, submitted, ANA)
    assert logged_lines(caplog, NodesRemoved(names)) == [
        ("INFO", "r: ana submitted somaxconn, 1,001 targets [test]"),
        ("INFO", "the inventory no longer has n0, n1, n2 and 998 more [test]"),
    ]


def test_log_leaves_steps_to_the_audit(caplog: pytest.LogCaptureFixture) -> None:
    assert logged_lines(caplog, ChangeNeeded("r", "n1", 0.0, "text")) == []


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
    row = Preparation(
        "r", node, "one", 2, PreparationState(state), "", 0.0, 0.0, text="text", not_before=60.0
    )
    assert logged_lines(caplog, PreparationRecorded(row)) == lines
    assert all(getattr(each, "rollout", "") == "r" for each in caplog.records)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"targets": [{}]}, "1 target"),
        ({"targets": [{}] * 3, "part": 0}, "3 targets"),
        ({"targets": [{}] * 500, "part": 1}, "500 more targets"),
    ],
)
def test_submit_counts_the_targets_of_its_part(fields: dict[str, Any], text: str) -> None:
    entry = {"event": "RolloutOpened", "fields": {"name": "somaxconn", **fields}}
    assert event_text.describe_event(entry) == f"submitted somaxconn, {text}"


@pytest.mark.parametrize(
    ("event", "fields", "text"),
    [
        ("TargetChanged", {"team": None, "pools": []}, "now belongs to no team; pools: none"),
        ("TargetChanged", {"team": "web", "pools": ["a", "b"]}, "now belongs to team web; pools: a, b"),
        ("ChangeNeeded", {"text": ""}, "checked, may need the change"),
        ("ChangeNeeded", {"text": "no answer"}, "checked, may need the change: no answer"),
        (
            "HoldReleased",
            {"source": "slurm", "id": "1", "reason": "done"},
            "released hold slurm/1: done",
        ),
    ],
)
def test_event_with_absent_fields_is_a_sentence(event: str, fields: dict[str, Any], text: str) -> None:
    assert event_text.describe_event({"event": event, "fields": fields}) == text


def test_rollback_transition_is_marked() -> None:
    fields = {"source": "failed", "target": "isolating", "attempt": 2, "rolling_back": True, "text": "bad"}
    text = event_text.describe_event({"event": "PhaseMoved", "fields": fields})
    assert text == "failed \u2192 isolating (rollback), attempt 2: bad"


def test_irregular_plural_is_used() -> None:
    assert pluralize(2, "process", "processes") == "2 processes"


def test_rolled_back_nodes_are_not_named_skipped() -> None:
    assert [format_exceptions(*counts) for counts in ((3, 1), (1, 1), (2, 0), (0, 0))] == [
        "2 skipped, 1 rolled back",
        "1 rolled back",
        "2 skipped",
        "",
    ]


@pytest.mark.parametrize(
    ("action", "step", "text"),
    [
        ("run", "run.configure", "run: configure begun"),
        ("apply", "isolate.0.command", "apply isolate: command begun"),
        ("check", "verify.1.ssh", "check verify: ssh begun"),
    ],
)
def test_step_names_its_action_once(action: str, step: str, text: str) -> None:
    fields = {"action": action, "step": step, "state": "intended", "text": ""}
    entry = {"event": "StepRecorded", "node": None, "rollout": None, "fields": fields}
    assert event_text.describe_entry(entry).endswith(text)
