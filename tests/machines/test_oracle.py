"""The oracle's own rules, where the log of a fleet seldom leads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracle import check_log

TRAIN = ("first", "second")


def begin(rollout: str) -> dict[str, Any]:
    return {"kind": "begin", "rollout": rollout, "node": "n1"}


def fail(rollout: str) -> dict[str, Any]:
    return {
        "kind": "fail",
        "rollout": rollout,
        "node": "n1",
        "code": "unknown",
        "failure": "f",
        "signature": "",
    }


def step(kind: str, rollout: str) -> dict[str, Any]:
    return {"kind": kind, "rollout": rollout, "node": "n1"}


def accusations(*entries: dict[str, Any]) -> list[str]:
    """Return which begins the oracle accuses on a node that two rollouts of a train share."""
    plan = {
        "kind": "plan", "digest": "", "by": 1, "owner": "", "keys": [], "waves": [], "windows": [],
        "ttl": None, "gates": {"proceed": {"owner": 0, "each": 0, "eyes": False, "per_team": False}},
        "probed": False, "pilot": None, "most": None, "targets": {"n1": {"wave": "fleet", "team": ""}},
    }  # fmt: skip
    log: list[dict[str, Any]] = [
        {"kind": "settings", "pools": {}, "fleet": 9, "within": 60},
        {"kind": "inventory", "labels": {"n1": {}}},
        *({**plan, "rollout": name} for name in TRAIN),
        {"kind": "train", "name": "train", "rollouts": list(TRAIN), "approved": True},
        *entries,
    ]
    return [text for text in check_log([{"at": 0.0, **entry} for entry in log]) if "worked on" in text]


SHARED = (begin("first"), step("isolated", "first"), begin("second"))


@pytest.mark.parametrize("end", ["retry", "back"])
def test_failed_rollout_begins_again_in_its_outage(end: str) -> None:
    assert accusations(*SHARED, fail("first"), step(end, "first"), begin("first")) == []


def test_failed_rollouts_begin_in_wrong_order_after_return() -> None:
    ended = (fail("first"), fail("second"), step("back", "first"))
    again = (step("retry", "first"), step("retry", "second"), begin("second"), begin("first"))
    assert accusations(*SHARED, *ended, *again) == ["0 begin: n1 is already worked on in second"]


def test_earlier_rollout_joining_outage_is_accused() -> None:
    alone = (begin("second"), step("isolated", "second"), begin("first"))
    assert accusations(*alone) == ["0 begin: n1 is already worked on in second"]


def test_rollout_put_back_in_outage_has_left_it() -> None:
    put_back = (fail("first"), step("retry", "first"), begin("first"), step("put-back", "first"))
    assert accusations(*SHARED, *put_back, begin("first")) == ["0 begin: n1 is already worked on in second"]
