"""Texts about one object: as YAML, and a node's description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rolloutd.control.nodes import wire_nodes
from rolloutd.control.plans import wire_plans
from rolloutd.texts import event_text
from tui.formatting import formatting
from tui.formatting.lines import UNCUT_WIDTH, sanitize
from tui.state.values import parse_timestamp

RECORDS = ("current", "previous", "invalid")


def to_yaml(value: Any) -> str:
    import yaml  # the console's start-up counts

    # The page wraps its lines.
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=UNCUT_WIDTH)
    return text


def describe_node(
    rollout: str, detail: wire_nodes.NodeDetail, configuration: wire_plans.NodeConfiguration | None
) -> str:
    """Return what a node is, why it does not move, its steps with their output, and its configuration."""
    return "\n".join([*_facts(rollout, detail), *_reasons(detail), *_steps(detail), *_records(configuration)])


def _facts(rollout: str, detail: wire_nodes.NodeDetail) -> Iterator[str]:
    outcome = f" ({detail['outcome']})" if detail["outcome"] else ""
    fields = {
        "Name": detail["node"],
        "Rollout": rollout,
        "Team": detail["team"] or "none",
        "Pools": ", ".join(detail["pools"]),
        "Wave": detail["wave"],
        "Phase": f"{detail['phase']}{outcome}",
        "Since": _time(detail["since"]),
        "Attempt": detail["attempt"],
        "In service": "no" if detail["isolated"] else "yes",
    }
    for name, value in fields.items():
        yield f"{f'{name}:':<12}{value}"


def _reasons(detail: wire_nodes.NodeDetail) -> Iterator[str]:
    yield from ("", "WHY")
    reason, failure = detail["reason"], detail["failure"]
    if failure is not None:
        yield f"  failed in {event_text.step_label(failure['step'])} of attempt {failure['attempt']}:"
        yield from _indented(failure["message"])
    if reason is not None:
        if failure is None:
            yield f"  {reason['text']}"
        yield from _optional("since", _time(reason["since"]) if reason["since"] else "")
        yield from _optional("ended by", reason["lifted_by"] or "")
    if failure is None and reason is None:
        yield "  nothing blocks it"


def _optional(name: str, text: str) -> Iterator[str]:
    if text:
        yield f"    {name}: {text}"


def _steps(detail: wire_nodes.NodeDetail) -> Iterator[str]:
    yield from ("", "STEPS")
    if not detail["steps"]:
        yield "  no step has run on it yet"
    for step in detail["steps"]:
        began, ended = parse_timestamp(step["began_at"]) or 0.0, parse_timestamp(step["at"]) or 0.0
        is_running, label = step["state"] == "intended", event_text.step_label(step["step"])
        action = "" if label.startswith(step["action"]) else f"{step['action']} "
        took = "" if is_running else f", {formatting.format_clock(ended - began)}"
        state = f"{'running' if is_running else step['state']} ({formatting.format_datetime(began)}{took})"
        yield f"  attempt {step['attempt']}: {action}{label}: {state}"
        yield from _indented(step["text"])
        hidden = "output: hidden; only the node's team may read it"
        yield from _indented(hidden if step["output"] is None else step["output"])


def _records(configuration: wire_plans.NodeConfiguration | None) -> Iterator[str]:
    yield from ("", "CONFIGURATION")
    records: Mapping[str, Any] = configuration or {}
    if not any(records.get(name) for name in RECORDS):
        yield "  no run has reached it"
    for name in RECORDS:
        record = records.get(name)
        if record is not None:
            yield f"  {name}: {record['content'][:12]} of {record['rollout']}, {_time(record['at'])}"
            if record["evidence"] is not None:
                yield from _indented(f"{record['evidence']['step']}: {record['evidence']['text']}")
            yield from _indented(to_yaml(record["values"]))


def _indented(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield f"    {sanitize(line)}"


def _time(instant: str | None) -> str:
    at = parse_timestamp(instant)
    return "" if at is None else formatting.format_datetime(at)
