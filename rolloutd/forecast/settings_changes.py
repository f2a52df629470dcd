"""What-if of the settings: `PATH=VALUE` texts, and the limits that they make.

The daemon does this part itself, because only it has the settings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from machines.facts.index import Index
from machines.model.limits import Limits
from machines.model.timefmt import format_duration
from rolloutd.errors import Refused
from rolloutd.planfile.schema import known_keys, schema_at
from rolloutd.settings import Settings, schema
from rolloutd.settings.compile import compile_limits
from rolloutd.texts.formats import suggest_name

SETTINGS_KEYS = ("pools", "max_parallel", "teams")
"""The settings that change when nodes start."""

_ASSIGNMENT = re.compile(r"([\w.\-/]+)=(.*)", re.DOTALL)

Change = tuple[tuple[str, ...], Any]
"""A path and its new value."""


def split_changes(sets: Sequence[str]) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """Return the changes of the plan and those of the settings; raises Refused."""
    plan_sets: list[Change] = []
    settings_sets: list[Change] = []
    for text in sets:
        assignment = _ASSIGNMENT.fullmatch(text)
        if assignment is None:
            raise refused(f"--set {text}", "not PATH=VALUE; write pools.rack.max_unavailable=2")
        path = tuple(assignment[1].split("."))
        try:
            value = yaml.safe_load(assignment[2])
        except yaml.YAMLError:
            raise refused(f"--set {text}", "the value is not YAML; write it as in the file") from None
        if path[0] == "plan":
            if not all(path[1:]) or len(path) == 1:
                raise refused(f"--set {text}", "it names no key of the plan; write plan.soak=30m")
            plan_sets.append((path[1:], value))
        elif path[0] in SETTINGS_KEYS:
            settings_sets.append((path, value))
        else:
            kinds = ("plan.soak", "plan.max_parallel", *SETTINGS_KEYS)
            action = suggest_name(path[0], ("plan", *SETTINGS_KEYS), f"use one of {', '.join(kinds)}")
            raise refused(f"--set {text}", f"'{path[0]}' is unknown; {action}")
    return tuple(plan_sets), tuple(settings_sets)


def changed_limits(settings: Settings, sets: Sequence[Change], index: Index) -> Limits:
    """Return the limits of the changed settings; raises Refused for what does not exist."""
    values: dict[str, Any] = {}
    for path, value in sets:
        key = path[0]
        if key not in values:
            current = TypeAdapter(Any).dump_python(getattr(settings, key), mode="json", by_alias=True)
            values[key] = as_written(schema(), current, (key,))
            if key == "pools":  # `team` is a pool key of every settings file
                values[key].setdefault("team", {})
        _require_known(path, values[key], index)
        values[key] = assigned(values[key], path[1:], value, ".".join(path))
    fields = type(settings).model_fields
    checked: dict[str, Any] = {}
    for key, value in values.items():
        with_bounds: Any = Annotated[fields[key].annotation, fields[key]]
        try:
            checked[key] = TypeAdapter[Any](with_bounds).validate_python(value)
        except ValidationError as wrong:
            raise _refusal(key, wrong) from None
    return compile_limits(settings.model_copy(update=checked))


def _refusal(key: str, wrong: ValidationError) -> Refused:
    problem = wrong.errors()[0]
    action = f"see rolloutctl explain settings.{key}"
    if problem["type"] != "extra_forbidden":
        return refused(f"--set {key}", f"{problem['msg']}; {action}")
    *parents, name = problem["loc"]
    known = known_keys(schema(), (key, *parents))
    return refused(f"--set {key}", f"no key '{name}'; {suggest_name(str(name), known, action)}")


def _require_known(path: Sequence[str], value: Any, index: Index) -> None:
    """Refuse a pool or a team that does not exist: a mistyped one would change nothing."""
    if len(path) > 1 and isinstance(value, dict) and path[1] not in value:
        known = list(value)
        action = suggest_name(path[1], known, f"known are {', '.join(known[:10])}")
        raise refused(f"--set {'.'.join(path)}", f"{path[0]} has no '{path[1]}'; {action}")
    if path[0] == "pools" and len(path) > 3 and path[2] == "values":
        pools = {pool for pool in index.pool_ids() if pool.startswith(f"{path[1]}/")}
        if f"{path[1]}/{path[3]}" not in pools:
            action = suggest_name(f"{path[1]}/{path[3]}", pools, "see rolloutctl locks")
            raise refused(f"--set {'.'.join(path)}", f"no pool {path[1]}/{path[3]}; {action}")


def assigned(value: Any, path: Sequence[str], new: Any, subject: str) -> Any:
    """Return a value with the part at the path replaced.

    An only entry needs no number, because the file may have it without a list: `maintain: {...}`.
    """
    if not path:
        return new
    key, *rest = path
    if isinstance(value, list):
        number = int(key) if key.isdecimal() else 0
        if number >= len(value) or (not key.isdecimal() and len(value) > 1):
            last = len(value) - 1
            raise refused(f"--set {subject}", f"the list has no entry '{key}'; name one, 0 to {last}")
        rest = rest if key.isdecimal() else [key, *rest]
        return [assigned(each, rest, new, subject) if n == number else each for n, each in enumerate(value)]
    if not isinstance(value, dict | None):
        raise refused(f"--set {subject}", f"there is no key '{key}' below a value; name a key of the file")
    return {**(value or {}), key: assigned((value or {}).get(key), rest, new, subject)}


def as_written(schema: dict[str, Any], value: Any, path: tuple[str | int, ...]) -> Any:
    """Return a part of a file's content as people write it: durations and rates are texts again."""
    if isinstance(value, dict):
        return {key: as_written(schema, part, (*path, key)) for key, part in value.items()}
    if isinstance(value, list):
        return [as_written(schema, part, (*path, number)) for number, part in enumerate(value)]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    node = schema_at(schema, path) or {}
    choices = {each.get("type"): each for each in (node, *node.get("anyOf", ()))}
    if "string" not in choices or "integer" in choices:
        return value
    is_rate = "B)/s" in choices["string"].get("pattern", "")
    return f"{value // 1024}KiB/s" if is_rate else format_duration(value)


def refused(subject: str, problem: str) -> Refused:
    return Refused("wrong-what-if", f"{subject}: {problem}")
