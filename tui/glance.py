"""What follows from the model for a person who looks: sentences, groups, timelines, differences.

Nothing of this is remembered, and nothing of it is decided: where the daemon has
given a reason, it is the daemon's words that are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolloutd.control import sentences, wire
from tui import rights, wording
from tui.model import Model
from tui.values import BUSY, NodeState, RolloutState, instant

RATE_WINDOW_S = 900.0
"""A rate is that of the last quarter of an hour: older ends say little of now."""

LEAST_RATE_S = 30.0
"""A rate over less than this would be noise."""

STATE_LOOKS: Mapping[str, tuple[str, str]] = {
    "awaiting-approval": ("◆", "accent"),
    "running": ("►", "run"),
    "soaking": ("◷", "run"),
    "paused": ("‖", "bad"),
    "done": ("✓", "ok"),
    "cancelled": ("✗", "dim"),
}
"""Glyph and role of a rollout's state."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A gate that waits, and whether it waits for us."""

    rollout: RolloutState
    gate: wire.Gate
    for_me: bool

    @property
    def key(self) -> str:
        """What tells it from every other one."""
        return f"{self.rollout.id}/{self.gate['gate']}/{self.gate['wave']}"


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that wait for the same reason."""

    code: str
    text: str
    lifted_by: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """What is told of a rollout's nodes together; `ends` are the recent ones, `waves` counts by phase."""

    failed: Sequence[NodeState]
    groups: Sequence[Group]
    ready: Sequence[str]
    ends: Sequence[float]
    waves: Mapping[str, Counter[str]]
    last_end: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Leg:
    """One wave on the timeline; `soak_left` in seconds, None when it does not soak now."""

    wave: str
    total: int
    done: int
    failed: int
    busy: int
    soak_s: float
    soak_left: float | None
    gate: wire.Gate | None
    is_current: bool


def ordered(model: Model) -> list[RolloutState]:
    """Return the rollouts with those first that want a person, and the latest first among equals."""
    rank = {"paused": 0, "awaiting-approval": 1, "soaking": 2, "running": 2}

    def urgency(each: RolloutState) -> tuple[int, float, str]:
        mine = any(rights.waits_for_me(model, each, gate) for gate in each.status["gates"])
        return (
            0 if mine else rank.get(each.state, 3),
            -(instant(each.status["submitted_at"]) or 0.0),
            each.id,
        )

    return sorted(model.rollouts.values(), key=urgency)


def waiting(model: Model) -> list[Waiting]:
    """Return the gates that wait or were refused, those that wait for us first."""
    found = [
        Waiting(each, gate, rights.waits_for_me(model, each, gate))
        for each in ordered(model)
        if not each.is_closed
        for gate in each.status["gates"]
        if gate["state"] in ("waiting", "rejected")
    ]
    return sorted(found, key=lambda each: not each.for_me)


def mine(model: Model) -> int:
    """Return how many gates wait for us."""
    return sum(each.for_me for each in waiting(model))


def sentence(model: Model, rollout: RolloutState, now: float) -> tuple[str, str]:
    """Return how a rollout stands, in one sentence, and what is missing; the second must not be cut."""
    reason = rollout.status["reason"]
    gates = [
        each for each in waiting(model) if each.rollout.id == rollout.id and each.gate["state"] == "waiting"
    ]
    if reason is not None and reason["code"].startswith("gate-") and gates:
        return f"{sentences.gate_name(gates[0].gate)} waits for votes of {missing(gates[0])}", ""
    match rollout.state:
        case "done":
            return f"done: {wording.count(rollout.counts['done'], 'node')} changed or already current", ""
        case "cancelled":
            left = len(rollout.in_flight)
            return "cancelled" + (
                f"; {wording.count(left, 'node')} in flight will finish" if left else ""
            ), ""
        case "paused" | "awaiting-approval" | "soaking":
            return _because(rollout, reason, now), _missing(rollout)
        case _:
            moving = len(rollout.in_flight)
            said = f"{wording.count(moving, 'node')} in flight" if moving else "nothing in flight"
            return said + (f"; {_because(rollout, reason, now)}" if reason is not None else ""), ""


def _because(rollout: RolloutState, reason: wire.Reason | None, now: float) -> str:
    if reason is None:
        return rollout.state.replace("-", " ")
    since = instant(reason["since"])
    if since is None or since > now:
        return reason["text"]
    when = wording.ago(since, now) if reason["code"] == "node-failed" else f"for {wording.span(now - since)}"
    return f"{reason['text']} ({when})"


def surely_down(pool: wire.Lock) -> list[wire.Holder]:
    """Return who is known to take the pool's slots; whom nobody has looked at lately may be up."""
    return [each for each in pool["holders"] if not each.get("unseen")]


