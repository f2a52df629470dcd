"""Sentences for events: log, command line, console and reports.

They are made from audit entries, which are the record; `--json` shows those whole.
An event that this version does not know is shown by its name, because the daemon may be newer.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from machines.model.timefmt import format_duration, format_rfc3339
from rolloutd.texts.audit_names import with_current_names
from rolloutd.texts.formats import describe_source, join_limited, pluralize

Fields = Mapping[str, Any]

ROLLOUT_DECISIONS = ("VoteCast", "VoteWithdrawn", "RolloutPaused", "RolloutResumed", "RolloutCancelled")
"""What users decide about a whole rollout after its submit."""


def describe_entry(entry: Mapping[str, Any]) -> str:
    """Return one line for an entry, without its time and actor."""
    node, text = entry.get("node"), describe_event(entry)
    return f"{node}: {text}" if node else text


def describe_event(entry: Mapping[str, Any]) -> str:
    """Return one line for an entry, without its time, actor, rollout and node."""
    entry = with_current_names(entry)
    fields = entry.get("fields") or {}
    formatter = _FORMATTERS.get(entry["event"])
    if formatter is not None:
        return " ".join(formatter(fields).split())
    return "".join(f" {c.lower()}" if c.isupper() else c for c in entry["event"]).strip()


def actor_name(entry: Mapping[str, Any]) -> str:
    who = entry.get("actor") or {}
    return str(who.get("name", "?"))


def gate_label(gate: Mapping[str, Any]) -> str:
    """Return a gate's name: `continue after canary`."""
    return f"{gate['gate']} after {gate['wave']}" if gate.get("wave") else str(gate["gate"])


def step_label(step: str) -> str:
    """Return a step's name for people: `isolate.0.command` is `isolate: command`."""
    parts = [part for part in step.split(".") if not part.isdigit()]
    return ": ".join((parts[0], ".".join(parts[1:]))) if len(parts) > 1 else step


def failed_step(failure: Mapping[str, Any]) -> str:
    return f"{failure['step']}: {failure['message']}"


def _describe_phase_move(fields: Fields) -> str:
    what = failed_step(fields["failure"]) if fields.get("failure") else fields.get("text") or ""
    is_rollback = fields.get("rolling_back") and fields.get("outcome") != "rolled-back"
    outcome = f" ({fields['outcome']})" if fields.get("outcome") else " (rollback)" if is_rollback else ""
    attempt = f", attempt {fields['attempt']}" if fields.get("attempt", 0) > 1 else ""
    joins = ", in the outage of its train" if fields.get("joins_outage") else ""
    return (
        f"{fields['source']} \u2192 {fields['target']}{outcome}{attempt}{joins}{': ' + what if what else ''}"
    )


def _describe_step(fields: Fields) -> str:
    text = f": {fields['text']}" if fields.get("text") else ""
    state = "begun" if fields["state"] == "intended" else fields["state"]
    action, label = fields["action"], step_label(fields["step"])
    what = label if label.startswith(f"{action}:") else f"{action} {label}"
    return f"{what} {state}{text}"


def _describe_vote(fields: Fields) -> str:
    vote = fields["vote"]
    return f"voted {'yes' if vote['yes'] else 'no'} at {gate_label(vote)}: {vote['reason']}"


def _describe_hold(fields: Fields) -> str:
    hold = fields["hold"]
    return f"took hold {hold['source']}/{hold['id']}: {hold['reason']}"


def _describe_placement(fields: Fields) -> str:
    team = f"team {fields['team']}" if fields.get("team") else "no team"
    return f"now belongs to {team}; pools: {', '.join(fields['pools']) or 'none'}"


def _join_names(nodes: list[Any]) -> str:
    return join_limited([node["name"] if isinstance(node, dict) else str(node) for node in nodes], 3)


def _describe_submission(fields: Fields) -> str:
    # A long submit has several entries, each with some of the targets.
    targets = pluralize(len(fields["targets"]), "more target" if fields.get("part") else "target")
    source = fields.get("source")  # only the first part of a long entry has it
    return f"submitted {fields['name']}, {targets}" + (f", from {describe_source(source)}" if source else "")


def _with_reason(verb: str) -> Callable[[Fields], str]:
    return lambda fields: f"{verb}: {fields['reason']}" if fields.get("reason") else verb


def _describe_preparation(content: Fields) -> str:
    row = content["preparation"]
    text = f"prepare stage {row['stage']} {row['state']}"
    if row["state"] == "failed":
        next_try = format_rfc3339(row["not_before"])
        return f"{text} in try {row['attempt']}: {row['text']}; next try at {next_try}"
    return f"{text}: {row['text']}" if row["text"] else text


