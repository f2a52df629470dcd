"""The packages of a release, built once for all tests of a run, and those of an older commit.

It does not know what the packages are for.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.shared_directory import memory_directory

CHECKOUT = Path(__file__).resolve().parents[2]

COMMIT_0_1 = "f01e37bd29ec271db4dceb402ca2569326c44170"
"""The last commit of 0.1, which wrote tests/data/rolloutd-0.1.sql; the next one changed the database."""


def left_out(why: str) -> None:
    """Leave the test out, loudly; where CI is set nothing may be left out."""
    if os.environ.get("CI"):
        pytest.fail(f"this must run in CI: {why}")
    pytest.skip(f"LEFT OUT, the packages were NOT tested: {why}")


def has_commit(commit: str) -> bool:
    """Return whether the clone has the commit: a shallow clone or an archive does not."""
    command = ("git", "-C", str(CHECKOUT), "cat-file", "-e", f"{commit}^{{commit}}")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build_release(directory: Path) -> Path:
    """Build the wheel, the sdist and the Debian package as `make packages` does; return their directory.

    Test processes that share the directory build once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = directory / "release"
        if not (out / "SHA256SUMS").exists():
            _build(CHECKOUT, out, ())
    return out


def build_package_of(commit: str, directory: Path) -> Path:
    """Build the Debian package of an older commit, with the packaging of this one; return its file."""
    tree, out = directory / "tree", directory / "release"
    git = ("git", "-C", str(CHECKOUT))
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        _build(tree, out, ("--bare",))
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    (package,) = out.glob("*.deb")
    return package


def _build(tree: Path, out: Path, options: Sequence[str]) -> None:
    command = (
        sys.executable,
        "-m",
        "deploy.packages",
        "--tree",
        str(tree),
        "--out",
        str(out),
        *options,
        "deb",
    )
    place = memory_directory() or tempfile.gettempdir()
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        env={**os.environ, "TMPDIR": place},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
