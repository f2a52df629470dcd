"""The check `ssh`: a command's answer on the node, compared with what it should be.

One of `equals`, `matches` and `exit` says what is right; without any of them
the command must end with 0.  How long to keep asking is the caller's affair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rolloutd.adapters.kit import Kit
from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import JSON, Clock, Failed, Ok, Shell, ShellResult, StepContext, Unknown

MAX_COMMAND_S = 3600.0
"""One asking, whatever the plan says; what takes an hour is no check."""

SHOWN_LENGTH = 200
"""Kept of what was found in the sentence; the whole is in the output."""

NEVER_RAN = frozenset({126, 127})
"""Exit statuses with which a shell says that there is no such command (POSIX, 2.8.2)."""


def make(kit: Kit) -> SshCheck:
    """Return the check `ssh`."""
    return SshCheck(kit.shell, kit.clock)


class SshCheck:
    """ports.Check with the parameters `run` and one of `equals`, `matches`, `exit`."""

    def __init__(self, shell: Shell, clock: Clock) -> None:
        self._shell = shell
        self._clock = clock

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Run the command once and compare; Unknown when the node could not be asked."""
        command = str(ctx.params.get("run") or "")
        if not command:
            return Failed("the check ssh has no command: give `run`")
        timeout_s = min(MAX_COMMAND_S, max(1.0, ctx.deadline - self._clock.now()))
        try:
            result = await self._shell.run(ctx.host, command, timeout_s=timeout_s)
        except HostKeyChanged as error:
            return Failed(str(error))
        except NodeUnreachable as error:
            return Unknown(str(error))
        except TimeoutError as error:
            return Failed(str(error))
        wrong = judge(result, ctx.params)
        output = "\n".join(part for part in (result.stdout, result.stderr) if part)
        if wrong is None:
            return Ok(f"`{_cut(command)}` on {ctx.host.name} answered as expected", output=output)
        return Failed(f"`{_cut(command)}` on {ctx.host.name}: {wrong}", output=output)


def judge(result: ShellResult, params: Mapping[str, JSON]) -> str | None:
    """Return what is wrong with the result of a command: expected and found; None when it is right."""
    found, status = result.stdout.strip(), result.exit_status
    if params.get("exit") is not None:
        wanted = int(params["exit"])
        return None if status == wanted else f"expected exit status {wanted}, found {status}{said(result)}"
    if status in NEVER_RAN:
        return f"the command could not be run, exit status {status}{said(result)}"
    if params.get("equals") is not None:
        text = _text(params["equals"])
        if found != text:
            return f"expected {_cut(text)!r}, found {_cut(found)!r}{_ended(result)}"
    elif params.get("matches") is not None:
        wrong = _judge_pattern(found, str(params["matches"]))
        if wrong is not None:
            return f"{wrong}{_ended(result)}"
    return None if status == 0 else f"expected exit status 0, found {status}{said(result)}"


def _judge_pattern(found: str, pattern: str) -> str | None:
    try:
        matched = re.search(pattern, found)
    except re.error as error:
        return f"the pattern {_cut(pattern)!r} is not a regular expression: {error}"
    return None if matched else f"expected a match of {_cut(pattern)!r}, found {_cut(found)!r}"


def _text(value: JSON) -> str:
    """Write a value of the plan as a command would print it: `equals: 65535` and `equals: true` too."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def said(result: ShellResult) -> str:
    """Return what the command complained of, where it failed."""
    lines = result.stderr.strip().splitlines()
    return f" ({_cut(lines[-1])})" if result.exit_status != 0 and lines else ""


def _ended(result: ShellResult) -> str:
    """Return how a command ended that failed and printed something else than it should."""
    return f", exit status {result.exit_status}{said(result)}" if result.exit_status != 0 else ""


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "..."
