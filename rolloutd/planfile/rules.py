"""Rules that concern several keys of a plan.

They examine the text as written, not a checked model: each judges what it can read and ignores the rest,
which the types have already reported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from zoneinfo import ZoneInfo

from machines.model.timefmt import format_duration
from machines.model.windows import DAYS, Window, longest_opening
from rolloutd.planfile.diagnostic_text import Path, describe_value
from rolloutd.planfile.document import Value, walk
from rolloutd.planfile.model import DEFAULT_EXPECTED_S
from rolloutd.planfile.prepare import PrepareItem, default_stage_name
from rolloutd.planfile.steps import usable_adapters
from rolloutd.planfile.validation import RuleViolation
from rolloutd.plugin import field_types
from rolloutd.plugin.field_types import MAX_ITEMS, InvalidValue, parse_duration

PREPARE_KINDS = tuple(PrepareItem.model_fields)

RESERVED_WAVES = ("canary", "fleet")
"""Waves that every plan has."""

RESERVED_PREPARE_STAGES = ("cleanup",)
"""Stages of cancelled rollouts, in their records."""


def value_at(root: Value, *path: str | int) -> Value | None:
    value: Value | None = root
    for part in path:
        value = value.child(part) if value is not None else None
    return value


def as_list(value: Value | None) -> list[Value]:
    """Return the items of a list, or a single value that may replace a list."""
    match value:
        case None:
            return []
        case Value(children=list() as children):
            return children[:MAX_ITEMS]
        case _:
            return [value]


def source_is_git_or_path(root: Value) -> Iterator[RuleViolation]:
    source = value_at(root, "spec", "source")
    if source is None or not isinstance(source.children, dict):
        return
    path, keys = ("spec", "source"), source.children.keys()
    allowed = "{git, ref}, or {path}"
    if "path" in keys and keys & {"git", "ref"}:
        yield RuleViolation(
            path,
            describe_value(source.data),
            allowed,
            "a source is a git ref or a path, not both",
            at_key=True,
        )
    elif not keys & {"path", "git", "ref"}:
        yield RuleViolation(
            path, describe_value(source.data), allowed, "the source names neither git nor path", at_key=True
        )
    elif "path" not in keys and not {"git", "ref"} <= keys:
        lacking = "ref" if "git" in keys else "git"
        yield RuleViolation(
            path, describe_value(source.data), allowed, f"the source lacks `{lacking}`", at_key=True
        )


def steps_are_well_formed(root: Value, path: Path, group: str) -> Iterator[RuleViolation]:
    """Each step of a list has one kind, and at most one of the keys that exclude each other."""
    adapters = usable_adapters(group)
    steps = value_at(root, *path)
    if steps is None or not isinstance(steps.children, list):
        return
    for index, step in enumerate(as_list(steps)):
        if not isinstance(step.children, dict):
            continue
        named = [key for key in step.children if key in adapters]
        allowed = "one of: " + ", ".join(adapters)
        if len(named) > 1:
            message = "an item has one kind; begin another item with `- `"
            yield RuleViolation((*path, index, named[1]), ", ".join(named), allowed, message, at_key=True)
        elif not step.children:
            yield RuleViolation((*path, index), "an empty mapping", allowed, "the item names no kind")
        for kind in named:
            params, written = adapters[kind].params, step.children[kind].children
            exclusive = params.exclusive if params is not None else ()
            given = [key for key in written if key in exclusive] if isinstance(written, dict) else []
            if len(given) > 1:
                message = f"`{kind}` takes only one of {', '.join(exclusive)}"
                place = (*path, index, kind, given[1])
                yield RuleViolation(place, ", ".join(given), "only one of them", message, at_key=True)


def confirmation_is_one_check(root: Value) -> Iterator[RuleViolation]:
    """A check that confirms a guarded change runs once, on the isolated node."""
    path: Path = ("spec", "guard", "confirm")
    for index, step in enumerate(as_list(value_at(root, *path))):
        for kind, params in step.children.items() if isinstance(step.children, dict) else ():
            named = params.children if isinstance(params.children, dict) else {}
            for key in ("in_service", "baseline", "repair"):
                if key in named:
                    message = f"`{key}` has no meaning in `confirm`"
                    yield RuleViolation((*path, index, kind, key), key, "no such key", message, at_key=True)


def pilot_is_a_node_or_waived(root: Value) -> Iterator[RuleViolation]:
    pilot = value_at(root, "spec", "pilot")
    if pilot is None or not isinstance(pilot.children, dict):
        return
    if len(pilot.children.keys() & {"node", "waived"}) != 1:
        yield RuleViolation(
            ("spec", "pilot"),
            describe_value(pilot.data),
            "{node}, or {waived}",
            "a pilot is a node, or waived for a reason",
            at_key=True,
        )


def rollbacks_are_possible(root: Value) -> Iterator[RuleViolation]:
    """`on_failure` needs a `rollback`, and `at_most` limits nothing without it."""
    wanted, path = value_at(root, "spec", "on_failure"), ("spec", "on_failure")
    if wanted is None or wanted.data == "pause":
        if value_at(root, "spec", "at_most") is not None:
            text = "at_most limits what on_failure rolls back"
            yield RuleViolation(
                ("spec", "at_most"), "", "only with on_failure: rollback-...", text, at_key=True
            )
    elif value_at(root, "spec", "rollback") is None:
        text = "the plan has no rollback"
        yield RuleViolation(path, describe_value(wanted.data), "pause, or a rollback", text)


def gates_need_votes(root: Value) -> Iterator[RuleViolation]:
    """A gate that requires no vote would open at once."""
    for name in ("pilot", "start", "continue", "proceed"):
        gate = value_at(root, "spec", "gates", name)
        if gate is None or not isinstance(gate.children, dict):
            continue
        needs = [value_at(gate, key) for key in ("owner", "each_team")]
        if all(need is None or (need.data == 0 and not isinstance(need.data, bool)) for need in needs):
            message = "the gate requires no vote"
            yield RuleViolation(
                ("spec", "gates", name),
                describe_value(gate.data),
                "owner or each_team of at least 1",
                message,
            )


def prepare_items(root: Value) -> tuple[Path, list[Value]]:
    """Return the prepare stages as written, with the path of their list."""
    prepare = value_at(root, "spec", "prepare")
    stages = value_at(root, "spec", "prepare", "stages")
    if prepare is not None and isinstance(prepare.children, list):
        return ("spec", "prepare"), as_list(prepare)
    is_list = stages is not None and isinstance(stages.children, list)
    return ("spec", "prepare", "stages"), as_list(stages) if is_list else []


def prepare_stages_are_well_formed(root: Value) -> Iterator[RuleViolation]:
    """Each has one kind, and a name that no other has; an artifact comes to a node in one way."""
    path, items = prepare_items(root)
    mappings = [item.children if isinstance(item.children, dict) else {} for item in items]
    counts = Counter(kind for each in mappings for kind in each if kind in PREPARE_KINDS)
    seen: Counter[str] = Counter()
    names = set(RESERVED_PREPARE_STAGES)
    for index, item in enumerate(items):
        if not isinstance(item.children, dict):
            continue
        kinds = [str(key) for key in item.children if key in PREPARE_KINDS]
        if len(item.children) != 1:
            message = "an item has one kind; begin another item with `- `"
            found = ", ".join(map(str, item.children)) or "an empty mapping"
            yield RuleViolation((*path, index), found, "one of: " + ", ".join(PREPARE_KINDS), message)
        for kind in kinds:
            name = value_at(item, kind, "name")
            seen[kind] += 1
            text = default_stage_name(kind, seen[kind], counts[kind])
            if name is not None and name.data is not None:
                text = str(name.data)
            if text in names:
                place = (*path, index, kind) if name is None else (*path, index, kind, "name")
                yield RuleViolation(place, text, "another name", "the name is taken already")
            names.add(text)
        yield from _method_fits_keys(item, (*path, index))


def _method_fits_keys(item: Value, path: Path) -> Iterator[RuleViolation]:
    method, playbook = value_at(item, "stage", "method"), value_at(item, "stage", "playbook")
    runs = method is not None and method.data == "playbook"
    if runs and playbook is None:
        message = "`method: playbook` names no playbook"
        yield RuleViolation((*path, "stage", "method"), "playbook", "a `playbook` too", message)
    if playbook is not None and not runs:
        message = "only `method: playbook` runs a playbook"
        yield RuleViolation((*path, "stage", "playbook"), str(playbook.data), "`method: playbook`", message)


def names_are_unique(root: Value) -> Iterator[RuleViolation]:
    """Waves and stages are identified by their names."""
    pilot = ("pilot",) if value_at(root, "spec", "pilot", "node") is not None else ()
    for path, taken in ((("spec", "waves"), (*RESERVED_WAVES, *pilot)), (("spec", "maintain"), ())):
        seen = set(taken)
        listed = value_at(root, *path)
        if listed is None or not isinstance(listed.children, list):
            continue
        for index, item in enumerate(as_list(listed)):
            name = item.child("name")
            if name is None or not isinstance(name.data, str):
                continue
            if name.data in seen:
                message = "the name is taken already"
                yield RuleViolation((*path, index, "name"), name.data, "another name", message)
            seen.add(name.data)


def expected_fits_timeout(root: Value) -> Iterator[RuleViolation]:
    """A run that is expected to take longer than its limit is expected to fail."""
    maintain = value_at(root, "spec", "maintain")
    many = maintain is not None and isinstance(maintain.children, list)
    for index, stage in enumerate(as_list(maintain)):
        expected, timeout = _seconds(stage.child("expected")), _seconds(stage.child("timeout"))
        limit = 1800 if timeout is None and stage.child("timeout") is None else timeout
        if expected is not None and limit is not None and expected > limit:
            path: Path = ("spec", "maintain", *((index,) if many else ()), "expected")
            message = "the run is expected to take longer than its timeout"
            yield RuleViolation(path, format_duration(expected), f"at most {format_duration(limit)}", message)


def windows_are_not_empty(root: Value, path: Path = ("spec", "windows")) -> Iterator[RuleViolation]:
    """A window ends at another time than it begins."""
    listed = value_at(root, *path)
    if listed is None or not isinstance(listed.children, list):
        return
    for index, item in enumerate(as_list(listed)):
        if (
            isinstance(item.children, dict)
            and _clock(item, "from", "00:00") == _clock(item, "to", "24:00") != ""
        ):
            message = "the window ends when it begins; the whole day is 00:00 to 24:00"
            yield RuleViolation(
                (*path, index), describe_value(item.data), "different `from` and `to`", message
            )


def work_fits_a_window(root: Value) -> Iterator[RuleViolation]:
    """A node whose work fits no window would never start."""
    listed = value_at(root, "spec", "windows")
    maintain = value_at(root, "spec", "maintain")
    if listed is None or maintain is None or not isinstance(listed.children, list) or not listed.children:
        return
    windows = [_window(item) for item in as_list(listed)]
    expected = [_expected_seconds(stage) for stage in as_list(maintain)]
    longest = longest_opening([window for window in windows if window is not None])
    if None in windows or None in expected or math.isinf(longest):
        return
    total = sum(seconds for seconds in expected if seconds is not None)
    if total > longest:
        message = f"the work is expected to take {format_duration(total)} and fits no window"
        allowed = f"a window of at least {format_duration(total)}, or a shorter `maintain.expected`"
        yield RuleViolation(
            ("spec", "windows"),
            f"at most {format_duration(longest)} at a time",
            allowed,
            message,
            at_key=True,
        )


def text_is_not_blank(root: Value) -> Iterator[RuleViolation]:
    """A blank name or command is a mistake."""
    for path, value in walk(root):
        blank = isinstance(value.data, str) and value.data.isspace()
        if blank and "vars" not in path and path[-1:] not in (("targets",), ("select",)):
            yield RuleViolation(path, "blanks only", "text", "the text is empty")


def _seconds(value: Value | None) -> int | None:
    try:
        return None if value is None else parse_duration(value.data)
    except InvalidValue:
        return None


def _expected_seconds(stage: Value) -> int | None:
    """Return the seconds a stage is expected to take, None when they cannot be read."""
    expected, timeout = stage.child("expected"), stage.child("timeout")
    if expected is not None:
        return _seconds(expected)
    limit = 1800 if timeout is None else _seconds(timeout)
    return None if limit is None else min(DEFAULT_EXPECTED_S, limit)


def _clock(window: Value, key: str, default: str) -> str:
    value = window.child(key)
    try:
        return default if value is None else field_types.parse_clock(value.data)
    except InvalidValue:
        return ""


def _window(value: Value) -> Window | None:
    if not isinstance(value.children, dict):
        return None
    days, zone = value.child("days"), value.child("zone")
    start, end = _clock(value, "from", "00:00"), _clock(value, "to", "24:00")
    try:
        names = list(DAYS) if days is None else field_types.parse_days(days.data)
        key = "UTC" if zone is None else field_types.parse_time_zone(str(zone.data))
        numbers = frozenset(DAYS.index(name) for name in names)
        return Window(numbers, field_types.clock_minute(start), field_types.clock_minute(end), ZoneInfo(key))
    except ValueError:
        return None
