"""A git repository that a test writes to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


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
