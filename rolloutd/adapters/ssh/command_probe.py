"""Traffic probe `command`: a command's exit status, on the node or on the daemon's machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import AdapterContext, Busy, Clock, Ok, Shell, StepContext, Unknown

MAX_OUTPUT_BYTES = 4096
"""Output kept of a command on this machine; only its first line is shown."""

MAX_SHOWN_CHARS = 200
"""Limit of the line that is shown."""


def make(context: AdapterContext) -> CommandProbe:
    return CommandProbe(context.shell, context.clock)


class CommandProbe:
    """ports.TrafficProbe with the parameters `run` and `on`."""

    def __init__(self, shell: Shell, clock: Clock) -> None:
        self._shell = shell
        self._clock = clock

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        node, command = ctx.host.name, str(ctx.params["run"])
        timeout_s = max(1.0, ctx.deadline - self._clock.now())
        try:
            if ctx.params.get("on") == "daemon":
                status, output = await _run_here(command, timeout_s)
            else:
                result = await self._shell.run(ctx.host, command, timeout_s=timeout_s)
                status, output = result.exit_status, result.stdout
        except (NodeUnreachable, TimeoutError, OSError) as error:
            return Unknown(f"{node}: traffic is unknown: {error}")
        line = output.strip().partition("\n")[0][:MAX_SHOWN_CHARS]
        match status:  # as grep and test: all but 0 and 1 mean that the command did not work
            case 0:
                return Ok(f"{node} is idle: {line or f'`{command[:MAX_SHOWN_CHARS]}` exits 0'}")
            case 1:
                return Busy(f"{node} is busy: {line or f'`{command[:MAX_SHOWN_CHARS]}` exits 1'}")
            case _:
                cause = f"`{command[:MAX_SHOWN_CHARS]}` ended with {status}; 0 is idle, 1 is busy"
                return Unknown(f"{node}: traffic is unknown: {cause}")


async def _run_here(command: str, timeout_s: float) -> tuple[int, str]:
    """Run a command on this machine; return its exit status and the start of its output.

    Raises TimeoutError; then all of its process group is killed.
    """
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    process = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    assert process.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(timeout_s):
            while part := await process.stdout.read(MAX_OUTPUT_BYTES):
                output += part[: MAX_OUTPUT_BYTES - len(output)]
            status = await process.wait()
    except TimeoutError:
        raise TimeoutError(f"`{command[:MAX_SHOWN_CHARS]}` did not end within {timeout_s:g}s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return status, output.decode(errors="replace")
