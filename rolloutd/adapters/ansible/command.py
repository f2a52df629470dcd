"""A command of Ansible that the daemon waits for: bounded in time and output, ended with its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_OUTPUT_BYTES = 256 * 1024 * 1024
"""10,000 nodes with a hundred variables each are some 30 MiB of ansible-inventory's output."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that has ended; its output is cut at MAX_OUTPUT_BYTES."""

    status: int
    stdout: bytes
    stderr: bytes


async def run_command(
    argv: Sequence[str], *, cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> CommandResult:
    """Run a command without stdin; raises OSError if it cannot start, and TimeoutError."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        cwd=cwd,
        env=dict(environment),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(timeout_s):
            async with asyncio.TaskGroup() as group:
                stdout = group.create_task(_read_limited(process.stdout))
                stderr = group.create_task(_read_limited(process.stderr))
            status = await process.wait()
    finally:
        await _kill_process_group(process)
    return CommandResult(status, stdout.result(), stderr.result())


async def _read_limited(stream: asyncio.StreamReader) -> bytes:
    kept = bytearray()
    while len(kept) < MAX_OUTPUT_BYTES and (chunk := await stream.read(65536)):
        kept += chunk
    return bytes(kept[:MAX_OUTPUT_BYTES])


async def _kill_process_group(process: asyncio.subprocess.Process) -> None:
    """End a command and what it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
