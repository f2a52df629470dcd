"""Summaries of the model for the pages: sentences, groups, timelines, differences.

Summaries neither store nor decide anything: the daemon's reasons keep its words.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from machines.model.node import natural_sort_key
from rolloutd.control.fleet import wire_fleet
from rolloutd.control.rollouts import wire
from rolloutd.texts import event_text, formats
from rolloutd.texts.formats import format_exceptions
from tui.formatting import formatting
from tui.state import permissions, values
from tui.state.model import Model

RATE_WINDOW_S = 900.0
"""Completions older than a quarter of an hour say little about the current rate."""

MIN_RATE_WINDOW_S = 30.0
"""A rate over a shorter time is noise."""

_STATE_GLYPHS: Mapping[str, tuple[str, str]] = {
    "awaiting-approval": ("◆", "accent"),
    "running": ("►", "run"),
    "soaking": ("◷", "run"),
    "paused": ("‖", "bad"),
    "done": ("✓", "ok"),
    "cancelled": ("✗", "dim"),
}

STATE_IN_SENTENCE = frozenset({"paused", "cancelled", "done-with-exceptions"})
"""Reason codes whose sentences begin with the rollout's state."""

GATE_REASONS = frozenset({"gate-start", "gate-continue"})
"""Codes for which the console names the missing votes itself."""

MAX_SIMILAR_GROUPS = 6
"""Groups of nodes with one kind of reason that are listed apart; more become one line."""

_MERGED_REASONS: Mapping[str, tuple[str, str]] = {
    "pool-full": ("wait behind", "full pools"),
    "pool-over-budget": ("wait behind", "pools over their budgets"),
    "pool-closed": ("wait in", "closed pools"),
    "peer-down": ("wait for", "peers that are down"),
    "peer-unknown": ("wait for", "unobserved peers"),
}
"""By code, the words before and after the number of pools or peers in which many reasons differ."""


@dataclass(frozen=True, slots=True)
class PendingGate:
    rollout: values.RolloutState
    gate: wire.Gate
    needs_my_vote: bool

    @property
    def key(self) -> str:
        return f"{self.rollout.id}/{self.gate['gate']}/{self.gate['wave']}"


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """Nodes that wait for the same reason; `key` is a `reason_key`, or the code of many merged reasons."""

    key: str
    text: str
    nodes: tuple[str, ...]

    @property
    def code(self) -> str:
        return self.key.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """A rollout's nodes in one pass; completions are epoch seconds, `phase_counts` are by wave."""

    failed: Sequence[values.NodeState]
    waiting_groups: Sequence[WaitingGroup]
    ready: Sequence[str]
    recent_completions: Sequence[float]
    phase_counts: Mapping[str, Counter[str]]
    last_completion: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WaveSegment:
    """One wave on the timeline; `soak_remaining` is None unless the wave soaks now."""

    wave: str
    total: int
    done: int
    failed: int
    skipped: int
    soak_s: float
    soak_remaining: float | None
    gate: wire.Gate | None
    is_current: bool


def state_glyph(state: str, skipped: int) -> tuple[str, str]:
    """Return the glyph and the role of a rollout's state; one that is done with exceptions is no success."""
    return ("✓", "warn") if state == "done" and skipped else _STATE_GLYPHS.get(state, ("?", "warn"))


def sort_by_urgency(model: Model) -> list[values.RolloutState]:
    """Return the rollouts, those that need a decision first, then the latest first."""
    rank = {"paused": 0, "awaiting-approval": 1, "soaking": 2, "running": 2}

    def urgency(each: values.RolloutState) -> tuple[int, float, str]:
        is_mine = any(permissions.needs_my_vote(model, each, gate) for gate in each.status["gates"])
        return (
            0 if is_mine else rank.get(each.state, 3),
            -(values.parse_timestamp(each.status["submitted_at"]) or 0.0),
            each.id,
        )

    return sorted(model.rollouts.values(), key=urgency)


def pending_gates(model: Model) -> list[PendingGate]:
    """Return the gates that wait or were rejected, those that need the user's vote first."""
    found = [
        PendingGate(each, gate, permissions.needs_my_vote(model, each, gate))
        for each in sort_by_urgency(model)
        if not each.is_closed
        for gate in each.status["gates"]
        if gate["state"] in ("waiting", "rejected", "in-doubt")
    ]
    return sorted(found, key=lambda each: not each.needs_my_vote)


def decided_gates(model: Model) -> list[PendingGate]:
    """Return the open gates with votes of live rollouts, whose approvals stay visible."""
    return [
        PendingGate(each, gate, needs_my_vote=False)
        for each in sort_by_urgency(model)
        for gate in each.status["gates"]
        if gate["state"] == "open" and gate["votes"]
    ]


