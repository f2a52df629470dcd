"""Answers of a daemon to the command line, and a way to run a command."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rolloutd.cli.main import main

REASON = {
    "code": "node-failed",
    "text": "n3 failed while maintaining",
    "since": "2026-11-20T08:00:00Z",
    "lifted_by": "a proceed vote",
    "subject": "n3",
    "params": {},
    "remedy": None,
}
GATE = {
    "gate": "proceed",
    "wave": "fleet",
    "team": None,
    "state": "waiting",
    "needs": {"owner": {"want": 1, "have": 0}, "teams": [], "four_eyes": False},
    "votes": [],
    "missing": "1 vote of infra",
    "digest": "f" * 64,
    "evidence": None,
    "waived": None,
    "prepared": None,
}
ROLLOUT: dict[str, Any] = {
    "rollout": "somaxconn-abcde",
    "plan": "somaxconn",
    "owner": "infra",
    "digest": "f" * 64,
    "state": "paused",
    "wave": "fleet",
    "percent": 58.4,
    "total": 12,
    "done": 7,
    "failed": 1,
    "skipped": 0,
    "rolled_back": 0,
    "pending": 3,
    "in_flight": [
        {
            "node": "n9",
            "pools": ["team/media"],
            "phase": "verifying",
            "step": "verify.1.ssh",
            "percent": 40.0,
            "task": None,
            "since": "2026-11-20T08:00:00Z",
        }
    ],
    "pools": [
        {
            "pool": "team/media",
            "total": 3,
            "done": 2,
            "failed": 0,
            "skipped": 0,
            "rolled_back": 0,
            "in_flight": 1,
            "down": 3,
            "unobserved": 2,
            "max_unavailable": 1,
        }
    ],
    "gates": [GATE],
    "reason": REASON,
    "work": {"low_s": 240.0, "high_s": 380.0},
    "votes_missing": 2,
    "eta": None,
    "forecast": None,
    "submitted_by": "alice",
    "submitted_at": "2026-11-20T07:00:00Z",
    "source": {"text": "commit 3f2a9c1d4b5e, tag v1.4.2 of https://git.example/x.git"},
    "traffic_probes": [],
    "not_probed": ["client traffic"],
    "not_isolated": [],
    "prepared": None,
    "forced_stages": [],
    "train": None,
    "minutes": {"slot": 0.0, "prepare": 0.0},
}


def failure_of(node: str) -> dict[str, Any]:
    """Return the first failure of a node."""
    at = "2026-11-20T08:00:00Z"
    return {
        "id": f"{node}#1",
        "node": node,
        "attempt": 1,
        "step": "verify.0",
        "message": "no answer",
        "at": at,
        "code": "failed",
    }


Run = tuple[int, str, str]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Run:
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    told = capsys.readouterr()
    return code, told.out, told.err


def change_of(plan: str, change: str, version: str, **states: str) -> Any:
    """Return a change as the API answers it, with the state of each node."""
    counts = Counter(states.values())
    return {
        "plan": plan,
        "change": change * 16,
        "version": version,
        "pin": version + "-whole",
        "rollouts": [f"{plan}-{change}"],
        "percent": 50.0,
        "counts": counts,
        "nodes": [{"node": node, "state": state} for node, state in states.items()],
        "groups": [{"group": "team/a", "total": 2, "done": 1, "percent": 50.0}],
        "never": [node for node, state in states.items() if state == "never"],
    }
