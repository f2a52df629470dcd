"""The HTML page of a rollout: what it shows, and what it must not do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rolloutd.cli.report import CHART_WIDTH, MAX_BARS, Timeline, render_rollout
from rolloutd.control.client import Client
from tests.rolloutd.canned_daemon import CannedDaemon, serve_canned
from tests.rolloutd.cli.samples import ROLLOUT, change_of

ROLLOUT_ID = ROLLOUT["rollout"]


def entry(at: float, event: str, node: str | None = None, **fields: Any) -> dict[str, Any]:
    actor = {"name": "<b>alice</b>"}
    return {"at": at, "event": event, "node": node, "actor": actor, "rollout": ROLLOUT_ID, "fields": fields}


def moved(at: float, node: str, source: str, target: str, **fields: Any) -> dict[str, Any]:
    return entry(at, "PhaseMoved", node, source=source, target=target, **fields)


ENTRIES = [
    entry(100.0, "RolloutOpened", name="somaxconn", targets=[{}] * 2),
    entry(110.0, "GateOpened", gate="start", wave=""),
    moved(120.0, "n1", "pending", "isolating"),
    moved(130.0, "n1", "isolating", "maintaining"),
    moved(140.0, "n1", "maintaining", "failed", failure={"step": "run.configure", "message": "<script>"}),
    entry(200.0, "RolloutPaused", reason="lunch"),
]

CHANGES = [
    change_of("cni", "5", "1.16", n1="done", n9="done"),
    change_of("elsewhere", "6", "9", n1="never", n9="done"),
    change_of("somaxconn", "4", "v1.4.2", n1="failed", n9="done"),
    change_of("somaxconn", "3", "v1.4.1", n1="done", n9="replaced"),
]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CannedDaemon]:
    with serve_canned(tmp_path / "s") as daemon:
        node = {"node": "n1", "team": "web", "phase": "failed", "outcome": None, "reason": None}
        train = {
            "name": "week",
            "rollouts": ["kernel-x", ROLLOUT_ID],
            "state": "active",
            "missing": [],
            "outages_saved": 5,
        }
        shown = {**ROLLOUT, "prepared": {"done": 6, "total": 12}, "train": train}
        daemon.answer("GET", f"rollouts/{ROLLOUT_ID}", shown)
        daemon.answer("GET", f"rollouts/{ROLLOUT_ID}/nodes", {"nodes": [{**node, "since": None}]})
        source = {"kind": "git", "pin": "abc"}
        daemon.answer("GET", f"rollouts/{ROLLOUT_ID}/plan", {"source": source, "content": {}, "digest": "d"})
        entries = [{"seq": seq, "hash": "", "entry": each} for seq, each in enumerate(ENTRIES)]
        daemon.answer("GET", "audit", {"entries": entries, "next": None})
        daemon.answer("GET", "audit/head", {"seq": 6, "hash": "f" * 64, "at": None})
        daemon.answer("GET", "changes", {"changes": CHANGES})
        daemon.answer("GET", "status", {"rollouts": [ROLLOUT], "trouble": None})
        yield daemon


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_says_what_who_why_and_how_far(daemon: CannedDaemon) -> None:
    page = Page(render_rollout(Client(daemon.socket), ROLLOUT_ID))
    text = " ".join(page.text.split())
    for words in (
        "paused: n3 failed while maintaining",
        "58 %: 7 of 12 nodes changed",
        "6 of 12 nodes prepared.",
        "in one outage with the other rollouts of train week (active): 2 of 2, 5 outages saved.",
        "ends in 4m to 6m20s, 2 votes left.",
        "proceed after fleet is waiting: 1 vote of infra",
        "Not probed: client traffic.",
        "Source: commit 3f2a9c1d4b5e, tag v1.4.2 of https://git.example/x.git",
        "<script> (while being changed)",
        "failed; a person must decide",
        "paused the rollout: lunch",
        f"Audit entry 6, hash {'f' * 64}",
    ):
        assert words in text


def test_large_rollout_shows_versions_of_its_plan(
    daemon: CannedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutd.cli.report.MAX_NODES_OF_ALL_PLANS", 0)
    render_rollout(Client(daemon.socket), ROLLOUT_ID)
    assert [query for _, path, query, _ in daemon.requests if path.endswith("/changes")] == [
        {"plan": "somaxconn"}
    ]


def test_nodes_have_versions_of_all_plans(daemon: CannedDaemon) -> None:
    page = Page(render_rollout(Client(daemon.socket), ROLLOUT_ID))
    nodes = " ".join(page.text.partition("Nodes")[2].split())
    assert "Since somaxconn v1.4.2 cni 1.16 n1" in nodes, "the own plan first, no plan of other nodes"
    assert "failed, from v1.4.1 1.16" in nodes
    assert "failed: rolloutctl why ROLLOUT NODE" in nodes
    assert ("span", {"title": "v1.4.2-whole"}) in page.tags


def test_page_loads_nothing_and_runs_nothing(daemon: CannedDaemon) -> None:
    text = render_rollout(Client(daemon.socket), ROLLOUT_ID)
    page = Page(text)
    assert {"script", "link", "img", "iframe"}.isdisjoint(tag for tag, _ in page.tags)
    assert not [attributes for _, attributes in page.tags if attributes.keys() & {"src", "href", "onload"}]
    without_source = text.replace(ROLLOUT["source"]["text"], "")
    assert not re.search(r"url\(|https?:|@import", without_source)
    assert "<b>alice</b>" in page.text, "what people and nodes write is text, not HTML"


def test_page_is_readable_without_colours_and_eyes(daemon: CannedDaemon) -> None:
    tags = Page(render_rollout(Client(daemon.socket), ROLLOUT_ID)).tags
    assert ("html", {"lang": "en"}) in tags
    assert all(attributes.get("scope") for tag, attributes in tags if tag == "th")
    assert all(attributes.get("aria-label") for tag, attributes in tags if tag == "svg")
    assert any(attributes.get("name") == "viewport" for _, attributes in tags)


def test_timeline_has_phases_as_bars_and_gates_as_marks() -> None:
    timeline = Timeline.from_entries(ENTRIES, [])
    assert [(bar.phase, bar.x, bar.width) for bar in timeline.rows["n1"]] == [
        ("isolating", 200.0, 100.0),
        ("maintaining", 300.0, 100.0),
        ("failed", 400.0, CHART_WIDTH - 400.0),
    ]
    assert timeline.marks == [(100.0, "start")]


def test_large_timeline_shows_failed_nodes_first() -> None:
    names = [f"n{number}" for number in range(MAX_BARS + 50)]
    entries = [moved(float(at), node, "pending", "isolating") for at, node in enumerate(names)]
    failed: Any = [{"node": names[-1], "phase": "failed"}]
    timeline = Timeline.from_entries(entries, failed)
    assert (len(timeline.rows), timeline.hidden, next(iter(timeline.rows))) == (MAX_BARS, 50, names[-1])
