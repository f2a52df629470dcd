"""Words for times, numbers and audit entries, as people read them.

The entries themselves are the record; an event that this version does not know
is shown by its name, because the daemon may be newer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

Fields = Mapping[str, Any]

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400

SHOWN_OF_DIGEST = 12
"""Characters of a digest: enough to be told from every other one, few enough to be compared by eye."""

DURATIONS = frozenset({"soak", "probation", "timeout", "expected", "within", "drain_timeout"})
"""Keys of a plan whose values are durations; its content has them in seconds."""


def span(seconds: float) -> str:
    """Return a duration in at most five characters: `48s`, `12m`, `3h05`, `4d`."""
    whole = max(0, int(seconds))
    if whole < 100:
        return f"{whole}s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S}m"
    if whole < DAY_S:
        minutes = whole % HOUR_S // MINUTE_S
        return f"{whole // HOUR_S}h{f'{minutes:02}' if minutes else ''}"
    return f"{whole // DAY_S}d"


def clock(seconds: float) -> str:
    """Return a duration that runs: `0:31`, `12:05`, `1:02:03`."""
    whole = max(0, int(seconds))
    if whole < HOUR_S:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // HOUR_S}:{whole % HOUR_S // 60:02}:{whole % 60:02}"


def ago(then: float | None, now: float) -> str:
    """Return how long ago something was: `4m ago`, `just now`."""
    if then is None:
        return ""
    return "just now" if now - then < 2 else f"{span(now - then)} ago"


def hour(at: float) -> str:
    """Return the local time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def day_and_hour(at: float) -> str:
    """Return the local date and time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def percent(value: float) -> str:
    """Return a percentage in five characters; never 100 before everything is done."""
    return "100 %" if value >= 100 else f"{min(int(value), 99):>3} %"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def short(digest: str) -> str:
    """Return the beginning of a digest."""
    return digest[:SHOWN_OF_DIGEST]


def gate_name(gate: Mapping[str, Any]) -> str:
    """Return what a gate is called: `continue after canary`."""
    return f"{gate['gate']} after {gate['wave']}" if gate.get("wave") else str(gate["gate"])


def exact(seconds: float) -> str:
    """Return a duration as a plan file has it, with nothing left out: `1h30m`, `45s`."""
    left, text = int(seconds), ""
    for unit, size in (("d", DAY_S), ("h", HOUR_S), ("m", MINUTE_S), ("s", 1)):
        if left >= size:
            text += f"{left // size}{unit}"
            left %= size
    return text or "0s"


def value(path: str, told: Any) -> str:
    """Return a value of a plan on one line; at the path of a duration it is one, in seconds."""
    if isinstance(told, str):
        return told
    if told is None:
        return "-"
    if isinstance(told, bool):
        return "true" if told else "false"
    is_duration = isinstance(told, int | float) and path.rpartition(".")[2] in DURATIONS
    return exact(told) if is_duration else str(told)


# -- audit entries -------------------------------------------------------------


def actor(entry: Mapping[str, Any]) -> str:
    """Return who did it."""
    who = entry.get("actor") or {}
    return str(who.get("name", "?"))


def sentence(entry: Mapping[str, Any]) -> str:
    """Return what happened, without its time, its actor, its rollout and its node."""
    fields = entry.get("fields") or {}
    tell = _SENTENCES.get(entry["event"])
    text = tell(fields) if tell is not None else _words(entry["event"])
    return " ".join(text.split())


def tone(entry: Mapping[str, Any]) -> str:
    """Return the role in which an entry is shown."""
    fields = entry.get("fields") or {}
    match entry["event"]:
        case "PhaseMoved" if fields.get("target") == "failed":
            return "bad"
        case "PhaseMoved" if fields.get("target") == "done":
            return "ok"
        case "StepRecorded":
            return "bad" if fields.get("state") in ("failed", "unknown") else "dim"
        case "VoteCast" | "GateOpened" | "VoteWithdrawn":
            return "accent"
        case "RolloutPaused" | "RolloutCancelled" | "CallRefused" | "Frozen" | "HoldTaken":
            return "warn"
        case _:
            return ""


def step_name(step: str) -> str:
    """Return a step's name for people: `isolate.0.command` is `isolate: command`."""
    parts = [part for part in step.split(".") if not part.isdigit()]
    return ": ".join((parts[0], ".".join(parts[1:]))) if len(parts) > 1 else step


