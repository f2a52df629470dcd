"""The rules that tie several keys of a plan together.

They look at what was written, not at a checked model: each judges what it can
read and is silent about the rest, which the types have already named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from zoneinfo import ZoneInfo

from machines.windows import DAYS, Window, longest_opening
from rolloutd.planfile import scalars
from rolloutd.planfile.check import Breach
from rolloutd.planfile.document import Value, walk
from rolloutd.planfile.model import DEFAULT_EXPECTED_S, MAX_ITEMS
from rolloutd.planfile.scalars import Unreadable, duration_text, parse_duration
from rolloutd.planfile.wording import Path, shown

TAKEN_WAVES = ("canary", "fleet")
"""Waves that every plan has."""

_JUDGEMENTS = ("equals", "matches", "exit")


def look(root: Value, *path: str | int) -> Value | None:
    """Return the value at a path, if it is there."""
    value: Value | None = root
    for part in path:
        value = value.child(part) if value is not None else None
    return value


def items(value: Value | None) -> list[Value]:
    """Return the items of a list, or the value itself where one item may stand alone."""
    match value:
        case None:
            return []
        case Value(children=list() as children):
            return children[:MAX_ITEMS]
        case _:
            return [value]


def source_is_one(root: Value) -> Iterator[Breach]:
    """A source is a git ref or a path."""
    source = look(root, "spec", "source")
    if source is None or not isinstance(source.children, dict):
        return
    path, keys = ("spec", "source"), source.children.keys()
    allowed = "{git, ref}, or {path}"
    if "path" in keys and keys & {"git", "ref"}:
        yield Breach(
            path, shown(source.plain), allowed, "a source is a git ref or a path, not both", at_key=True
        )
    elif not keys & {"path", "git", "ref"}:
        yield Breach(path, shown(source.plain), allowed, "the source names neither git nor path", at_key=True)
    elif "path" not in keys and not {"git", "ref"} <= keys:
        lacking = "ref" if "git" in keys else "git"
        yield Breach(path, shown(source.plain), allowed, f"the source lacks `{lacking}`", at_key=True)


def step_rules(root: Value, path: Path, kinds: Sequence[str]) -> Iterator[Breach]:
    """Each step of a list has one kind, and an ssh check one judgement."""
    steps = look(root, *path)
    if steps is None or not isinstance(steps.children, list):
        return
    for index, step in enumerate(items(steps)):
        if not isinstance(step.children, dict):
            continue
        named = [key for key in step.children if key in kinds]
        allowed = "one of: " + ", ".join(kinds)
        if len(named) > 1:
            message = "an item has one kind; begin another item with `- `"
            yield Breach((*path, index, named[1]), ", ".join(named), allowed, message, at_key=True)
        elif not step.children:
            yield Breach((*path, index), "an empty mapping", allowed, "the item names no kind")
        yield from _one_judgement(step, (*path, index))


def _one_judgement(step: Value, path: Path) -> Iterator[Breach]:
    ssh = step.child("ssh")
    if ssh is None or not isinstance(ssh.children, dict):
        return
    named = [key for key in ssh.children if key in _JUDGEMENTS]
    if len(named) > 1:
        message = f"an ssh check judges by one of {', '.join(_JUDGEMENTS)}"
        yield Breach((*path, "ssh", named[1]), ", ".join(named), "only one of them", message, at_key=True)


def gates_need_somebody(root: Value) -> Iterator[Breach]:
    """A gate that asks nobody would be open before anybody looked."""
    for name in ("start", "continue", "proceed"):
        gate = look(root, "spec", "gates", name)
        if gate is None or not isinstance(gate.children, dict):
            continue
        needs = [look(gate, key) for key in ("owner", "each_team")]
        if all(need is None or (need.plain == 0 and not isinstance(need.plain, bool)) for need in needs):
            message = "the gate asks for nobody's vote"
            yield Breach(
                ("spec", "gates", name), shown(gate.plain), "owner or each_team of at least 1", message
            )


def names_are_single(root: Value) -> Iterator[Breach]:
    """Waves and stages are told apart by their names."""
    for path, taken in ((("spec", "waves"), TAKEN_WAVES), (("spec", "maintain"), ())):
        seen = set(taken)
        listed = look(root, *path)
        if listed is None or not isinstance(listed.children, list):
            continue
        for index, item in enumerate(items(listed)):
            name = item.child("name")
            if name is None or not isinstance(name.plain, str):
                continue
            if name.plain in seen:
                message = "the name is taken already"
                yield Breach((*path, index, "name"), name.plain, "another name", message)
            seen.add(name.plain)


def expected_fits_timeout(root: Value) -> Iterator[Breach]:
    """A run that is expected to take longer than its limit is expected to fail."""
    maintain = look(root, "spec", "maintain")
    many = maintain is not None and isinstance(maintain.children, list)
    for index, stage in enumerate(items(maintain)):
        expected, timeout = _seconds(stage.child("expected")), _seconds(stage.child("timeout"))
        limit = 1800 if timeout is None and stage.child("timeout") is None else timeout
        if expected is not None and limit is not None and expected > limit:
            path: Path = ("spec", "maintain", *((index,) if many else ()), "expected")
            message = "the run is expected to take longer than its timeout"
            yield Breach(path, duration_text(expected), f"at most {duration_text(limit)}", message)


def windows_are_open(root: Value, path: Path = ("spec", "windows")) -> Iterator[Breach]:
    """A window ends at another time than it begins."""
    listed = look(root, *path)
    if listed is None or not isinstance(listed.children, list):
        return
    for index, item in enumerate(items(listed)):
        if (
            isinstance(item.children, dict)
            and _clock(item, "from", "00:00") == _clock(item, "to", "24:00") != ""
        ):
            message = "the window ends when it begins; the whole day is 00:00 to 24:00"
            yield Breach((*path, index), shown(item.plain), "different `from` and `to`", message)


def plan_fits_a_window(root: Value) -> Iterator[Breach]:
    """A node whose work fits no window would never start."""
    listed = look(root, "spec", "windows")
    maintain = look(root, "spec", "maintain")
    if listed is None or maintain is None or not isinstance(listed.children, list) or not listed.children:
        return
    windows = [_window(item) for item in items(listed)]
    expected = [_expected(stage) for stage in items(maintain)]
    longest = longest_opening([window for window in windows if window is not None])
    if None in windows or None in expected or math.isinf(longest):
        return
    total = sum(seconds for seconds in expected if seconds is not None)
    if total > longest:
        message = f"the work is expected to take {duration_text(total)} and fits no window"
        allowed = f"a window of at least {duration_text(total)}, or a shorter `maintain.expected`"
        yield Breach(
            ("spec", "windows"), f"at most {duration_text(longest)} at a time", allowed, message, at_key=True
        )


def no_text_is_blank(root: Value) -> Iterator[Breach]:
    """A name or a command of blanks only is a slip."""
    for path, value in walk(root):
        blank = isinstance(value.plain, str) and value.plain.isspace()
        if blank and "vars" not in path and path[-1:] not in (("targets",), ("select",)):
            yield Breach(path, "blanks only", "text", "there is no text between the quotes")


def _seconds(value: Value | None) -> int | None:
    try:
        return None if value is None else parse_duration(value.plain)
    except Unreadable:
        return None


def _expected(stage: Value) -> int | None:
    """Return the seconds a stage is expected to take; None when that cannot be read."""
    expected, timeout = stage.child("expected"), stage.child("timeout")
    if expected is not None:
        return _seconds(expected)
    limit = 1800 if timeout is None else _seconds(timeout)
    return None if limit is None else min(DEFAULT_EXPECTED_S, limit)


def _clock(window: Value, key: str, default: str) -> str:
    value = window.child(key)
    try:
        return default if value is None else scalars.parse_clock(value.plain)
    except Unreadable:
        return ""


def _window(value: Value) -> Window | None:
    """Return the window if all of it can be read."""
    if not isinstance(value.children, dict):
        return None
    days, zone = value.child("days"), value.child("zone")
    start, end = _clock(value, "from", "00:00"), _clock(value, "to", "24:00")
    try:
        names = list(DAYS) if days is None else scalars.parse_days(days.plain)
        key = "UTC" if zone is None else scalars.parse_zone(str(zone.plain))
        numbers = frozenset(DAYS.index(name) for name in names)
        return Window(numbers, scalars.clock_minute(start), scalars.clock_minute(end), ZoneInfo(key))
    except ValueError:
        return None
