"""Whatever a plan contains, the event loop goes on: its lag stays below a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rolloutd.adapters.ssh.check import SshCheck
from rolloutd.plugin.field_types import InvalidValue, parse_pattern
from rolloutd.plugin.patterns import MAX_SEARCHED_CHARS
from rolloutd.plugin.templates import RenderFailed, TemplateInvalid, render, validate_template
from rolloutd.ports import Failed, Host, Ok, ShellResult, StepContext
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.shell import FakeShell

MAX_LAG_S = 1.0

LONG = "ab" * MAX_SEARCHED_CHARS

PATTERNS = {
    "^(a+)+$": "a" * 44 + "!",
    "^(([a-z])+.)+[A-Z]([a-z])+$": "a" * 60,
    "(x+x+)+y": "x" * 60,
    "(a|aa)+$": "a" * 60 + "!",
    "(.*a.{0,400}b){2}x$": LONG,
    "((a?){30}){30}b{0,900}c": LONG,
    "(a|b|ab|ba){1,250}c$": LONG,
}
"""Patterns that keep a backtracking engine busy, or RE2's slowest ones, each with its text."""

REFUSED_PATTERNS = (r"(a)\1", "(?=a)b", "(?<!a)b", "((a{1,1000}){1,1000}){1,1000}", "(" * 900)

TEMPLATES = (
    "{{ " + "(" * 2000 + "vars.x" + ")" * 2000 + " }}",
    "{{ " + "not " * 2000 + "vars.x }}",
    "{{ " + " ~ ".join(["vars.x"] * 800) + " }}",
    "{{ vars.x }}" * 700,
    "{{ " + "vars.x if vars.x else " * 300 + "vars.x }}",
    "{{ vars.x" + " | trim" * 1000 + " }}",
    "{{ vars.x" + ".x" * 3000 + " }}",
    "{{ vars.x" + "[0]" * 2000 + " }}",
    "{{ vars.x | int }}",
    "{{ " + " and ".join(["vars.x"] * 1000) + " }}",
    "{{ " + " == ".join(["vars.x"] * 1000) + " }}",
    "{{ range(999999999) }}",
    "{{ vars.x * 999999999 }}",
    "{{ 'a' ~ 'b' * 9 }}",
    "{% for a in vars.x %}{% endfor %}",
    "{{ vars.x.__class__ }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ 9 ** 9 ** 9 }}",
)


@asynccontextmanager
async def watchdog() -> AsyncIterator[None]:
    """Fail where the event loop is held up for longer than MAX_LAG_S of this process's CPU time."""
    lags = [0.0]

    async def tick() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.005)
            lags.append(time.process_time() - before)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    yield
    await asyncio.sleep(0)
    ticking.cancel()
    assert max(lags) < MAX_LAG_S


@pytest.mark.parametrize("pattern", [*PATTERNS])
async def test_no_pattern_holds_the_loop_up(pattern: str) -> None:
    shell = FakeShell({"print": ShellResult(0, PATTERNS[pattern], "")})
    clock = FakeClock()
    context = _context({"run": "print", "matches": parse_pattern(pattern)}, clock)
    async with watchdog():
        result = await SshCheck(shell, clock).check(context)
    assert isinstance(result, Failed | Ok)


@pytest.mark.parametrize("pattern", REFUSED_PATTERNS)
def test_pattern_without_linear_match_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidValue, match="does not compile"):
        parse_pattern(pattern)


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
async def test_no_template_holds_the_loop_up(number: int) -> None:
    """A template is refused, cannot be filled or is rendered, and never ends otherwise."""
    variables: dict[str, Any] = {"x": "9" * 100_000}
    async with watchdog():
        for check in (
            lambda: validate_template(TEMPLATES[number]),
            lambda: render(TEMPLATES[number], node="n1", address="", labels={}, variables=variables),
        ):
            try:
                check()
            except (TemplateInvalid, RenderFailed):
                continue


def _context(params: dict[str, Any], clock: FakeClock) -> StepContext:
    return StepContext(Host("n1"), "r", 1, "verify", "k", params, deadline=clock.now() + 60.0)
