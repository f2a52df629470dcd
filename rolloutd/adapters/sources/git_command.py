"""The git command: no prompts, bounded in time, output and file size."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path

from rolloutd.errors import SourceFailed

GIT_TIMEOUT_S = 180.0
"""Limit of one git command: a shallow fetch takes seconds, and a submit waits for it."""

MAX_PACK_BYTES = 1024 * 1024 * 1024
"""Limit of one file that git writes: a server must not fill the disk."""

MAX_MESSAGE_LENGTH = 600
"""Limit of quoted stderr: git's last lines give the cause."""

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""Limit of git's output: the listing of the largest tree, or of all refs of a large server."""


async def run_git(
    cache: Path,
    command: str,
    *arguments: str,
    cwd: Path | None = None,
    config: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return what git prints; raises SourceFailed."""
    inherited = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    try:
        process = await asyncio.create_subprocess_exec(
            "git",
            f"--git-dir={cache}",
            *(
                word
                for key, value in {**_CONFIG, **(config or {})}.items()
                for word in ("-c", f"{key}={value}")
            ),
            command,
            *arguments,
            cwd=cwd or cache,
            env={**inherited, **_NONINTERACTIVE_ENVIRONMENT, **(environment or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # git cannot prompt, and one signal ends its process group
        )
    except OSError as error:
        raise SourceFailed(f"git cannot be started: {error}; is it installed?") from error
    with contextlib.suppress(ProcessLookupError):
        # git starts what writes a pack only after it has talked to the server.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_PACK_BYTES, MAX_PACK_BYTES))
    try:
        async with asyncio.timeout(GIT_TIMEOUT_S):
            stdout, stderr = await asyncio.gather(
                _read_limited(process.stdout), _read_limited(process.stderr)
            )
            status = await process.wait()
    except TimeoutError:
        raise SourceFailed(f"git {command} did not end within {GIT_TIMEOUT_S:g}s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status != 0:
        message = stderr.decode(errors="replace").strip()[-MAX_MESSAGE_LENGTH:]
        raise SourceFailed(f"git {command} failed: {message or f'exit status {status}'}")
    if len(stdout) > MAX_OUTPUT_BYTES:
        raise SourceFailed(f"git {command} answered more than {MAX_OUTPUT_BYTES // 1024**2} MiB")
    return stdout.decode(errors="surrogateescape")


async def _read_limited(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end and return the beginning, one byte more than the limit."""
    assert stream is not None
    kept = bytearray()
    while chunk := await stream.read(64 * 1024):
        kept += chunk[: max(0, MAX_OUTPUT_BYTES + 1 - len(kept))]
    return bytes(kept)


_CONFIG = {"gc.auto": "0", "maintenance.auto": "false", "fetch.unpackLimit": "1"}
"""git starts nothing in the background, and a fetch writes one pack, whose size has a limit."""

_REPOSITORY_VARIABLES = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"}
)
"""Variables of git's hooks: a process started by a hook must not work on the hook's repository."""

_NONINTERACTIVE_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "GCM_INTERACTIVE": "never",
    "GIT_OPTIONAL_LOCKS": "0",
    "LC_ALL": "C.UTF-8",
}
"""git does not prompt, and reports errors in English."""