_FORMATTERS: dict[str, Callable[[Fields], str]] = {
    "PhaseMoved": _describe_phase_move,
    "StepRecorded": _describe_step,
    "VoteCast": _describe_vote,
    "VoteWithdrawn": _with_reason("withdrew a vote"),
    "GateOpened": lambda f: f"opened the gate {gate_label(f)}",
    "PilotEvidenceAttached": lambda f: f"the pilot is done; its evidence is {f['digest'][:12]}",
    "RolloutOpened": _describe_submission,
    "RolloutPaused": _with_reason("paused the rollout"),
    "RolloutResumed": _with_reason("resumed the rollout"),
    "RolloutCancelled": _with_reason("cancelled the rollout"),
    "RolloutEnded": lambda _: "the rollout has ended",
    "RolloutDeleted": lambda _: "deleted the rollout",
    "PreparationRecorded": _describe_preparation,
    "ArtifactsBuilt": lambda f: (
        f"stage {f['stage']} built {pluralize(len(f['manifest']), 'artifact')}: "
        + _join_names([f"{each['name']} {each['version']}" for each in f["manifest"]])
    ),
    "TargetsJoined": lambda f: f"joined: {_join_names([target['node'] for target in f['targets']])}",
    "TargetChanged": _describe_placement,
    "DeadlineExtended": lambda f: (
        f"left {format_duration(f['downtime_s'])} out of the deadline: no daemon was running"
    ),
    "ChangeNeeded": lambda f: "checked, may need the change" + (f": {f['text']}" if f.get("text") else ""),
    "SoakRestarted": lambda _: "restarted the soak: the clock was set back",
    "DriftRecorded": lambda f: (
        f"drifted: check mode would change {_join_names(f['tasks'])}" if f["tasks"] else "has no drift"
    ),
    "NodeOrdered": lambda f: (
        f"ordered: {f['order']}: {f['reason']}" if f["order"] else f"the order ended: {f['reason']}"
    ),
    "NodeAdvanced": _with_reason("advanced"),
    "TeamRulesChanged": lambda f: (
        f"set the rules of team {f['team']}: {pluralize(len(f['windows']), 'window')}, "
        f"canaries {', '.join(f['canaries']) or 'none'}: {f['reason']}"
    ),
    "VerdictRecorded": lambda f: "verdict {id} on its content: {step}: {text}".format_map(f["verdict"]),
    "VerdictCleared": lambda f: _with_reason(f"cleared verdict {f['verdict']}")(f),
    "HoldTaken": _describe_hold,
    "HoldReleased": lambda f: _with_reason(f"released hold {f['source']}/{f['id']}")(f),
    "FreezeStarted": lambda f: f"froze {f['freeze']['scope']}: {f['freeze']['reason']}",
    "FreezeLifted": lambda f: (
        _with_reason(f"lifted the freeze of {f['scope']}")(f) if f.get("scope") else "lifted a freeze"
    ),
    "TrainStored": lambda f: _with_reason(f"train {f['train']['name']}: {', '.join(f['train']['rollouts'])}")(
        f
    ),
    "TrainRemoved": lambda f: _with_reason(f"removed train {f['train']}")(f),
    "RebootsApproved": lambda f: (
        f"approved the reboots of {f['approval']['group']}: {f['approval']['reason']}"
    ),
    "RebootApprovalWithdrawn": lambda f: _with_reason(f"withdrew the approval of reboots {f['approval']}")(f),
    "NodesDiscovered": lambda f: f"the inventory has {_join_names(f['nodes'])}",
    "NodesRemoved": lambda f: f"the inventory no longer has {_join_names(f['names'])}",
    "InventoryAccepted": lambda f: (
        f"accepted the answer of {f['source']}: {pluralize(f['removed'], 'node')} removed: {f['reason']}"
    ),
    "IdentityPinned": _with_reason("accepted what the inventory reports"),
    "HostKeysStored": lambda f: _with_reason(
        f"had host keys stored: {', '.join(f['stored'])}"
        + (f", in place of {', '.join(f['replaced'])}" if f["replaced"] else "")
        + f" (confirmed by {', '.join(f['confirmed_by']) or 'no second source'})"
    )(f),
    "ShellOpened": lambda f: _with_reason(f"opened a shell: {shlex.join(f['command'])}")(f),
    "RequestDenied": lambda f: f"was refused {f['call']}: {f['why']}",
    "LeaderSteppedDown": _with_reason("made the leader step down"),
    "DaemonStarted": lambda f: f"rolloutd {f['version']} started (epoch {f['epoch']})",
    "RunOutputPruned": lambda f: (
        f"removed the output of {pluralize(f['runs'], 'run') if f['runs'] else 'its steps'},"
        f" {format_duration(f['keep_s'])} after the end"
    ),
    "ConfigurationPruned": lambda f: (
        f"removed the configuration records, {format_duration(f['keep_s'])} after it left the inventory"
    ),
    "RecordsPruned": lambda f: (
        (
            f"removed the records of {pluralize(len(f['nodes']), 'node')}"
            if f["nodes"]
            else "removed its records"
        )
        + f", {format_duration(f['keep_s'])} after its end"
    ),
    "NodeCleaned": lambda f: (
        f"removed what ended rollouts had left: {_join_names(f['removed']) or 'nothing'}"
    ),
    "IsolationReleased": lambda f: f"returned to service by {f['kind']}: no hold is left",
    "MismatchSettled": lambda f: f"settled {f['subject']} by the {f['kept']}: {f['reason']}",
    "SettingsChanged": lambda f: f"settings changed: {', '.join(f['changed'])}",
}

EVENT_NAMES = tuple(_FORMATTERS)
