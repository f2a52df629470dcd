"""One sentence per audit entry, for people, wherever entries are shown to them.

The entries themselves are the record; what is left out here is in `--json`.  An
event that this version does not know is shown by its name, never refused: the
daemon may be newer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rolloutd.counting import count

Fields = Mapping[str, Any]

_INSTANT = re.compile(r" (?:\((?:observed )?at [-0-9]+T[0-9:.]+Z\)|at [-0-9]+T[0-9:.]+Z)")


def of_entry(entry: Mapping[str, Any]) -> str:
    """Return what happened to what, as one line without its time and its actor."""
    node, text = entry.get("node"), sentence(entry)
    return f"{node}: {text}" if node else text


def sentence(entry: Mapping[str, Any]) -> str:
    """Return what happened, as one line without its time, its actor, its rollout and its node."""
    fields = entry.get("fields") or {}
    tell = _SENTENCES.get(entry["event"])
    text = tell(fields) if tell is not None else _words(entry["event"])
    return " ".join(text.split())


def actor(entry: Mapping[str, Any]) -> str:
    """Return who did it."""
    who = entry.get("actor") or {}
    return str(who.get("name", "?"))


def gate_name(gate: Mapping[str, Any]) -> str:
    """Return what a gate is called: `continue after canary`."""
    return f"{gate['gate']} after {gate['wave']}" if gate.get("wave") else str(gate["gate"])


def last_look(why: str) -> str:
    """Return how a node was seen last, without when, so that those alike can be told together.

    `was last seen up at 2026-11-21T04:19:29Z` is `last seen up`, `has not been observed yet` is
    `not observed yet`.
    """
    return _INSTANT.sub("", why).removeprefix("was ").replace("has not been ", "not ", 1)


def step_name(step: str) -> str:
    """Return a step's name for people: `isolate.0.command` is `isolate: command`."""
    parts = [part for part in step.split(".") if not part.isdigit()]
    return ": ".join((parts[0], ".".join(parts[1:]))) if len(parts) > 1 else step


def _phase_moved(fields: Fields) -> str:
    failure = fields.get("failure") or {}
    what = f"{failure['step']}: {failure['message']}" if failure else fields.get("text") or ""
    outcome = f" ({fields['outcome']})" if fields.get("outcome") else ""
    attempt = f", attempt {fields['attempt']}" if fields.get("attempt", 0) > 1 else ""
    return f"{fields['source']} \u2192 {fields['target']}{outcome}{attempt}{': ' + what if what else ''}"


def _step(fields: Fields) -> str:
    text = f": {fields['text']}" if fields.get("text") else ""
    state = "begun" if fields["state"] == "intended" else fields["state"]
    return f"{fields['action']} {step_name(fields['step'])} {state}{text}"


def _vote(fields: Fields) -> str:
    vote = fields["vote"]
    return f"voted {'yes' if vote['yes'] else 'no'} at {gate_name(vote)}: {vote['reason']}"


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
    "RolloutPaused": _because("paused the rollout"),
    "RolloutResumed": _because("resumed the rollout"),
    "RolloutCancelled": _because("cancelled the rollout"),
    "RolloutEnded": lambda _: "the rollout has ended",
    "RolloutDeleted": lambda _: "deleted the rollout",
    "TargetsJoined": lambda f: f"joined: {_names([target['node'] for target in f['targets']])}",
    "TargetChanged": lambda f: f"is now of team {f['team']}, in {', '.join(f['pools'])}",
    "LookedCurrent": lambda f: f"looked at: needs the change {f.get('text', '')}",
    "NodeOrdered": lambda f: f"ordered: {f['order'] or 'over'}: {f['reason']}",
    "NodeAdvanced": _because("goes next"),
    "TeamSet": lambda f: (
        f"set the rules of team {f['team']}: {count(len(f['windows']), 'window')}, "
        f"canaries {', '.join(f['canaries']) or 'none'}: {f['reason']}"
    ),
    "HoldTaken": _hold,
    "HoldReleased": lambda f: f"hold {f['source']}/{f['id']} released",
    "Frozen": lambda f: f"froze {f['freeze']['scope']}: {f['freeze']['reason']}",
    "Unfrozen": lambda _: "lifted a freeze",
    "NodesSeen": lambda f: f"the inventory has {_names(f['nodes'])}",
    "NodesGone": lambda f: f"the inventory no longer has {_names(f['names'])}",
    "CallRefused": lambda f: f"was refused {f['call']}: {f['why']}",
    "DaemonStarted": lambda f: f"rolloutd {f['version']} started (epoch {f['epoch']})",
    "RunsRemoved": lambda f: f"removed the output of {count(f['runs'], 'run')}, as the settings' keep says",
    "NodeLetGo": lambda f: f"put back in service by {f['kind']}: nobody holds it any more",
    "SettingsChanged": lambda f: f"settings changed: {', '.join(f['changed'])}",
}

EVENTS = tuple(_SENTENCES)
"""What events are called."""


def _words(event: str) -> str:
    return "".join(f" {c.lower()}" if c.isupper() else c for c in event).strip()
