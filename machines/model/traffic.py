"""Traffic results of pending nodes: validity and probe intervals.

A node whose plan has traffic probes starts only with a fresh "idle"; busy and unknown nodes yield to their
pools.  Only nodes that could start otherwise are probed, a few of each pool at a time, and a node that stays
busy less and less often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from machines.model.plan import DEFAULT_POLL_S
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Target

IDLE_MAX_AGE_S = 30.0
"""How long "idle" is valid: the node starts within a second or two after its probe."""

REPROBE_MAX_S = 300.0
"""Longest such interval: the end of a job that ran for hours may go unnoticed for so long."""

REPROBE_UNKNOWN_MAX_S = 60.0
"""Longest interval for unknown traffic: a probe server that is back should be noticed soon."""

PROBE_AHEAD = 3
"""Candidates of a pool that are probed in one poll: each probe is a request to another team's server."""


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """The result of a plan's traffic probes on a node at an instant (epoch seconds).

    `busy` None: unknown.  `count`: how much traffic, if the probe has a number.  `since`: when the result was
    first the same without a break; 0.0 before it is recorded.  `poll_s` is the plan's.  `busy_s`: how long
    the node was not known to be idle, from its first probe on.
    """

    rollout: str
    node: str
    busy: bool | None
    at: float
    text: str = ""
    since: float = 0.0
    count: int | None = None
    poll_s: float = DEFAULT_POLL_S
    busy_s: float = 0.0

    def reprobe_at(self, *, is_contested: bool) -> float:
        """Return when to probe again (epoch seconds).

        In a contested pool a busy node gives its turn to others: the longer it stays busy, the later.
        """
        if self.busy is False or not is_contested:
            return self.at + self.poll_s
        most_s = REPROBE_MAX_S if self.busy else REPROBE_UNKNOWN_MAX_S
        return self.at + max(self.poll_s, min((self.at - self.since) / 2, most_s))

    def is_recent(self, now: float) -> bool:
        """Return whether the node was probed within the present poll; a clock that was set back ends it."""
        return self.at <= now < self.at + self.poll_s

    def following(self, last: TrafficResult | None) -> TrafficResult:
        """Return the result with the `since` of an equal one before it.

        Idle results with more than two polls between them do not count as unbroken.
        """
        same = last is not None and last.busy is self.busy
        # What happened on the node between two distant probes is unknown, so idle does not reach over it.
        if last is not None and self.busy is False:
            same &= self.at - last.at <= max(IDLE_MAX_AGE_S, 2 * self.poll_s)
        busy_s = 0.0 if last is None else last.busy_s
        if last is not None and last.busy is not False:
            # Between distant probes the node may have been idle, but nothing asked for it.
            busy_s += min(max(0.0, self.at - last.at), REPROBE_MAX_S)
        since = last.since if last is not None and same else self.since or self.at
        return replace(self, since=since, busy_s=busy_s)

    def is_idle(self, now: float, idle_for_s: float = 0.0) -> bool:
        """Return whether the node is known to be idle at `now`, and to have been so for `idle_for_s`."""
        is_fresh = self.at <= now < self.at + IDLE_MAX_AGE_S
        return self.busy is False and is_fresh and self.at - self.since >= idle_for_s


def result_blocker(result: TrafficResult, idle_for_s: float, reprobe_at: float) -> Reason | None:
    """Return why the node's last result keeps it from starting; None when it was idle for long enough."""
    if result.busy is False:
        return _idle_too_briefly(result, idle_for_s)
    code = ReasonCode.TRAFFIC if result.busy else ReasonCode.TRAFFIC_UNKNOWN
    kind = RemedyKind.WAIT_FOR_IDLE if result.busy else RemedyKind.WAIT_FOR_PROBE
    return Reason(
        code,
        result.node,
        {"detail": result.text, "count": result.count},
        result.since,
        Remedy(kind, until=reprobe_at),
    )


def _idle_too_briefly(result: TrafficResult, idle_for_s: float) -> Reason | None:
    idle_s = result.at - result.since
    if idle_s >= idle_for_s:
        return None
    params: Params = {"detail": None, "count": None, "idle_s": idle_s, "idle_for_s": idle_for_s}
    remedy = Remedy(RemedyKind.WAIT_UNTIL, until=result.since + idle_for_s)
    return Reason(ReasonCode.TRAFFIC, result.node, params, result.since, remedy)


def probe_pending_reason(target: Target) -> Reason:
    remedy = Remedy(RemedyKind.WAIT_FOR_PROBE)
    return Reason(
        ReasonCode.TRAFFIC_UNKNOWN, target.node, {"detail": None, "count": None}, target.since, remedy
    )
