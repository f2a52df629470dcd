"""Every reason code has a sentence and every remedy a text; nothing else in the project writes them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from machines.model.reasons import Reason, ReasonCode, Remedy, RemedyKind
from rolloutd.control.rollouts.serializers import reason as serialize
from rolloutd.texts.reason_text import SENTENCES, command, describe, describe_missing_votes, describe_remedy

AT = 1_800_000_000.0
HELD = {"node": "n1", "cause": "held", "since": AT, "by": "alice", "until": None, "reason": "disk"}
DOWN = {"node": "n2", "cause": "down", "since": AT, "health": "down", "detail": "no route", "stale": False}
UNKNOWN = {"node": "n3", "cause": "unknown", "since": None, "health": None, "detail": "", "stale": True}
IN_FLIGHT = {
    "node": "n4",
    "cause": "in-flight",
    "since": AT,
    "rollout": "R",
    "phase": "isolating",
    "message": None,
}
VOTES = {"owner": "infra", "owners_want": 1, "owners_have": 0, "teams": (), "submitter": None}
FAILED = {"step": "run.configure", "message": "exit 1"}

EXAMPLES: dict[ReasonCode, tuple[str, dict[str, Any], str]] = {
    ReasonCode.CANCELLED: ("R", {"by": "alice", "reason": "wrong"}, "cancelled by alice: wrong"),
    ReasonCode.ENDED: ("R", {}, "R has ended"),
    ReasonCode.PAUSED: ("R", {"by": "alice", "reason": "lunch"}, "paused by alice: lunch"),
    ReasonCode.REJECTED: (
        "R",
        {"by": "bob", "gate": "continue", "wave": "canary", "reason": "slow"},
        "bob said no at continue after canary: slow",
    ),
    ReasonCode.GATE_PILOT: ("R", {}, "the pilot gate waits: its votes are complete"),
    ReasonCode.GATE_START: (
        "R",
        VOTES,
        "the start gate waits: the vote of the owner, team infra, is missing",
    ),
    ReasonCode.GATE_CONTINUE: (
        "R",
        {"wave": "canary"},
        "the continue gate after wave canary waits: its votes are complete",
    ),
    ReasonCode.NODE_FAILED: (
        "n1",
        {**FAILED, "more": 2},
        "n1 failed in run.configure: exit 1, and 2 more",
    ),
    ReasonCode.DISTURBED: (
        "n1",
        {"step": "prepare.install", "message": "boot-id: a -> b", "more": 0},
        "prepare.install disturbed n1, which was in service: boot-id: a -> b",
    ),
    ReasonCode.ROLLING_BACK: (
        "R",
        {"left": 2, "node": "n1", **FAILED},
        "rolling back 2 nodes: n1 failed in run.configure: exit 1",
    ),
    ReasonCode.ROLLBACK_LIMIT: (
        "R",
        {"left": 2, "at_most": 5, "node": "n1", **FAILED},
        "2 nodes not rolled back, because at_most is 5: n1 failed in run.configure: exit 1",
    ),
    ReasonCode.ROLLBACK_FAILED: (
        "n1",
        FAILED,
        "the rollback of n1 failed in run.configure, so no other begins: exit 1",
    ),
    ReasonCode.ROLLBACK_QUEUED: ("n1", {}, "n1 is queued for its rollback"),
    ReasonCode.SOAKING: (
        "R",
        {"wave": "canary", "until": AT},
        "wave canary soaks until 2027-01-15T08:00:00Z",
    ),
    ReasonCode.AUDIT_MISMATCH: (
        "target/R/n1",
        {"kind": "altered", "columns": ("phase", "outcome")},
        "target/R/n1: phase, outcome differ from what the audit's entries make of it",
    ),
    ReasonCode.DECISION_REFUSED: (
        "R",
        {"problem": "n1 of R cannot start: it is held"},
        "a decision for R was refused: n1 of R cannot start: it is held",
    ),
    ReasonCode.DISK_FULL: (
        "rolloutd",
        {"free_bytes": 31 * 2**20, "needed_bytes": 2**27},
        "the daemon's disk is full: 31 MiB are free, 128 MiB are needed to begin a run",
    ),
    ReasonCode.OBSERVE_ONLY: (
        "rolloutd",
        {},
        "observe_only is set: rolloutd decides everything and does nothing",
    ),
    ReasonCode.CLOSED: ("R", {"cancelled": True}, "R: cancelled; its gates take no more votes"),
    ReasonCode.NOT_ASKED: (
        "R",
        {"gate": "continue", "wave": "canary", "has_gate": True},
        "continue of R: not asked yet; vote when all nodes of wave canary are done",
    ),
    ReasonCode.EARLIER_WAVE: ("canary", {}, "wave canary is not over"),
    ReasonCode.NODE_GONE: ("n1", {}, "the inventory no longer has n1"),
    ReasonCode.QUARANTINED: (
        "n1",
        {
            "conflicts": (
                {"kind": "owners-differ", "about": "team", "values": {"netbox": "a", "hosts": "b"}},
                {"kind": "not-reported", "about": "netbox", "values": {"ams": "n1"}},
            )
        },
        "n1 is quarantined: its owner differs (netbox: a, hosts: b); ams has it and netbox does not",
    ),
    ReasonCode.INVENTORY_STALE: (
        "netbox/dc",
        {"refreshed_at": AT, "stale_after_s": 3600.0},
        "inventory source netbox/dc last answered at 2027-01-15T08:00:00Z; stale_after is 1h",
    ),
    ReasonCode.NO_ISOLATOR: (
        "n1",
        {},
        "no isolator of the plan applies to n1, and the plan does not say that it stays in service",
    ),
    ReasonCode.NO_CHECK: ("n1", {}, "no check of the plan applies to n1"),
    ReasonCode.NO_CHANGE: ("n1", {}, "the plan's change does not apply to n1"),
    ReasonCode.VALUES_CHANGED: (
        "n1",
        {"name": "HOST", "before": "10.0.0.1", "now": "10.0.0.2", "more": 0},
        "the value HOST of n1 has changed since the vote: 10.0.0.1 → 10.0.0.2",
    ),
    ReasonCode.BACKOFF: (
        "n1",
        {"until": AT, "detail": "a pod is held"},
        "n1 is tried again at 2027-01-15T08:00:00Z: a pod is held",
    ),
    ReasonCode.NEEDS_VOTE: (
        "n1",
        {"team": "a", "gate": "start", "joined": True, "known_team": True, "free_joiners": 2},
        (
            "n1 joined after the start was approved (only 2 nodes may without a vote); "
            "team a has not voted for it"
        ),
    ),
    ReasonCode.DONE_WITH_EXCEPTIONS: (
        "R",
        {
            "changed": 11,
            "skipped": 3,
            "nodes": (
                {"node": "n7", "outcome": "skipped", "detail": "returned by root"},
                {"node": "n8", "outcome": "rolled-back", "detail": None},
            ),
        },
        "done with exceptions: 11 changed, 1 skipped (n7, returned by root), 1 rolled-back (n8), and 1 more",
    ),
    ReasonCode.ROLLOUT_STOPPED: (
        "n1",
        {"rollout": "R"},
        "R is stopped, and n1 is not done in it; see rolloutctl why R",
    ),
    ReasonCode.GATE_CLOSED: (
        "fleetlock/workers",
        {"owner": "infra", "owners_want": 1, "owners_have": 0, "teams": [], "submitter": None},
        "the gate of fleetlock/workers waits: the vote of the owner, team infra, is missing",
    ),
    ReasonCode.FREEZE: (
        "team/a",
        {"by": "alice", "until": AT, "reason": "sale"},
        "team/a is frozen by alice until 2027-01-15T08:00:00Z: sale",
    ),
    ReasonCode.OUTSIDE_WINDOW: (
        "team/a",
        {"windows": "team-rules", "team": "a", "opens_at": None},
        "team a's own windows are closed; they do not open within two weeks",
    ),
    ReasonCode.WINDOW_TOO_SHORT: (
        "R",
        {"windows": "plan", "team": None, "needed_s": 900.0, "closes_at": AT},
        "a node takes 15m and the plan's window closes at 2027-01-15T08:00:00Z",
    ),
    ReasonCode.HELD: ("n1", HELD, "n1 is held by alice since 2027-01-15T08:00:00Z: disk"),
    ReasonCode.OTHER_ROLLOUT: ("n4", IN_FLIGHT, "n4 is isolating in R since 2027-01-15T08:00:00Z"),
    ReasonCode.TRAIN: (
        "n4",
        {"rollout": "R", "train": "t"},
        "n4 waits for R of its train",
    ),
    ReasonCode.NODE_DOWN: ("n2", DOWN, "n2 does not answer: no route"),
    ReasonCode.FOREIGN_CORDON: (
        "n2",
        {**DOWN, "cause": "cordoned-by-other", "health": "cordoned-by-other", "detail": "by kubectl"},
        "n2 was taken out of service by another tool or user: by kubectl",
    ),
    ReasonCode.FOREIGN_LOCK: (
        "n2",
        {**DOWN, "cause": "locked-by-other", "health": "locked-by-other", "detail": "kured has it"},
        "n2 is locked by another tool or user: kured has it",
    ),
    ReasonCode.NODE_UNKNOWN: ("n3", UNKNOWN, "n3 has not been observed yet"),
    ReasonCode.POOL_CLOSED: ("team/a", {}, "pool team/a is closed: its max_unavailable is 0"),
    ReasonCode.POOL_FULL: (
        "team/a",
        {"peers": (IN_FLIGHT, UNKNOWN), "more": 1, "dry_run_at": AT, "dry_run_problem": "a budget"},
        (
            "pool team/a is full: n4 is isolating in R since 2027-01-15T08:00:00Z; n3 has not been "
            "observed yet and 1 more; this node could not be isolated at 2027-01-15T08:00:00Z (dry run), so "
            "others go first: a budget"
        ),
    ),
    ReasonCode.POOL_OVER_BUDGET: (
        "team/a",
        {"budget": 1, "peers": (DOWN,), "more": 0},
        "pool team/a is over its budget of 1: n2 does not answer: no route",
    ),
    ReasonCode.PEER_DOWN: (
        "n2",
        {**DOWN, "pool": "team/a"},
        "peer n2 of team/a does not answer: no route",
    ),
    ReasonCode.PEER_UNKNOWN: (
        "n2",
        {**DOWN, "cause": "unknown", "stale": True, "pool": "team/a"},
        "peer n2 of team/a does not answer: no route (observed at 2027-01-15T08:00:00Z)",
    ),
    ReasonCode.MAX_PARALLEL: (
        "R",
        {"scope": "wave", "wave": "canary", "in_flight": 1, "max_parallel": 1},
        "1 node of wave canary of R is in flight, and max_parallel is 1",
    ),
    ReasonCode.TRAFFIC: ("n1", {"detail": "n1 has 3 connections"}, "n1 has 3 connections"),
    ReasonCode.TRAFFIC_UNKNOWN: ("n1", {"detail": None}, "n1 is being probed for client traffic"),
    ReasonCode.CANNOT_ISOLATE: ("n1", {"detail": "db is held"}, "n1 cannot be isolated: db is held"),
    ReasonCode.NO_RUNNER: ("n1", {}, "no runner of the settings is for n1, and local_runner is false"),
    ReasonCode.RUNNER_DOWN: (
        "n1",
        {"runner": "fra", "match": "site=fra", "detail": "https://k8s.fra: connection refused"},
        ("n1 waits for runner fra (site=fra), which begins no runs: https://k8s.fra: connection refused"),
    ),
    ReasonCode.RUNNER_FULL: (
        "n1",
        {"runner": "local", "active": 4, "parallel": 4},
        "n1 waits for this machine, not for a pool: 4 runs are active, and ansible.parallel allows 4",
    ),
    ReasonCode.CHECKING_COMPLIANCE: ("n1", {}, "n1 is checked for whether it needs the change"),
    ReasonCode.PREPARING: (
        "n1",
        {"stage": "copy", "left": 3, "running": True},
        "n1 is in prepare stage copy; 3 nodes of the rollout not prepared",
    ),
    ReasonCode.PREPARE_FAILED: (
        "n1",
        {"stage": "copy", "message": "no route", "attempt": 2, "more": 1, "until": 1_800_000_000.0},
        "prepare stage copy failed on n1, and 1 more: no route; try 3 at 2027-01-15T08:00:00Z",
    ),
    ReasonCode.CHECKING: ("n1", {}, "n1 is being checked in service"),
    ReasonCode.CHECK_MODE: ("n1", {}, "n1 runs a playbook in check mode"),
    ReasonCode.CLEANING: ("n1", {}, "n1 is being cleaned of what ended rollouts left"),
    ReasonCode.RELEASING: ("n1", {}, "n1 is being returned to service after a hold"),
    ReasonCode.STARTING: ("n1", {}, "n1 starts now"),
    ReasonCode.QUEUED: ("n1", {"ahead": "n2"}, "n1 is queued: n2 goes first"),
    ReasonCode.DRIFTED: (
        "n1",
        {"tasks": ("set the limit", "restart")},
        "n1 has drifted: check mode would change set the limit, restart",
    ),
    ReasonCode.FAILED: ("n1", FAILED, "n1 failed in run.configure: exit 1"),
    ReasonCode.NOT_ISOLATED_YET: (
        "n1",
        {"detail": "2 pods are left", "tries": 2},
        "2 pods are left (2 tries)",
    ),
    ReasonCode.NOT_RETURNED_YET: (
        "n1",
        {"detail": "lb1 does not answer", "tries": 1},
        "n1 cannot return to service yet: lb1 does not answer",
    ),
    ReasonCode.NOT_PASSED_YET: (
        "n1",
        {"step": "verify.0.ssh", "detail": "refused"},
        "verify.0.ssh has not passed yet: refused",
    ),
    ReasonCode.STAGED_UNKNOWN: (
        "n1",
        {"detail": "no answer"},
        "the staged files on n1 cannot be compared: no answer",
    ),
    ReasonCode.AWAITING_API: ("n1", {"detail": "429"}, "n1 waits for an answer: 429"),
    ReasonCode.INVENTORY_AWAITED: (
        "n1",
        {"sources": ("ansible:/hosts.yml",)},
        (
            "n1 waits for its passwords, which are not stored: ansible:/hosts.yml has not answered "
            "since the daemon started"
        ),
    ),
}

ARGS: dict[str, str | bool] = {
    "subject": "vote/v9",
    "rollout": "R",
    "group": "fleetlock/workers",
    "node": "n1",
    "gate": "continue",
    "wave": "canary",
    "return": True,
    "id": "k1",
    "team": "a",
    "source": "kubernetes/ams",
    "runner": "fra",
    "plan": "sysctl",
    "nodes": "n1",
    "has_rollback": True,
}
COMMANDS = {
    RemedyKind.APPROVE: "rolloutctl approve R continue --wave canary --reason ...",
    RemedyKind.APPROVE_REBOOTS: "rolloutctl approve fleetlock/workers --until 7d --reason ...",
    RemedyKind.WITHDRAW: "rolloutctl withdraw R continue --wave canary --reason ...",
    RemedyKind.RESUME: "rolloutctl resume R --reason ...",
    RemedyKind.RETRY: "rolloutctl retry R n1 --reason ...",
    RemedyKind.RETRY_PREPARATION: "rolloutctl retry R n1 --reason ...",
    RemedyKind.ROLL_BACK: "rolloutctl rollback R n1 --reason ...",
    RemedyKind.SKIP: "rolloutctl skip R n1 --return --reason ...",
    RemedyKind.RETURN: "rolloutctl return n1",
    RemedyKind.RELEASE: "rolloutctl release n1 --as k1",
    RemedyKind.UNFREEZE: "rolloutctl unfreeze --scope k1",
    RemedyKind.SETTLE: "rolloutctl audit settle vote/v9 --keep audit --reason ...",
    RemedyKind.ACCEPT_INVENTORY: "rolloutctl inventory accept kubernetes/ams --reason ...",
    RemedyKind.PIN_IDENTITY: "rolloutctl inventory pin n1 --reason ...",
    RemedyKind.ADD_TEAM: "rolloutctl skip R n1 --reason ...",
}


def test_every_code_has_an_example() -> None:
    assert list(SENTENCES) == list(ReasonCode)
    assert set(EXAMPLES) == set(ReasonCode)


@pytest.mark.parametrize("code", ReasonCode)
def test_code_renders_as_sentence(code: ReasonCode) -> None:
    subject, params, sentence = EXAMPLES[code]
    assert describe(Reason(code, subject, params)) == sentence


def test_suggested_command_is_quoted_for_shell() -> None:
    args = {"node": "n1", "id": "disk; reboot"}
    assert command(Remedy(RemedyKind.RELEASE, args)) == "rolloutctl release n1 --as 'disk; reboot'"
    args = {"rollout": "R", "nodes": "n1 $(n2)"}
    assert command(Remedy(RemedyKind.ROLL_BACK, args)) == "rolloutctl rollback R n1 '$(n2)' --reason ..."


def test_failed_build_is_retried_without_node() -> None:
    remedy = Remedy(RemedyKind.RETRY_PREPARATION, {"rollout": "R", "node": ""})
    assert describe_remedy(remedy) == "rolloutctl retry R --reason ..., or time"


@pytest.mark.parametrize("kind", RemedyKind)
def test_remedy_renders_with_its_command(kind: RemedyKind) -> None:
    remedy = Remedy(kind, ARGS, who="alice", until=AT)
    assert command(remedy) == COMMANDS.get(kind)
    assert describe_remedy(remedy)
    assert not re.search(r"\bNone\b|[{}]", describe_remedy(remedy))


def test_votes_missing_alike_share_a_clause() -> None:
    teams = [{"team": team, "want": 1, "have": 0, "known_team": team != "c"} for team in "abc"]
    assert describe_missing_votes({**VOTES, "teams": teams, "submitter": "eve", "superseded": "Q"}) == (
        "the vote of the owner, team infra, is missing; the vote of team c is missing (the settings have no "
        "team c; an admin must add it); the votes of teams a and b are missing (four eyes: the vote of eve "
        "does not count) (votes for Q do not count here)"
    )


def test_wire_reason_carries_code_params_and_remedy() -> None:
    remedy = Remedy(RemedyKind.WAIT_UNTIL, until=AT)
    params: dict[str, Any] = {"pool": "team/a", "peers": (IN_FLIGHT,), "more": 0}
    assert serialize(Reason(ReasonCode.POOL_FULL, "team/a", params, AT, remedy)) == {
        "code": "pool-full",
        "text": "pool team/a is full: n4 is isolating in R since 2027-01-15T08:00:00Z",
        "since": "2027-01-15T08:00:00.000Z",
        "lifted_by": "time",
        "subject": "team/a",
        "params": {
            "pool": "team/a",
            "peers": [{**IN_FLIGHT, "since": "2027-01-15T08:00:00.000Z"}],
            "more": 0,
        },
        "remedy": {"kind": "wait-until", "command": None, "who": None, "until": "2027-01-15T08:00:00.000Z"},
    }