def describe_status(model: Model, rollout: values.RolloutState, now: float) -> tuple[str, str]:
    """Return a rollout's status as a sentence, and its missing votes, which must not be cut."""
    reason, moving = rollout.status["reason"], formats.pluralize(len(rollout.in_flight), "node")
    sentence = "" if reason is None else _describe_reason(reason, now)
    waiting = [each for each in pending_gates(model) if each.gate["state"] == "waiting"]
    gate = next((each for each in waiting if each.rollout.id == rollout.id), None)
    if reason is not None and reason["code"] in GATE_REASONS and gate is not None:
        return f"{event_text.gate_label(gate.gate)} waits for votes of {missing_votes(gate)}", ""
    match rollout.state:
        case "done":
            changed = f"{formats.pluralize(rollout.status['done'], 'node')} changed or already current"
            exceptions = format_exceptions(rollout.status["skipped"], rollout.status["rolled_back"])
            return sentence or ", ".join(filter(None, (changed, exceptions))), ""
        case "cancelled":
            finish = f"{moving} in flight will finish" if rollout.in_flight else ""
            return "; ".join(filter(None, [sentence, finish])), ""
        case "paused" | "awaiting-approval" | "soaking":
            return sentence, _count_missing_votes(rollout)
        case _:
            text = f"{moving if rollout.in_flight else 'nothing'} in flight"
            return f"{text}; {sentence}" if sentence else text, ""


def describe_status_with_state(model: Model, rollout: values.RolloutState, now: float) -> tuple[str, str]:
    """Return the same with the rollout's state in front, unless the sentence begins with it."""
    (sentence, missing), reason = describe_status(model, rollout, now), rollout.status["reason"]
    if reason is not None and reason["code"] in STATE_IN_SENTENCE:
        return sentence, missing
    state = rollout.state.replace("-", " ")
    return f"{state}: {sentence}" if sentence else state, missing


def _describe_reason(reason: wire.Reason, now: float) -> str:
    since = values.parse_timestamp(reason["since"])
    if since is None or since > now:
        return reason["text"]
    when = (
        formatting.format_age(since, now)
        if reason["code"] in ("node-failed", "disturbed")
        else f"for {formatting.format_duration(now - since)}"
    )
    return f"{reason['text']} ({when})"


def confirmed_holders(pool: wire_fleet.PoolSlots) -> list[wire_fleet.SlotHolder]:
    """Return the nodes that are down for certain; an unobserved node may be up."""
    return [each for each in pool["holders"] if not each.get("unobserved")]


def missing_votes(pending: PendingGate) -> str:
    """Return the votes that a gate lacks: `infra (owner), media, 2 of search`."""
    gate, status = pending.gate, pending.rollout.status
    needs = [(f"{status['owner']} (owner)", gate["needs"]["owner"])]
    needs += [(need["team"], {"want": need["want"], "have": need["have"]}) for need in gate["needs"]["teams"]]
    wanting = [(name, need["want"] - need["have"]) for name, need in needs if need["have"] < need["want"]]
    return ", ".join(f"{number} of {name}" if number > 1 else name for name, number in wanting)


def _count_missing_votes(rollout: values.RolloutState) -> str:
    wanting = sum(
        max(0, need["want"] - need["have"])
        for gate in rollout.status["gates"]
        if gate["state"] == "waiting"
        for need in (gate["needs"]["owner"], *gate["needs"]["teams"])
    )
    return f"{formats.pluralize(wanting, 'vote')} missing" if wanting else ""


def completion_rate(rollout: values.RolloutState, summary: NodeSummary | None, now: float) -> float | None:
    """Return the completed nodes per hour; None until two have completed recently."""
    source: values.RolloutState | NodeSummary = rollout if summary is None else summary
    completions = sorted(source.recent_completions)
    recent = completions[bisect_right(completions, now - RATE_WINDOW_S) :]
    if len(recent) < 2 or rollout.is_closed:
        return None
    return len(recent) * 3_600 / max(MIN_RATE_WINDOW_S, now - recent[0])


def format_work_left(rollout: values.RolloutState) -> tuple[str, str]:
    """Return the time to the end by the forecast, its median and its 90th percentile; empty without one.

    It does not count down between two responses: nothing may be done meanwhile.
    """
    work = rollout.status["work"]
    if work is None or rollout.is_closed:
        return "", ""
    return formatting.format_duration(work["low_s"]), formatting.format_duration(work["high_s"])


