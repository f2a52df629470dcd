"""The small words of plan and settings files: durations, days, clocks, zones, selectors.

Each type reads what a person may write, answers with the one spelling that is
hashed and stored, and says what is allowed when it cannot.  It knows no file,
no line and no model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any
from zoneinfo import ZoneInfo, available_timezones

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from machines import selector
from machines.windows import DAYS, MINUTES_PER_DAY

MAX_DURATION_S = 366 * 86_400
"""A year: whatever waits longer is forgotten, not planned."""

MAX_PATTERN = 1000
"""Characters of a regular expression: longer ones are not read by reviewers."""

MAX_TEXT = 8192
"""Characters of a command or another text of a step: far below what a command line bears."""

_DURATION = re.compile(r"(?=.)(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})", re.ASCII)
_TEMPLATE = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_GIT_URL = re.compile(
    r"(?:https?|ssh|git|file)://[^\s-][^\s]*|[A-Za-z0-9_][\w.-]*@[A-Za-z0-9][\w.-]*:[^\s-][^\s]*"
)

_NAME = r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$"
_TEAM = r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_NAMESPACE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"

_WHERE = frozenset(
    f"ansible_{name}"
    for name in (
        "host",
        "ssh_host",
        "port",
        "ssh_port",
        "connection",
        "remote_tmp",
        "ssh_executable",
        "limit",
    )
) | {"inventory_hostname", "inventory_hostname_short"}
"""Variables that would send a run to another machine than the one whose slot was taken, fence and all."""

_PASSWORD = re.compile(r"[a-z]+://[^/@\s]*:[^/@\s]+@")

_DURATION_ALLOWED = "a duration such as 90s, 30m, 1h30m or 2d (units d, h, m, s, largest first)"
_CLOCK_ALLOWED = 'a time of day from "00:00" to "24:00"'
_DAYS_ALLOWED = "days such as mon-fri, sat,sun or [mon, wed] of " + ", ".join(DAYS)
_PLAYBOOK_ALLOWED = "a path inside the source, such as sysctl.yml or roles/site.yml"


class Unreadable(ValueError):
    """A word cannot be read; `allowed` says what could."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.message = message
        self.allowed = allowed


def parse_duration(text: object) -> int:
    """Return the seconds of a duration such as `1h30m`; raises Unreadable."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        raise Unreadable("a plain number has no unit", _DURATION_ALLOWED)
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise Unreadable("this is no duration", _DURATION_ALLOWED)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total > MAX_DURATION_S:
        raise Unreadable("the duration is longer than a year", "at most 366d")
    return total


def duration_text(seconds: float) -> str:
    """Return seconds as a person writes them: `1h30m`."""
    rest, text = round(seconds), ""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def parse_days(value: object) -> list[str]:
    """Return the days of `mon-fri`, `sat,sun` or a list of such, in the order of the week."""
    words = value if isinstance(value, list) else [value]
    chosen: set[int] = set()
    for word in words:
        if not isinstance(word, str):
            raise Unreadable("these are no days", _DAYS_ALLOWED)
        for part in word.split(","):
            chosen |= _day_range(part.strip().lower())
    if not chosen:
        raise Unreadable("no day is named", _DAYS_ALLOWED)
    return [DAYS[day] for day in sorted(chosen)]


def _day_range(text: str) -> set[int]:
    first, dash, last = (part.strip() for part in text.partition("-"))
    if first not in DAYS or (dash and last not in DAYS):
        raise Unreadable(f"'{text}' is no day and no range of days", _DAYS_ALLOWED)
    start = DAYS.index(first)
    length = (DAYS.index(last) - start) % 7 if dash else 0
    return {(start + step) % 7 for step in range(length + 1)}


def parse_clock(value: object) -> str:
    """Return a time of day as `HH:MM`; 24:00 is the end of the day."""
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) > 59 or clock_minute(match[0]) > MINUTES_PER_DAY:
        raise Unreadable("this is no time of day", _CLOCK_ALLOWED)
    return f"{int(match[1]):02d}:{match[2]}"


def clock_minute(text: str) -> int:
    """Return the minutes since midnight of `HH:MM`."""
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def parse_zone(name: str) -> str:
    """Return the name of a time zone this machine knows; raises Unreadable with the nearest."""
    try:
        return ZoneInfo(name).key
    except (KeyError, ValueError, OSError):
        near = get_close_matches(name, _zones(), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        message = f"there is no such time zone{hint}"
        raise Unreadable(message, "a name of the IANA time zones, such as UTC or Europe/Amsterdam") from None


@lru_cache(maxsize=1)
def _zones() -> tuple[str, ...]:
    return tuple(sorted(available_timezones()))


def _canonical_selector(text: str) -> str:
    return selector.parse(text).canonical()


def _label_key(text: str) -> str:
    parsed = selector.parse(text)
    exists = len(parsed.requirements) == 1 and parsed.requirements[0].operator is selector.Operator.EXISTS
    if not exists or text.strip() != text:
        raise Unreadable("this is no label key", "the key of a label, such as rack or example.com/rack")
    return text


def parse_pattern(text: str) -> str:
    """Return a regular expression that compiles; templates in it stand for any text."""
    if len(text) > MAX_PATTERN:
        raise Unreadable("the regular expression is too long", f"at most {MAX_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(_TEMPLATE.sub("x", text))
    except (re.error, OverflowError) as error:
        raise Unreadable(
            f"the regular expression does not compile: {error}", "a regular expression of Python"
        ) from None
    except RecursionError:
        raise Unreadable("the regular expression is nested too deeply", "a simpler one") from None
    return check_template(text)


def check_template(text: str) -> str:
    """Return the text if its `{{ ... }}` can be rendered; jinja2 is imported only where one stands."""
    if "{{" in text or "}}" in text:
        from rolloutd.planfile import render

        render.check(text)
    return text


def _playbook(text: str) -> str:
    parts = text.split("/")
    if text.startswith("-") or not {"", ".."}.isdisjoint(parts):
        raise Unreadable("this path leaves the source, or is none", _PLAYBOOK_ALLOWED)
    return check_template(text)


def _git_url(text: str) -> str:
    if _PASSWORD.match(text):
        raise Unreadable(
            "a password does not belong in a plan, which many may read",
            "a URL without one: git asks the credential helper, or the key, of the daemon's user",
        )
    if not _GIT_URL.fullmatch(text):
        raise Unreadable(
            "git is not asked for this", "https://host/repo.git, ssh://host/repo.git or user@host:repo.git"
        )
    return text


def _git_ref(text: str) -> str:
    bad = text.startswith(("-", "/")) or ".." in text or "@{" in text or re.search(r"[\s~^:?*\[\\]", text)
    if bad:
        raise Unreadable("this is no name of a commit", "a tag, a branch or a commit, such as v1.4.2")
    return text


def _own_variable(text: str) -> str:
    if text in _WHERE:
        raise Unreadable(
            "a plan does not say where its nodes are",
            "variables of the change; where a node is and how it is reached is the inventory's word",
        )
    return text


def _matching(pattern: str, words: str) -> Callable[[str], str]:
    compiled = re.compile(pattern.strip("^$"), re.ASCII)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise Unreadable("this is no good name", words)
        return text

    return check


def _text_of_number(value: object) -> object:
    """Whole numbers have one spelling, so the quotes may be left out; others do not, so they may not."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _at_least(least: int, words: str) -> Callable[[int], int]:
    def check(seconds: int) -> int:
        if seconds < least:
            raise Unreadable("this duration is too short", words)
        return seconds

    return check


