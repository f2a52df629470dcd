"""A thousand randomly broken plans: each is answered with mistakes that help, or is still a plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import yaml

from rolloutd.errors import Diagnostic
from tests.rolloutd.planfile.plan_samples import DESIGN_PLAN, FULL_PLAN, diagnostics_of

SEEDS = 20
PLANS_PER_SEED = 25
SPLICES = [
    *(b"{{", b"&a ", b"*a ", b"<<: ", b"- ", b"? ", b"|\n", b">-\n", b"\n---\n", b"\n...\n", b"yes", b"[[[["),
    *(b"!!python/object:os.system ", b"%YAML 1.1\n", b"\xef\xbb\xbf", b'"\\ud800"', b"{% x %}", b"\r", b"\t"),
    *(b"\x00", b"\xff", b"\xc3", b"'", b'"', b"#", b": ", b"}", b"]", b"\xe2\x80\xa8", b"0777", b"~"),
]
ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    "",
    " ",
    "x" * 9000,
    [],
    {},
    [[]],
    {"a": {}},
    ["a"],
    2**70,
    "{{",
    "(",
    "é",
]


def garble(text: bytes, rng: random.Random) -> bytes:
    """Break the text: bytes changed, spliced in, cut out, copied elsewhere, lines indented otherwise."""
    broken = bytearray(text)
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        at = rng.randrange(len(broken) + 1)
        match rng.randrange(5):
            case 0:
                broken[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                broken[at:at] = rng.choice(SPLICES)
            case 2:
                del broken[at : at + rng.choice([1, 5, 40])]
            case 3:
                start = rng.randrange(len(broken) + 1)
                broken[at:at] = broken[start : start + rng.choice([3, 20, 100])]
            case _:
                lines = broken.split(b"\n")
                number = rng.randrange(len(lines))
                lines[number] = b" " * rng.randrange(5) + lines[number].lstrip(b" ")
                broken = bytearray(b"\n".join(lines))
    return bytes(broken)


def containers(value: Any) -> list[Any]:
    """Return every mapping and list of a value that holds something."""
    match value:
        case dict():
            return ([value] if value else []) + [
                inner for child in value.values() for inner in containers(child)
            ]
        case list():
            return ([value] if value else []) + [inner for child in value for inner in containers(child)]
        case _:
            return []


def misspelt(key: str, rng: random.Random) -> str:
    at = rng.randrange(len(key))
    return rng.choice([key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key + "s"])


def misbuild(text: bytes, rng: random.Random) -> bytes:
    """Break the structure: keys deleted, misspelt, moved; values retyped, swapped, doubled."""
    plan = yaml.load(text, yaml.CSafeLoader)  # a tenth of the Python loader's time
    for _ in range(rng.choice([1, 1, 2, 4])):
        found = containers(plan)
        if not found:
            break
        place = rng.choice(found)
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        match rng.randrange(5):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[misspelt(str(key), rng)] = place.pop(key)
            case 2:
                other = rng.choice(found)
                place[key] = deepcopy(other)
            case 3 if isinstance(place, list):
                place.append(place[key])
            case _:
                place[key] = rng.choice(ODD_VALUES)
    width = rng.choice([20, 200])
    return yaml.dump(plan, None, yaml.CSafeDumper, sort_keys=False, allow_unicode=True, width=width).encode()


def assert_helpful(mistake: Diagnostic, text: bytes) -> None:
    lines = text.count(b"\n") + text.count(b"\r") + text.count(b"\xe2\x80\xa8") + 1
    assert mistake.file == "plan.yaml"
    assert 1 <= mistake.line <= lines
    assert mistake.column >= 1
    assert mistake.path
    assert mistake.message
    assert mistake.allowed
    assert 0 < len(mistake.found) <= 60
    assert mistake.found.isprintable()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("breaking", [garble, misbuild])
def test_a_broken_plan_is_answered_with_mistakes(
    breaking: Callable[[bytes, random.Random], bytes], seed: int
) -> None:
    rng = random.Random(seed)
    refused = 0
    for _ in range(PLANS_PER_SEED):
        text = breaking(rng.choice([DESIGN_PLAN, FULL_PLAN]).encode(), rng)
        mistakes = diagnostics_of(text)
        refused += bool(mistakes)
        for mistake in mistakes:
            assert_helpful(mistake, text)
    assert refused > PLANS_PER_SEED / 2