def summarize_nodes(nodes: Iterable[values.NodeState], now: float) -> NodeSummary:
    """Summarize all nodes in one pass: there may be ten thousand."""
    waits: dict[str, tuple[str, list[str]]] = {}
    failed: list[values.NodeState] = []
    ready: list[str] = []
    ends: list[float] = []
    waves: dict[str, Counter[str]] = {}
    last_end: dict[str, float] = {}
    for node in nodes:
        phase = node.phase
        if phase == "failed":
            failed.append(node)
        elif phase == "pending" and node.reason is None:
            ready.append(node.node)
        elif phase == "pending" and node.reason is not None:
            waits.setdefault(node.waiting_key, (node.reason["text"], []))[1].append(node.node)
        elif phase == "done" and node.since is not None:
            last_end[node.wave] = max(last_end.get(node.wave, 0.0), node.since)
            if now - node.since < RATE_WINDOW_S:
                ends.append(node.since)
        if node.outcome != "left":
            counts = waves.get(node.wave)
            if counts is None:
                counts = waves[node.wave] = Counter()
            done_as = values.COUNTER_BY_OUTCOME.get(node.outcome or "", phase)
            counts["busy" if phase in values.BUSY_PHASES else done_as if phase == "done" else phase] += 1
    groups = _merge_similar(WaitingGroup(key, text, tuple(names)) for key, (text, names) in waits.items())
    groups.sort(key=lambda group: (-len(group.nodes), group.key))
    return NodeSummary(failed, groups, ready, sorted(ends), waves, last_end)


def _merge_similar(groups: Iterable[WaitingGroup]) -> list[WaitingGroup]:
    """Return the groups, those of one code as one group where they are many."""
    by_code: dict[str, list[WaitingGroup]] = {}
    for group in groups:
        by_code.setdefault(group.code, []).append(group)
    merged: list[WaitingGroup] = []
    for code, similar in by_code.items():
        if len(similar) <= MAX_SIMILAR_GROUPS:
            merged += similar
            continue
        before, after = _MERGED_REASONS.get(code, (f"{similar[0].text};", "reasons of this kind"))
        names = tuple(name for group in similar for name in group.nodes)
        merged.append(WaitingGroup(code, f"{before} {len(similar):,} {after}", names))
    return merged


POOL_ORDERS: Mapping[str, Callable[[values.PoolState], Any]] = {
    "most urgent first": lambda pool: pool_rank(pool),
    "by name": lambda pool: natural_sort_key(pool.pool),
    "most left first": lambda pool: pool.done - pool.wanted,
}
"""Sort orders of a rollout's pools; pools with equal keys stay in the daemon's order."""


def pool_rank(pool: values.PoolState) -> int:
    """Return 0 for a pool with failures, then over budget, full, unfinished, done."""
    if pool.failed:
        return 0
    if pool.used > pool.max_unavailable:
        return 1
    if pool.done == pool.wanted:
        return 4
    return 2 if pool.used == pool.max_unavailable else 3


def wave_segments(
    rollout: values.RolloutState, summary: NodeSummary, plan: Mapping[str, Any] | None, now: float
) -> list[WaveSegment]:
    """Return the waves in order; soaks are 0 until the plan is known."""
    soaks = soak_by_wave(plan)
    current = rollout.status["wave"]
    gates = {gate["wave"]: gate for gate in rollout.status["gates"] if gate["gate"] == "continue"}
    found = []
    for name in dict.fromkeys([*summary.phase_counts, *soaks, *([current] if current else [])]):
        counts, soak_s = summary.phase_counts.get(name, Counter()), soaks.get(name, 0.0)
        is_current = name == current and not rollout.is_closed
        left = summary.last_completion.get(name, 0.0) + soak_s - now
        is_done = 0 < counts.total() == counts["done"] + counts["skipped"]
        soaks_now = is_current and soak_s > 0 and is_done and left > 0
        found.append(
            WaveSegment(
                wave=name,
                total=counts.total(),
                done=counts["done"],
                failed=counts["failed"],
                skipped=counts["skipped"],
                soak_s=soak_s,
                soak_remaining=left if soaks_now else None,
                gate=gates.get(name),
                is_current=is_current,
            )
        )
    return found


def soak_intervals(summary: NodeSummary, plan: Mapping[str, Any] | None) -> list[tuple[float, float]]:
    """Return when the soaks of complete waves began and end."""
    soaks = soak_by_wave(plan)
    return [
        (summary.last_completion[wave], summary.last_completion[wave] + soaks[wave])
        for wave, counts in summary.phase_counts.items()
        if soaks.get(wave) and wave in summary.last_completion
        if counts.total() == counts["done"] + counts["skipped"]
    ]


def soak_by_wave(plan: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the soak of each wave in the plan, in seconds."""
    if plan is None:
        return {}
    spec = plan["content"]["spec"]
    named = {wave["name"]: float(wave["soak"] or 0) for wave in spec.get("waves") or ()}
    return named or {"canary": float(spec.get("soak") or 0)}
