"""A plan's content as paths and values, as people write them, and the differences of two plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from machines.model.timefmt import format_duration
from rolloutd.control import wire_plans
from rolloutd.planfile import written_content

DURATION_KEYS = frozenset(
    {
        "soak",
        "probation",
        "timeout",
        "expected",
        "within",
        "drain_timeout",
        "isolate",
        "votes",
        "idle_for",
        "poll",
    }
)
"""Plan keys whose values are durations, stored in seconds."""

_PREFIX = "spec."


def plan_values(content: Mapping[str, Any]) -> list[wire_plans.PlanValue]:
    """Return what the author of a plan wrote, in plan order."""
    return [
        {"path": path.removeprefix(_PREFIX), "value": format_value(path, value)}
        for path, value in _flatten(written_content(content))
    ]


def plan_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[wire_plans.PlanDifference]:
    """Return the values that differ; a default that is written out now is not a difference."""
    old, new = dict(_flatten(before)), dict(_flatten(after))
    paths = [*new, *(path for path in old if path not in new)]
    return [
        {
            "path": path.removeprefix(_PREFIX),
            "before": format_value(path, old[path]) if path in old else None,
            "after": format_value(path, new[path]) if path in new else None,
        }
        for path in paths
        if path not in old or path not in new or old[path] != new[path]
    ]


def format_step(kind: str, params: Mapping[str, Any]) -> str:
    """Return an item of a list of steps in one line: `reachable: within 30s`."""
    given = {key: value for key, value in params.items() if value not in (None, "", [], {})}
    text = ", ".join(f"{key} {format_value(key, value)}" for key, value in given.items())
    return f"{kind}: {text}" if text else kind


def format_value(path: str, value: Any) -> str:
    """Return the value at a path of a plan in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    is_duration = isinstance(value, int | float) and path.rpartition(".")[2] in DURATION_KEYS
    return format_duration(value) if is_duration else str(value)


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths that have a value; an item without parameters, such as `reachable: {}`, counts."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _flatten(inner, f"{path}[{number}]")
    elif value not in (None, []):
        yield path, value
