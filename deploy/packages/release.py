"""One release under construction: its tree, its version, its instant and its directories."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KINDS = ("wheel", "deb", "image")

PYTHON = "/usr/bin/python3"
"""Debian's: the Python that the package depends on."""


@dataclass(frozen=True, slots=True)
class Release:
    """What all builders need.  `tree` is a copy that they may write to; so is `work`."""

    tree: Path
    work: Path
    out: Path
    version: str
    epoch: int
    """Instant of the commit, in seconds: every file of the release has it, so two builds are equal."""

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Run a command in the release's environment and return its output; its errors go to stderr."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd or self.tree,
            env=self.environment(),
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def environment(self) -> dict[str, str]:
        """Return the environment of this process with the release's instant, and no bytecode in the tree."""
        fixed = {"SOURCE_DATE_EPOCH": str(self.epoch), "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
        return {**os.environ, **fixed}

    def set_times(self, directory: Path) -> None:
        """Set the release's instant on a directory and everything in it."""
        for path in (directory, *directory.rglob("*")):
            os.utime(path, (self.epoch, self.epoch), follow_symlinks=False)


@contextmanager
def open_release(checkout: Path, out: Path) -> Iterator[Release]:
    """Copy the checkout's files, without what is built or ignored; remove the copy at the end."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rolloutd-release-") as place:
        work = Path(place)
        # Readable for every user: the package has these modes.
        work.chmod(0o755)
        tree = work / "tree"
        for name in _files(checkout):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout / name, tree / name, follow_symlinks=False)
        version = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"]
        yield Release(tree, work, out, version, _epoch(checkout))


def _files(checkout: Path) -> list[str]:
    listed = _git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    # Links too, such as rolloutd/playbooks, and not what is deleted but not committed.
    return [name for name in listed.split("\0") if name and os.path.lexists(checkout / name)]


def _epoch(checkout: Path) -> int:
    return int(os.environ.get("SOURCE_DATE_EPOCH") or _git(checkout, "log", "-1", "--format=%ct"))


def _git(checkout: Path, *words: str) -> str:
    command: Sequence[str] = ("git", "-C", str(checkout), *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