def schema_of(**keywords: Any) -> WithJsonSchema:
    """Say in JSON Schema what a person may write, where the type alone does not."""
    return WithJsonSchema(keywords)


_DURATION_SCHEMA = schema_of(
    type="string", pattern=r"^(?=.)(\d{1,6}d)?(\d{1,6}h)?(\d{1,6}m)?(\d{1,9}s)?$", examples=["1h30m"]
)

Duration = Annotated[int, BeforeValidator(parse_duration), _DURATION_SCHEMA]
Limit = Annotated[
    int, BeforeValidator(parse_duration), AfterValidator(_at_least(1, "at least 1s")), _DURATION_SCHEMA
]
SelectorText = Annotated[str, Field(max_length=selector.MAX_TEXT), AfterValidator(_canonical_selector)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317), AfterValidator(_label_key)]
Days = Annotated[
    list[str],
    BeforeValidator(parse_days),
    schema_of(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]),
]
ClockText = Annotated[
    str, BeforeValidator(parse_clock), schema_of(type="string", pattern=r"^\d{1,2}:[0-5]\d$")
]
Zone = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(parse_zone)]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(parse_pattern)]
Templated = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(check_template)]
Answer = Annotated[
    str,
    BeforeValidator(_text_of_number),
    Field(max_length=MAX_TEXT),
    AfterValidator(check_template),
    schema_of(type=["string", "integer"], maxLength=MAX_TEXT),
]
Reference = Annotated[
    str,
    BeforeValidator(_text_of_number),
    Field(max_length=200),
    schema_of(type=["string", "integer"], maxLength=200),
]
Playbook = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_playbook)]
GitUrl = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_git_url)]
GitRef = Annotated[str, Field(min_length=1, max_length=250), AfterValidator(_git_ref)]
Name = Annotated[
    str,
    AfterValidator(
        _matching(_NAME, "small letters, digits, '-' and '.', a letter or digit at both ends, at most 63")
    ),
    schema_of(type="string", pattern=_NAME),
]
TeamName = Annotated[
    str,
    AfterValidator(_matching(_TEAM, "the name of a team: letters, digits, '-', '_' and '.', at most 63")),
    schema_of(type="string", pattern=_TEAM),
]
Namespace = Annotated[
    str,
    AfterValidator(
        _matching(_NAMESPACE, "the name of a namespace: small letters, digits and '-', at most 63")
    ),
    schema_of(type="string", pattern=_NAMESPACE),
]
VariableName = Annotated[
    str,
    AfterValidator(_matching(_VARIABLE, "the name of a variable: letters, digits and '_', no digit first")),
    AfterValidator(_own_variable),
    schema_of(type="string", pattern=_VARIABLE),
]
