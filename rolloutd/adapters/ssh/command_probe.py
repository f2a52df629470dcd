"""Traffic probe `command`: a command's exit status, on the node or on the daemon's machine."""

from __future__ import annotations

import os

from rolloutd.adapters.command import run_command
from rolloutd.adapters.ssh.shell_adapter import ShellAdapter
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Busy, Ok, StepContext, Unknown

MAX_OUTPUT_BYTES = 4096
"""Output kept of a command on this machine; only its first line is shown."""

MAX_SHOWN_CHARS = 200
"""Limit of the line that is shown."""


class CommandProbe(ShellAdapter):
    """ports.TrafficProbe with the parameters `run` and `on`."""

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        node, command = ctx.host.name, str(ctx.params["run"])
        timeout_s = ctx.remaining_s(self._clock.now())
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
    """Run a command on this machine; return its exit status and the start of its output."""
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    try:
        ended = await run_command(
            # Without stderr, which a process in the background would hold open until the timeout.
            ["/bin/sh", "-c", f"exec 2>/dev/null\n{command}"],
            environment=environment,
            timeout_s=timeout_s,
            max_output_bytes=MAX_OUTPUT_BYTES,
            kill_children=True,
        )
    except TimeoutError:
        raise TimeoutError(f"`{command[:MAX_SHOWN_CHARS]}` did not end within {timeout_s:g}s") from None
    return ended.status, ended.stdout.decode(errors="replace")
