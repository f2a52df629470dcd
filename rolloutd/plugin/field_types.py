"""Types of the values in plan and settings files: durations, days, selectors, paths.

Each type accepts what people write and returns the one spelling that is hashed
and stored; its error says what is allowed.  It knows no file, line or model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo, available_timezones

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from machines.model import selector
from machines.model.windows import DAYS, MINUTES_PER_DAY
from rolloutd.plugin.patterns import InvalidPattern, compile_pattern
from rolloutd.plugin.shell_quotes import unclosed_quote
from rolloutd.texts.secret_urls import has_secret

MAX_DURATION_S = 366 * 86_400
"""One year: users forget about longer waits."""

MAX_PATTERN_CHARS = 1000
"""Characters of a regular expression: reviewers do not read longer ones."""

MAX_TEXT_CHARS = 8192
"""Characters of a command or another text of a step: far below the limit of a command line."""
MAX_PATH_CHARS = 1024
"""Characters of a path on a node: Linux allows 4096, and people write fewer."""

MAX_PATH_BYTES, MAX_NAME_BYTES = 4095, 255
"""Bytes of a path and of one name in it on the daemon's machine (PATH_MAX and NAME_MAX of Linux)."""

MAX_ITEMS = 100
"""Items of a list, such as waves, stages, windows or inventory sources."""

MAX_NODES = 10_000
"""Nodes that a budget names: the largest fleet the daemon is measured with."""

MAX_RATE_BPS = 1 << 40
"""Bytes a second: a TiB, more than a network of the next years carries."""

# ASCII, because \d also matches the digits of other scripts, which int() reads.
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

_CONNECTION_VARIABLES = frozenset(
    f"ansible_{name}"
    for name in (
        "host",
        "ssh_host",
        "port",
        "ssh_port",
        "connection",
        "remote_tmp",
        "ssh_executable",
        "ssh_args",
        "ssh_common_args",
        "ssh_extra_args",
        "paramiko_proxy_command",
        "host_key_checking",
        "ssh_host_key_checking",
        "limit",
    )
) | {"inventory_hostname", "inventory_hostname_short"}
"""Variables that would send a run and its fence to another machine than the one whose slot it holds."""

_PERCENT = re.compile(r"(100|[0-9]{1,2})%")
_RATE = re.compile(r"(\d{1,9}) ?(KiB|MiB|GiB)/s", re.ASCII)
_RATE_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_RATE_ALLOWED = "a rate such as 500KiB/s, 200MiB/s or 1GiB/s"
_DURATION_ALLOWED = "a duration such as 90s, 30m, 1h30m or 2d (units d, h, m, s, largest first)"
_CLOCK_ALLOWED = 'a time of day from "00:00" to "24:00"'
_DAYS_ALLOWED = "days such as mon-fri, sat,sun or [mon, wed] of " + ", ".join(DAYS)
_PLAYBOOK_ALLOWED = "a path inside the source, such as sysctl.yml or roles/site.yml"

MAX_VOTES = 20
"""Votes that a gate may require of one group: more people than a team on call has."""


