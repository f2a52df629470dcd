"""Check `ssh`: compares a command's result on the node with `equals`, `matches` or `exit`.

The caller repeats the check until its deadline.
"""

from __future__ import annotations

from collections.abc import Mapping

from rolloutd.adapters.ssh.shell_adapter import ShellAdapter
from rolloutd.concurrency import threads
from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.plugin.patterns import InvalidPattern, is_found
from rolloutd.ports import JSON, Failed, Ok, ShellResult, StepContext, Unknown

MAX_TIMEOUT_S = 3600.0
"""Limit of one try, whatever the plan says; a check does not take an hour."""

MAX_SHOWN_LENGTH = 200
"""Limit of quoted output in a sentence; the result's output has the rest."""

COMMAND_NOT_RUN = frozenset({126, 127})
"""A shell's exit statuses for a command that cannot be executed or found (POSIX, 2.8.2)."""


class SshCheck(ShellAdapter):
    """ports.Check with the parameters `run` and one of `equals`, `matches`, `exit`."""

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        command = str(ctx.params.get("run") or "")
        if not command:
            return Failed("the check ssh has no command: give `run`")
        timeout_s = ctx.remaining_s(self._clock.now(), most=MAX_TIMEOUT_S)
        try:
            result = await self._shell.run(ctx.host, command, timeout_s=timeout_s)
        except HostKeyChanged as error:
            return Failed(str(error))
        except NodeUnreachable as error:
            return Unknown(str(error))
        except TimeoutError as error:
            return Failed(str(error))
        # In a thread: the largest pattern needs seconds, and RE2 lets the event loop run meanwhile.
        mismatch = await threads.MATCHING.run(find_mismatch, result, ctx.params)
        output = "\n".join(part for part in (result.stdout, result.stderr) if part)
        if mismatch is None:
            return Ok(f"`{_truncate(command)}` on {ctx.host.name} answered as expected", output=output)
        return Failed(f"`{_truncate(command)}` on {ctx.host.name}: {mismatch}", output=output)


def find_mismatch(result: ShellResult, params: Mapping[str, JSON]) -> str | None:
    """Return the expected and the found result if they differ, else None."""
    found, status = result.stdout.strip(), result.exit_status
    if params.get("exit") is not None:
        expected_status = int(params["exit"])
        return (
            None
            if status == expected_status
            else f"expected exit status {expected_status}, found {status}{stderr_suffix(result)}"
        )
    if status in COMMAND_NOT_RUN:
        return f"the command could not be run, exit status {status}{stderr_suffix(result)}"
    if params.get("equals") is not None:
        text = _expected_text(params["equals"])
        if found != text:
            return f"expected {_truncate(text)!r}, found {_truncate(found)!r}{_exit_status_suffix(result)}"
    elif params.get("matches") is not None:
        mismatch = _find_pattern_mismatch(found, str(params["matches"]))
        if mismatch is not None:
            return f"{mismatch}{_exit_status_suffix(result)}"
    return None if status == 0 else f"expected exit status 0, found {status}{stderr_suffix(result)}"


def _find_pattern_mismatch(found: str, pattern: str) -> str | None:
    try:
        matched = is_found(pattern, found)
    except InvalidPattern as error:
        return f"the pattern {_truncate(pattern)!r} is not a regular expression: {error}"
    return None if matched else f"expected a match of {_truncate(pattern)!r}, found {_truncate(found)!r}"


def _expected_text(value: JSON) -> str:
    """Return a plan's value as a command prints it, also for `equals: 65535` and `equals: true`."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def stderr_suffix(result: ShellResult) -> str:
    """Return the last line of a failed command's stderr, in parentheses."""
    lines = result.stderr.strip().splitlines()
    return f" ({_truncate(lines[-1])})" if result.exit_status != 0 and lines else ""


def _exit_status_suffix(result: ShellResult) -> str:
    return f", exit status {result.exit_status}{stderr_suffix(result)}" if result.exit_status != 0 else ""


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_LENGTH else text[:MAX_SHOWN_LENGTH] + "..."