def missing(waiting: Waiting) -> str:
    """Return whose votes a gate still wants: `infra (owner), media, 2 of search`."""
    gate, status = waiting.gate, waiting.rollout.status
    needs = [(f"{status['owner']} (owner)", gate["needs"]["owner"])]
    needs += [(need["team"], {"want": need["want"], "have": need["have"]}) for need in gate["needs"]["teams"]]
    wanting = [(name, need["want"] - need["have"]) for name, need in needs if need["have"] < need["want"]]
    return ", ".join(f"{number} of {name}" if number > 1 else name for name, number in wanting)


def _missing(rollout: RolloutState) -> str:
    wanting = sum(
        max(0, need["want"] - need["have"])
        for gate in rollout.status["gates"]
        if gate["state"] == "waiting"
        for need in (gate["needs"]["owner"], *gate["needs"]["teams"])
    )
    return f"{wording.count(wanting, 'vote')} missing" if wanting else ""


def rate(rollout: RolloutState, survey: Survey | None, now: float) -> float | None:
    """Return the nodes that end per hour now; None while nobody can tell."""
    ends: Iterable[float] = rollout.ends if survey is None else survey.ends
    recent = [at for at in ends if now - at < RATE_WINDOW_S]
    if len(recent) < 2 or rollout.is_closed:
        return None
    return len(recent) * 3_600 / max(LEAST_RATE_S, now - min(recent))


def eta(rollout: RolloutState, now: float) -> str:
    """Return how long it will take, as the daemon reckons."""
    at = instant(rollout.status["eta"])
    return "" if at is None or rollout.is_closed else wording.span(at - now)


def survey(nodes: Iterable[NodeState], now: float) -> Survey:
    """Go through all nodes once and return what is told of them together."""
    waits: dict[tuple[str, str, str], list[str]] = {}
    failed: list[NodeState] = []
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
            reason = node.reason
            waits.setdefault((reason["code"], reason["text"], reason["lifted_by"] or ""), []).append(
                node.node
            )
        elif phase == "done" and node.since is not None:
            last_end[node.wave] = max(last_end.get(node.wave, 0.0), node.since)
            if now - node.since < RATE_WINDOW_S:
                ends.append(node.since)
        if node.outcome != "left":
            tally = waves.get(node.wave)
            if tally is None:
                tally = waves[node.wave] = Counter()
            tally["busy" if phase in BUSY else phase] += 1
    by_size = sorted(waits.items(), key=lambda each: (-len(each[1]), each[0]))
    groups = [Group(code, text, by, tuple(names)) for (code, text, by), names in by_size]
    return Survey(failed, groups, ready, ends, waves, last_end)


def legs(rollout: RolloutState, seen: Survey, plan: Mapping[str, Any] | None, now: float) -> list[Leg]:
    """Return the waves in their order; soaks come from the plan once it is known."""
    soaks = soak_of(plan)
    current = rollout.status["wave"]
    gates = {gate["wave"]: gate for gate in rollout.status["gates"] if gate["gate"] == "continue"}
    found = []
    for name in dict.fromkeys([*seen.waves, *soaks, *([current] if current else [])]):
        tally, soak_s = seen.waves.get(name, Counter()), soaks.get(name, 0.0)
        is_current = name == current and not rollout.is_closed
        left = seen.last_end.get(name, 0.0) + soak_s - now
        soaks_now = is_current and soak_s > 0 and 0 < tally.total() == tally["done"] and left > 0
        found.append(
            Leg(
                wave=name,
                total=tally.total(),
                done=tally["done"],
                failed=tally["failed"],
                busy=tally["busy"],
                soak_s=soak_s,
                soak_left=left if soaks_now else None,
                gate=gates.get(name),
                is_current=is_current,
            )
        )
    return found


def soak_of(plan: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the soak of each wave, in seconds, that the plan names."""
    if plan is None:
        return {}
    spec = plan["content"]["spec"]
    named = {wave["name"]: float(wave["soak"] or 0) for wave in spec.get("waves") or ()}
    return named or {"canary": float(spec.get("soak") or 0)}


def differences(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what a plan's content changes: (path, before, after), in the order of the plan."""
    before = dict(_flat(old["content"])) if old is not None else {}
    after = dict(_flat(new["content"]))
    if old is not None:
        before["source.pin"], after["source.pin"] = old["source"].get("pin", ""), new["source"].get("pin", "")
    paths = [*after, *(path for path in before if path not in after)]
    return [
        (path, wording.value(path, before.get(path, "")), wording.value(path, after.get(path, "")))
        for path in paths
        if path not in before or path not in after or before[path] != after[path]
    ]


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{number}]")
    elif value not in (None, [], {}):
        yield path, value


def approved_before(rollouts: Sequence[wire.RolloutLine], this: wire.Rollout) -> wire.RolloutLine | None:
    """Return the latest earlier rollout of the same plan that was carried out."""
    for each in rollouts:
        if (
            each["plan"] == this["plan"]
            and each["submitted_at"] < this["submitted_at"]
            and each["percent"] > 0
        ):
            return each
    return None