class InvalidValue(ValueError):
    """A value that is not allowed; `allowed` describes those that are.

    A rule on several keys names the wrong one with `at`, a path from the value that was validated, in which
    `..` is its section.  `at_key` places the mistake at the key.  `found` replaces the text of the value.
    """

    def __init__(
        self,
        message: str,
        allowed: str,
        *,
        at: tuple[str | int, ...] = (),
        at_key: bool = False,
        found: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.allowed = allowed
        self.at = at
        self.at_key = at_key
        self.found = found


class InvalidValues(ValueError):
    """Several values that are not allowed, of one section."""

    def __init__(self, errors: tuple[InvalidValue, ...]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors


def raise_invalid(errors: Iterable[InvalidValue]) -> None:
    """Raise InvalidValues if there are any."""
    if found := tuple(errors):
        raise InvalidValues(found)


def taken_names(
    names: Iterable[tuple[str, tuple[str | int, ...]]], taken: Iterable[str] = ()
) -> Iterator[InvalidValue]:
    """Yield an error for each name that an earlier one has, or that is taken; each with its path."""
    seen = set(taken)
    for name, path in names:
        if name in seen:
            yield InvalidValue("the name is taken already", "another name", at=path, found=name)
        seen.add(name)


def parse_duration(text: object) -> int:
    """Return the seconds of a duration such as `1h30m`; raises InvalidValue."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        raise InvalidValue("a plain number has no unit", _DURATION_ALLOWED)
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidValue("this is not a duration", _DURATION_ALLOWED)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total > MAX_DURATION_S:
        raise InvalidValue("the duration is longer than a year", "at most 366d")
    return total


def parse_days(value: object) -> list[str]:
    """Return the days of `mon-fri`, `sat,sun` or a list of such, in the order of the week."""
    words = value if isinstance(value, list) else [value]
    chosen: set[int] = set()
    for word in words:
        if not isinstance(word, str):
            raise InvalidValue("these are no days", _DAYS_ALLOWED)
        for part in word.split(","):
            chosen |= _day_range(part.strip().lower())
    if not chosen:
        raise InvalidValue("no day is named", _DAYS_ALLOWED)
    return [DAYS[day] for day in sorted(chosen)]


def _day_range(text: str) -> set[int]:
    first, dash, last = (part.strip() for part in text.partition("-"))
    if first not in DAYS or (dash and last not in DAYS):
        raise InvalidValue(f"'{text}' is neither a day nor a range of days", _DAYS_ALLOWED)
    start = DAYS.index(first)
    length = (DAYS.index(last) - start) % 7 if dash else 0
    return {(start + step) % 7 for step in range(length + 1)}


def parse_rate(text: object) -> int:
    """Return the bytes a second of a rate such as `200MiB/s`; raises InvalidValue."""
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidValue("this is not a rate", _RATE_ALLOWED)
    rate = int(match[1]) * _RATE_UNITS[match[2]]
    if not 0 < rate <= MAX_RATE_BPS:
        raise InvalidValue("the rate is out of range", "at least 1KiB/s and at most 1024GiB/s")
    return rate


def parse_node_budget(value: object) -> int | str:
    """Return a number of nodes or a percentage; raises InvalidValue."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NODES:
        return value
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        return value
    raise InvalidValue("this is not a budget", 'a number of nodes, 0 or more, or a percentage such as "25%"')


def parse_clock(value: object) -> str:
    """Return a time of day as `HH:MM`; 24:00 is the end of the day."""
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) > 59 or clock_minute(match[0]) > MINUTES_PER_DAY:
        raise InvalidValue("this is not a time of day", _CLOCK_ALLOWED)
    return f"{int(match[1]):02d}:{match[2]}"


def clock_minute(text: str) -> int:
    """Return the minutes since midnight of `HH:MM`."""
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def parse_time_zone(name: str) -> str:
    """Return the name of a time zone this machine knows; raises InvalidValue, which suggests the nearest."""
    try:
        return ZoneInfo(name).key
    except (KeyError, ValueError, OSError):
        near = get_close_matches(name, _zones(), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        message = f"unknown time zone{hint}"
        raise InvalidValue(
            message, "a name of the IANA time zones, such as UTC or Europe/Amsterdam"
        ) from None


@lru_cache(maxsize=1)
def _zones() -> tuple[str, ...]:
    return tuple(sorted(available_timezones()))


def _canonical_selector(text: str) -> str:
    return selector.parse_selector(text).canonical()


def _parse_label_key(text: str) -> str:
    parsed = selector.parse_selector(text)
    exists = len(parsed.requirements) == 1 and parsed.requirements[0].operator is selector.Operator.EXISTS
    if not exists or text.strip() != text:
        raise InvalidValue("this is not a label key", "the key of a label, such as rack or example.com/rack")
    return text


def parse_pattern(text: str) -> str:
    """Return the regular expression if it compiles; each template in it counts as one letter."""
    if len(text) > MAX_PATTERN_CHARS:
        raise InvalidValue("the regular expression is too long", f"at most {MAX_PATTERN_CHARS} characters")
    try:
        compile_pattern(_TEMPLATE.sub("x", text))
    except InvalidPattern as error:
        raise InvalidValue(
            f"the regular expression does not compile: {error}",
            "a regular expression of RE2, which has no backreferences and no look-around",
        ) from None
    return check_template(text)


def check_template(text: str) -> str:
    """Return the text if its templates are valid; imports jinja2, which is slow, only if it has one."""
    if "{{" in text or "}}" in text:
        from rolloutd.plugin.templates import validate_template

        validate_template(text)
    return text


def _require_command(text: str) -> str:
    if quote := unclosed_quote(_TEMPLATE.sub("x", text)):
        raise InvalidValue(f"{quote} is never closed", "a shell command that closes each quote and $(")
    return check_template(text)


def _require_whole_path(text: str) -> str:
    if not {"", ".", ".."}.isdisjoint(text.split("/")[1:]):
        raise InvalidValue("this path is not in its shortest form", "such as /etc/netplan")
    return text


def _require_playbook_path(text: str) -> str:
    parts = text.split("/")
    if text.startswith("-") or not {"", ".."}.isdisjoint(parts):
        raise InvalidValue("this is not a path inside the source", _PLAYBOOK_ALLOWED)
    return check_template(text)


def _require_no_secret(text: str, allowed: str) -> None:
    if has_secret(text):
        problem = "a password or token does not belong in a plan, which many may read"
        raise InvalidValue(problem, allowed)


def _require_git_url(text: str) -> str:
    _require_no_secret(
        text, "a URL without one: git asks the credential helper, or the key, of the daemon's user"
    )
    if not _GIT_URL.fullmatch(text):
        raise InvalidValue(
            "this is not the URL of a git server",
            "https://host/repo.git, ssh://host/repo.git or user@host:repo.git",
        )
    return text


def _require_http_url(text: str) -> str:
    _require_no_secret(text, "a URL without one")
    if not re.match(r"https?://[^\s/]", text):
        raise InvalidValue("this is not a URL", "https://host/path, or http://{{ node.address }}:8080/path")
    return check_template(text)


def _require_git_ref(text: str) -> str:
    bad = text.startswith(("-", "/")) or ".." in text or "@{" in text or re.search(r"[\s~^:?*\[\\]", text)
    if bad:
        raise InvalidValue("this is not the name of a commit", "a tag, a branch or a commit, such as v1.4.2")
    return text


def _require_change_variable(text: str) -> str:
    if text in _CONNECTION_VARIABLES:
        raise InvalidValue(
            "a plan does not say where its nodes are",
            "variables of the change; where a node is and how it is reached is the inventory's word",
        )
    return text


def _parse_path(value: object) -> Path:
    if not isinstance(value, str) or not value.strip():
        raise InvalidValue("this is not a path", "a path, relative to this file")
    if value.startswith("~"):
        raise InvalidValue("this machine has no home directory of that user", "a path")
    longest_name = max(len(os.fsencode(name)) for name in value.split("/"))
    if "\0" in value or len(os.fsencode(value)) > MAX_PATH_BYTES or longest_name > MAX_NAME_BYTES:
        raise InvalidValue("the path is too long", "a path that Linux allows")
    return Path(value)


def _name_matching(pattern: str, allowed: str) -> Callable[[str], str]:
    compiled = re.compile(pattern.strip("^$"), re.ASCII)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise InvalidValue("this is not a valid name", allowed)
        return text

    return check


def _number_as_text(value: object) -> object:
    """Accept a whole number without quotes: it has one spelling, other numbers have several."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _require_duration(seconds: int) -> int:
    if seconds < 1:
        raise InvalidValue("this duration is too short", "at least 1s")
    return seconds


def with_json_schema(**keywords: Any) -> WithJsonSchema:
    """Describe what a user may write, if the type's own JSON Schema does not."""
    return WithJsonSchema(keywords)


_DURATION_SCHEMA = with_json_schema(
    type="string", pattern=r"^(?=.)(\d{1,6}d)?(\d{1,6}h)?(\d{1,6}m)?(\d{1,9}s)?$", examples=["1h30m"]
)

Duration = Annotated[int, BeforeValidator(parse_duration), _DURATION_SCHEMA]
PositiveDuration = Annotated[
    int,
    BeforeValidator(parse_duration),
    AfterValidator(_require_duration),
    _DURATION_SCHEMA,
]
SelectorText = Annotated[
    str, Field(max_length=selector.MAX_SELECTOR_LENGTH), AfterValidator(_canonical_selector)
]
LabelKey = Annotated[str, Field(min_length=1, max_length=317), AfterValidator(_parse_label_key)]
NodeBudget = Annotated[
    int | str,
    PlainValidator(parse_node_budget),
    with_json_schema(
        anyOf=[{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^(100|[0-9]{1,2})%$"}]
    ),
]
Rate = Annotated[
    int,
    BeforeValidator(parse_rate),
    with_json_schema(type="string", pattern=r"^\d{1,9} ?(KiB|MiB|GiB)/s$", examples=["200MiB/s"]),
]
Days = Annotated[
    list[str],
    BeforeValidator(parse_days),
    with_json_schema(
        anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
    ),
]
ClockText = Annotated[
    str, BeforeValidator(parse_clock), with_json_schema(type="string", pattern=r"^\d{1,2}:[0-5]\d$")
]
TimeZone = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(parse_time_zone)]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(parse_pattern)]
HttpUrl = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_require_http_url)]
TemplateText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS), AfterValidator(check_template)]
ExpectedOutput = Annotated[
    str,
    BeforeValidator(_number_as_text),
    Field(max_length=MAX_TEXT_CHARS),
    AfterValidator(check_template),
    with_json_schema(type=["string", "integer"], maxLength=MAX_TEXT_CHARS),
]
TicketReference = Annotated[
    str,
    BeforeValidator(_number_as_text),
    Field(max_length=200),
    with_json_schema(type=["string", "integer"], maxLength=200),
]
NodePath = Annotated[
    str,
    Field(min_length=2, max_length=MAX_PATH_CHARS, pattern="^/[^\n]+$"),
    AfterValidator(_require_whole_path),
    AfterValidator(check_template),
]
"""An absolute path on a node, with templates."""

