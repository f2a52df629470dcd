"""Sentences of the handover and of the comparison with canaries, for the command line and the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from machines.model.timefmt import format_duration
from rolloutd.text import pluralize

if TYPE_CHECKING:  # the command line's start-up counts
    from rolloutd.control.wire import ComparedNode, Comparison
    from rolloutd.control.wire_fleet import HandoverRollout

TIME_UNITS = 2


def describe_change(rollout: HandoverRollout) -> str:
    """Return what happened to a rollout: `opened, 5 nodes changed, n3 failed, ended`."""
    parts = ["opened"] if rollout["opened"] else []
    parts += [f"{pluralize(rollout['changed'], 'node')} changed"] if rollout["changed"] else []
    parts += [f"{', '.join(rollout['failed'])} failed"] if rollout["failed"] else []
    if rollout["ended"]:
        parts.append("ended" if rollout["reason"] is None else rollout["reason"]["text"])
    return ", ".join(parts) or "no change"


def describe_wait(rollout: HandoverRollout) -> str:
    """Return what a rollout waits for: the missing votes of its gates, else its reason; empty if nothing."""
    if rollout["gates"]:
        return "; ".join(f"{gate['gate']}: {gate['missing']}" for gate in rollout["gates"])
    return rollout["reason"]["text"] if rollout["reason"] is not None and not rollout["ended"] else ""


def describe_canaries(found: Comparison) -> str:
    """Return the canaries' number and times: `2 canaries took 30s to 34s`."""
    if found["low_s"] is None or found["high_s"] is None:
        return f"no node of wave {found['canary_wave']} is changed yet, so there is nothing to compare with"
    low, high = (format_duration(seconds, TIME_UNITS) for seconds in (found["low_s"], found["high_s"]))
    times = low if low == high else f"{low} to {high}"
    count = len(found["canaries"])
    return f"{pluralize(count, 'canary', 'canaries')} took {times}"


def describe_outlier(node: ComparedNode) -> str:
    """Return what is unlike the canaries; empty for a node like them."""
    parts = [] if node["time"] == "usual" else [f"{node['time']} than all canaries"]
    if node["extra_tasks"]:
        parts.append(f"changed, but on no canary: {', '.join(node['extra_tasks'])}")
    if node["missing_tasks"]:
        parts.append(f"not changed, but on every canary: {', '.join(node['missing_tasks'])}")
    return "; ".join(parts)
