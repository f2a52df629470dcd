"""A git repository that a test writes to, and its server."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.ports import free_port


class Repository:
    """A git repository that a test writes to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"file://{directory}"
        directory.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        """Run git in the repository."""
        identity = {"GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_CONFIG_GLOBAL": "/dev/null"}
        identity |= {
            "GIT_COMMITTER_NAME": "t",
            "GIT_COMMITTER_EMAIL": "t@t",
            "GIT_CONFIG_SYSTEM": "/dev/null",
        }
        ended = subprocess.run(
            ["git", *arguments],
            cwd=self.directory,
            env={**os.environ, **identity},
            check=True,
            capture_output=True,
        )
        return ended.stdout.decode().strip()

    def commit(self, name: str, text: str) -> str:
        """Write a file and commit it; return the commit's id."""
        (self.directory / name).write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", name)
        return self.git("rev-parse", "HEAD")


@asynccontextmanager
async def git_server(directory: Path) -> AsyncIterator[str]:
    """Serve the repositories of a directory on loopback; yields the URL of the directory."""
    port = free_port()
    words = ("daemon", f"--base-path={directory}", "--export-all", "--listen=127.0.0.1", f"--port={port}")
    process = await asyncio.create_subprocess_exec("git", *words, start_new_session=True)
    try:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break
        yield f"git://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        await process.wait()