_IS_COMMAND: Any = {"format": "command"}

Command = Annotated[
    str,
    Field(min_length=1, max_length=MAX_TEXT_CHARS, json_schema_extra=_IS_COMMAND),
    AfterValidator(_require_command),
]
"""A shell command, with templates; a review shows it as something that runs."""

OneLineCommand = Annotated[
    str,
    Field(min_length=1, max_length=MAX_TEXT_CHARS, pattern="^[^\n]+$", json_schema_extra=_IS_COMMAND),
    AfterValidator(_require_command),
]
"""A shell command on one line, with templates."""

Playbook = Annotated[
    str,
    Field(min_length=1, max_length=512, json_schema_extra={"format": "playbook"}),
    AfterValidator(_require_playbook_path),
]
"""A path inside the plan's source; `plan validate` and submit check that the file is there."""

FilePath = Annotated[
    Path, PlainValidator(_parse_path), with_json_schema(type="string", minLength=1, format="path")
]
"""A path on the daemon's machine; a relative one starts at the directory of its file."""

OptionalPath = Annotated[
    Path | None,
    PlainValidator(lambda value: None if value is None else _parse_path(value)),
    with_json_schema(type=["string", "null"], minLength=1, format="path"),
]
ShortName = Annotated[str, Field(min_length=1, max_length=64)]
GitUrl = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_require_git_url)]
GitRef = Annotated[str, Field(min_length=1, max_length=250), AfterValidator(_require_git_ref)]
Name = Annotated[
    str,
    AfterValidator(
        _name_matching(
            _NAME, "small letters, digits, '-' and '.', a letter or digit at both ends, at most 63"
        )
    ),
    with_json_schema(type="string", pattern=_NAME),
]
TeamName = Annotated[
    str,
    AfterValidator(
        _name_matching(_TEAM, "the name of a team: letters, digits, '-', '_' and '.', at most 63")
    ),
    with_json_schema(type="string", pattern=_TEAM),
]
Namespace = Annotated[
    str,
    AfterValidator(
        _name_matching(_NAMESPACE, "the name of a namespace: small letters, digits and '-', at most 63")
    ),
    with_json_schema(type="string", pattern=_NAMESPACE),
]
VariableGlob = Annotated[str, Field(pattern=r"^[A-Za-z0-9_*?]{1,128}$")]
VariableName = Annotated[
    str,
    AfterValidator(
        _name_matching(_VARIABLE, "the name of a variable: letters, digits and '_', no digit first")
    ),
    AfterValidator(_require_change_variable),
    with_json_schema(type="string", pattern=_VARIABLE),
]
