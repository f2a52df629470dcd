"""Reasons for waiting, as values: a code, what it is about, and what ends it.

The core writes no sentence: rolloutd/texts/reason_text.py renders codes and remedies for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Param: TypeAlias = "str | int | float | Mapping[str, Param] | tuple[Param, ...] | None"
Params: TypeAlias = Mapping[str, Param]
"""What a sentence needs: `at`, `since`, `until` and `..._at` are epoch seconds, `..._s` are seconds."""


class ReasonCode(StrEnum):
    """Why something waits. The values are documented and do not change."""

    # The whole rollout.
    CANCELLED = "cancelled"
    ENDED = "ended"
    PAUSED = "paused"
    REJECTED = "rejected"
    GATE_PILOT = "gate-pilot"
    GATE_START = "gate-start"
    GATE_CONTINUE = "gate-continue"
    NODE_FAILED = "node-failed"
    DISTURBED = "disturbed"
    ROLLING_BACK = "rolling-back"
    ROLLBACK_LIMIT = "rollback-limit"
    ROLLBACK_FAILED = "rollback-failed"
    SOAKING = "soaking"
    OBSERVE_ONLY = "observe-only"
    AUDIT_MISMATCH = "audit-mismatch"
    DECISION_REFUSED = "decision-refused"
    # A gate that takes no votes now.
    CLOSED = "closed"
    NOT_ASKED = "not-asked"
    # A machine that asks to reboot itself.
    GATE_CLOSED = "gate-closed"
    ROLLOUT_STOPPED = "rollout-stopped"
    # A pending node.
    EARLIER_WAVE = "earlier-wave"
    NODE_GONE = "node-gone"
    QUARANTINED = "quarantined"
    INVENTORY_STALE = "inventory-stale"
    NO_ISOLATOR = "no-isolator"
    NO_CHECK = "no-check"
    NO_CHANGE = "no-change"
    VALUES_CHANGED = "values-changed"
    BACKOFF = "backoff"
    NEEDS_VOTE = "needs-vote"
    FREEZE = "freeze"
    OUTSIDE_WINDOW = "outside-window"
    WINDOW_TOO_SHORT = "window-too-short"
    HELD = "held"
    OTHER_ROLLOUT = "other-rollout"
    TRAIN = "train"
    NODE_DOWN = "node-down"
    FOREIGN_CORDON = "foreign-cordon"
    FOREIGN_LOCK = "foreign-lock"
    NODE_UNKNOWN = "node-unknown"
    POOL_CLOSED = "pool-closed"
    POOL_FULL = "pool-full"
    POOL_OVER_BUDGET = "pool-over-budget"
    PEER_DOWN = "peer-down"
    PEER_UNKNOWN = "peer-unknown"
    MAX_PARALLEL = "max-parallel"
    DISK_FULL = "disk-full"
    TRAFFIC = "traffic"
    TRAFFIC_UNKNOWN = "traffic-unknown"
    CANNOT_ISOLATE = "cannot-isolate"
    NO_RUNNER = "no-runner"
    RUNNER_DOWN = "runner-down"
    RUNNER_FULL = "runner-full"
    CHECKING_COMPLIANCE = "checking-compliance"
    PREPARING = "preparing"
    PREPARE_FAILED = "prepare-failed"
    STAGED_UNKNOWN = "staged-unknown"
    CHECKING = "checking"
    CHECK_MODE = "check-mode"
    CLEANING = "cleaning"
    RELEASING = "releasing"
    STARTING = "starting"
    QUEUED = "queued"
    # A node that waits for its rollback.
    ROLLBACK_QUEUED = "rollback-queued"
    # A node that does not wait to start.
    FAILED = "failed"
    DRIFTED = "drifted"
    # A rollout that is done although not every node has the change.
    DONE_WITH_EXCEPTIONS = "done-with-exceptions"
    # A node at work whose isolators or checks wait.
    NOT_ISOLATED_YET = "not-isolated-yet"
    NOT_RETURNED_YET = "not-returned-yet"
    NOT_PASSED_YET = "not-passed-yet"
    AWAITING_API = "awaiting-api"
    INVENTORY_AWAITED = "inventory-awaited"


class UnavailabilityCause(StrEnum):
    """Why a node counts as down, by precedence: our own work first, unknown last."""

    IN_FLIGHT = "in-flight"
    FAILED = "failed"
    ISOLATED = "isolated"
    HELD = "held"
    DOWN = "down"
    CORDONED_BY_OTHER = "cordoned-by-other"
    LOCKED_BY_OTHER = "locked-by-other"
    UNKNOWN = "unknown"


class RemedyKind(StrEnum):
    """What ends a wait: a user's command, other work, or time."""

    APPROVE = "approve"
    APPROVE_REBOOTS = "approve-reboots"
    WITHDRAW = "withdraw"
    RESUME = "resume"
    RETRY = "retry"  # or skip, or rollback: a failed node's three ways on
    RETRY_PREPARATION = "retry-preparation"  # or skip; it is also tried again by itself
    ROLL_BACK = "roll-back"
    SKIP = "skip"
    RETURN = "return"
    RELEASE = "release"
    UNFREEZE = "unfreeze"
    ADD_TEAM = "add-team"
    SETTLE = "settle"
    SUBMIT_AGAIN = "submit-again"
    CHANGE_SETTINGS = "change-settings"
    CHANGE_INVENTORY = "change-inventory"
    ACCEPT_INVENTORY = "accept-inventory"
    PIN_IDENTITY = "pin-identity"
    UNCORDON = "uncordon"
    RELEASE_BY_SOURCE = "release-by-source"
    WAIT_UNTIL = "wait-until"
    WAIT_FOR_NODE = "wait-for-node"
    WAIT_FOR_ROLLOUT = "wait-for-rollout"
    WAIT_FOR_RETURN = "wait-for-return"
    WAIT_FOR_HEALTH = "wait-for-health"
    WAIT_FOR_WAVE = "wait-for-wave"
    WAIT_FOR_CAPACITY = "wait-for-capacity"
    FREE_DISK = "free-disk"
    WAIT_FOR_IDLE = "wait-for-idle"
    WAIT_FOR_PROBE = "wait-for-probe"
    WAIT_FOR_BLOCKER = "wait-for-blocker"
    WAIT_FOR_ISOLATION = "wait-for-isolation"
    WAIT_FOR_CHECK = "wait-for-check"
    WAIT_FOR_COMPLIANCE = "wait-for-compliance"
    WAIT_FOR_PREPARATION = "wait-for-preparation"
    WAIT_FOR_INVENTORY = "wait-for-inventory"
    WAIT_FOR_RUN = "wait-for-run"
    WAIT_FOR_RUNNER = "wait-for-runner"
    WAIT_FOR_WORK = "wait-for-work"
    WAIT_FOR_API = "wait-for-api"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Who or what ends a wait; `until` is when time ends it at the latest (epoch seconds).

    `also` is a second command that is needed, for the node or for the rollout.
    """

    kind: RemedyKind
    args: Mapping[str, str | bool] = field(default_factory=dict)
    who: str | None = None
    until: float | None = None
    also: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something waits; `subject` is the node, pool, rollout, team or scope that it is about."""

    code: ReasonCode
    subject: str
    params: Params = field(default_factory=dict)
    since: float | None = None
    remedy: Remedy | None = None
