"""What happened, told in the journal and under the audit: one of a thing is not several."""

from __future__ import annotations

import pytest

from machines.events import Event, NodesGone, RunsRemoved
from rolloutd.control import sentences
from rolloutd.counting import count
from rolloutd.state import telling


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (NodesGone(("n1",)), "the inventory no longer has 1 node"),
        (NodesGone(("n1", "n2")), "the inventory no longer has 2 nodes"),
        (RunsRemoved("r", 1, 86_400.0, 0.0), "r: output of 1 run is removed, 1d after its end"),
    ],
)
def test_the_journal_tells_one_as_one(event: Event, told: str) -> None:
    assert telling.sentence(event) == told


@pytest.mark.parametrize(("targets", "told"), [(1, "1 target"), (3, "3 targets")])
def test_the_audit_tells_one_as_one(targets: int, told: str) -> None:
    fields = {"name": "somaxconn", "targets": [{}] * targets}
    assert sentences.sentence({"event": "RolloutOpened", "fields": fields}) == f"submitted somaxconn, {told}"


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("was last seen up at 2026-11-21T04:19:29Z", "last seen up"),
        ("has not been observed yet", "not observed yet"),
        ("does not answer: timed out (observed at 2026-11-21T04:19:29Z)", "does not answer: timed out"),
    ],
)
def test_a_last_look_is_told_without_its_instant(why: str, told: str) -> None:
    assert sentences.last_look(why) == told


def test_a_plural_of_its_own() -> None:
    assert count(2, "process", "processes") == "2 processes"