def _phase_moved(fields: Fields) -> str:
    failure = fields.get("failure") or {}
    what = f"{failure['step']}: {failure['message']}" if failure else fields.get("text") or ""
    outcome = f" ({fields['outcome']})" if fields.get("outcome") else ""
    attempt = f", attempt {fields['attempt']}" if fields.get("attempt", 0) > 1 else ""
    return f"{fields['source']} → {fields['target']}{outcome}{attempt}{': ' + what if what else ''}"


def _step(fields: Fields) -> str:
    text = f": {fields['text']}" if fields.get("text") else ""
    state = "begun" if fields["state"] == "intended" else fields["state"]
    return f"{fields['action']} {step_name(fields['step'])} {state}{text}"


def _vote(fields: Fields) -> str:
    vote = fields["vote"]
    return f"voted {'yes' if vote['yes'] else 'NO'} at {gate_name(vote)}: {vote['reason']}"


def _hold(fields: Fields) -> str:
    hold = fields["hold"]
    return f"held as {hold['source']}/{hold['id']}: {hold['reason']}"


def _names(nodes: list[Any]) -> str:
    shown = [node["name"] if isinstance(node, dict) else str(node) for node in nodes[:3]]
    return ", ".join(shown) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def _because(verb: str) -> Callable[[Fields], str]:
    return lambda fields: f"{verb}: {fields['reason']}" if fields.get("reason") else verb


_SENTENCES: dict[str, Callable[[Fields], str]] = {
    "PhaseMoved": _phase_moved,
    "StepRecorded": _step,
    "VoteCast": _vote,
    "VoteWithdrawn": _because("took a vote back"),
    "GateOpened": lambda f: f"opened the gate {gate_name(f)}",
    "RolloutOpened": lambda f: f"submitted {f['name']}, {count(len(f['targets']), 'target')}",
    "RolloutPaused": _because("paused"),
    "RolloutResumed": _because("resumed"),
    "RolloutCancelled": _because("cancelled"),
    "RolloutEnded": lambda _: "the rollout has ended",
    "RolloutDeleted": lambda _: "deleted the rollout",
    "TargetsJoined": lambda f: f"joined: {_names([target['node'] for target in f['targets']])}",
    "TargetChanged": lambda f: f"is now of team {f['team']}, in {', '.join(f['pools'])}",
    "LookedCurrent": lambda f: f"looked at: needs the change {f.get('text', '')}",
    "NodeOrdered": lambda f: f"ordered: {f['order'] or 'over'}: {f['reason']}",
    "HoldTaken": _hold,
    "HoldReleased": lambda f: f"hold {f['source']}/{f['id']} released",
    "Frozen": lambda f: f"froze {f['freeze']['scope']}: {f['freeze']['reason']}",
    "Unfrozen": lambda _: "lifted a freeze",
    "NodesSeen": lambda f: f"the inventory has {_names(f['nodes'])}",
    "NodesGone": lambda f: f"the inventory no longer has {_names(f['names'])}",
    "RunsRemoved": lambda f: f"removed the output of {f['runs']} runs, as the settings' keep says",
    "CallRefused": lambda f: f"was refused {f['call']}: {f['why']}",
    "DaemonStarted": lambda f: f"rolloutd {f['version']} started (epoch {f['epoch']})",
}


def _words(event: str) -> str:
    return "".join(f" {char.lower()}" if char.isupper() else char for char in event).strip()
