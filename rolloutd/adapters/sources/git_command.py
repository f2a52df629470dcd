"""The git command: no prompts, bounded in time, output and file size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from rolloutd.adapters.command import run_command
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
    options = (("-c", f"{key}={value}") for key, value in {**_CONFIG, **(config or {})}.items())
    try:
        ended = await run_command(
            ["git", f"--git-dir={cache}", *chain.from_iterable(options), command, *arguments],
            cwd=cwd or cache,
            environment={**inherited, **_NONINTERACTIVE_ENVIRONMENT, **(environment or {})},
            timeout_s=GIT_TIMEOUT_S,
            max_output_bytes=MAX_OUTPUT_BYTES,
            # git starts what writes a pack only after it has talked to the server.
            max_file_bytes=MAX_PACK_BYTES,
        )
    except TimeoutError:
        raise SourceFailed(f"git {command} did not end within {GIT_TIMEOUT_S:g}s") from None
    except OSError as error:
        raise SourceFailed(f"git: cannot be started ({error}); install it") from error
    if ended.status != 0:
        message = ended.stderr.decode(errors="replace").strip()[-MAX_MESSAGE_LENGTH:]
        raise SourceFailed(f"git {command} failed: {message or f'exit status {ended.status}'}")
    if len(ended.stdout) >= MAX_OUTPUT_BYTES:
        raise SourceFailed(f"git {command} answered more than {MAX_OUTPUT_BYTES // 1024**2} MiB")
    return ended.stdout.decode(errors="surrogateescape")


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
