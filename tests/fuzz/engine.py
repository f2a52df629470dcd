"""Random input made from seeds: by edits of bytes, and by edits of the values that JSON or YAML stands for.

Every input follows from a number, so a find is repeated by its number.  It knows no target.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import yaml

Consumer = Callable[[bytes], Awaitable[None]]
"""Returns when an input was taken, or refused in words; everything else that it raises is a find."""

MAX_EDITS = 4
"""Edits of one input: with more of them most inputs fail at the first one."""

MAX_INPUT_BYTES = 256 * 1024
"""A seed doubled again and again stays below this."""

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**70,
        1e308,
        -1.5,
        "",
        " ",
        "x",
        "0",
        "-1",
        "null",
        "\x00",
        "\n",
        "a\nb",
    ),
    *(
        "\ud800",
        "é🙂" * 40,
        "x" * 300,
        "x" * 5000,
        "../../etc/passwd",
        "~nosuchuser/x",
        "~",
        "{{ node.name }}",
    ),
    *(
        "{% for x in y %}",
        "{{ 1/0 }}",
        "^(a+)+$",
        "(",
        "1h",
        "99999999999h",
        "@nogroup",
        "2026-13-45T99:99:99Z",
        "n1",
    ),
    *([], {}, [[]], {"": None}, [None], {"a": {"a": {}}}, ["x"] * 500, [{}] * 3, "!!python/object:os.system"),
)
"""Values that programs take badly, of every type that JSON has."""

TOKENS: tuple[bytes, ...] = (
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\r\n",
        b"\n",
        b"\t",
        b" ",
        b"-",
        b"&a ",
        b"*a",
        b"<<: *a\n",
        b"!!set ",
    ),
    *(
        b"[" * 3000,
        b"{" * 3000,
        b"- " * 3000,
        b'{"a":' * 3000,
        b"9" * 400,
        b"A" * 10_000,
        b"%s%n",
        b"\x1b[2J",
    ),
    *(
        b"---\n",
        b"...\n",
        b"|",
        b">",
        b"'",
        b'"',
        b"\\",
        b"{{",
        b"}}",
        b"{%",
        b"NaN",
        b"1e999",
        b"-0",
        b"..",
        b"~",
    ),
)
"""Bytes that parsers take badly."""


def edit_bytes(dice: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return the data after one edit: changed, removed, repeated, joined with another, or with a token."""
    at, end = sorted((dice.randrange(len(data) + 1), dice.randrange(len(data) + 1)))
    match dice.randrange(6):
        case 0 if data:
            place = dice.randrange(len(data))
            return data[:place] + bytes([data[place] ^ 1 << dice.randrange(8)]) + data[place + 1 :]
        case 1:
            return data[:at] + data[min(end, at + 40) :]
        case 2:
            return data[:end] + data[at:]
        case 3:
            other = dice.choice(others)
            return data[:at] + other[dice.randrange(len(other) + 1) :]
        case 4:
            return data[:at]
        case _:
            return data[:at] + dice.choice(TOKENS) + data[at:]


def edit_value(dice: random.Random, value: Any) -> Any:
    """Return the value with one part of it replaced, removed, repeated or wrapped."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        rest = {name: item for name, item in value.items() if name != key}
        match dice.randrange(10):
            case 0:
                return rest
            case 1:
                return {**rest, dice.choice(("", "x", "x" * 300, "é", "\x00", "__class__")): value[key]}
            case 2:
                return {**value, key: list(value.values())[dice.randrange(len(value))]}
            case _:
                return {**value, key: edit_value(dice, value[key])}
    if isinstance(value, list) and value and dice.random() < 0.85:
        place = dice.randrange(len(value))
        match dice.randrange(8):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [*value, value[place]]
            case _:
                return [*value[:place], edit_value(dice, value[place]), *value[place + 1 :]]
    if isinstance(value, str) and value and dice.random() < 0.3:
        edited = edit_bytes(dice, value.encode(errors="surrogatepass"), (b"x",))
        return edited[:10_000].decode(errors="surrogateescape")
    return [value] if dice.random() < 0.05 else dice.choice(VALUES)


def mutate_bytes(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    data = dice.choice(seeds)
    for _ in range(dice.randint(1, MAX_EDITS)):
        data = edit_bytes(dice, data, seeds)[:MAX_INPUT_BYTES]
    return data


def mutate_values(
    dice: random.Random, seeds: Sequence[bytes], load: Callable[[bytes], Any] = json.loads
) -> bytes:
    """Edit what a seed stands for, and now and then its bytes too."""
    if dice.random() < 0.15:
        return mutate_bytes(dice, seeds)
    value = load(dice.choice(seeds))
    for _ in range(dice.randint(1, MAX_EDITS)):
        value = edit_value(dice, value)
    return json.dumps(value).encode()[:MAX_INPUT_BYTES]


def mutate_yaml(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Edit the values or the text; JSON is YAML."""
    if dice.random() < 0.5:
        return mutate_bytes(dice, seeds)
    return mutate_values(dice, seeds, yaml.safe_load)


def encoded(*values: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)
