"""A command on this machine, bounded in time and output; one that is stopped ends with its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that has ended; each output is cut at the limit."""

    status: int
    stdout: bytes
    stderr: bytes


async def run_command(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    max_output_bytes: int,
    cwd: Path | None = None,
    max_file_bytes: int | None = None,
    kill_children: bool = False,
) -> CommandResult:
    """Run a command without stdin; raises OSError if it cannot start, and TimeoutError.

    `kill_children` also ends what a command that succeeded has left in the background.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # it cannot prompt, and one signal ends its process group
        cwd=cwd,
        env=dict(environment),
    )
    has_ended = False
    try:
        if max_file_bytes is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await asyncio.gather(
                _read(process.stdout, max_output_bytes), _read(process.stderr, max_output_bytes)
            )
            status = await process.wait()
        has_ended = True
    finally:
        if kill_children or not has_ended:
            # A group outlives its leader, so this reaches children whose parent is gone.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return CommandResult(status, stdout, stderr)


async def _read(stream: asyncio.StreamReader | None, limit: int) -> bytes:
    """Read to the end and return the beginning."""
    assert stream is not None
    kept = bytearray()
    # To the end, because a full pipe would block the command.
    while chunk := await stream.read(65536):
        kept += chunk[: limit - len(kept)]
    return bytes(kept)
