"""The virtual environment under /opt/rolloutd: what the lock names, and our wheel.

It is made elsewhere and moved there, so nothing in it may name where it was made.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from deploy.packages.release import PYTHON, Release

PREFIX = Path("/opt/rolloutd")

PROGRAMS = ("python", "ansible", "rolloutd", "rolloutctl")
"""Beginnings of the names of programs that stay in bin; the others belong to libraries."""


def make(release: Release, wheel: Path, stage: Path) -> Path:
    """Make the environment for `PREFIX` below the directory `stage`; return its place there."""
    place = stage / PREFIX.relative_to("/")
    release.run(PYTHON, "-m", "venv", "--without-pip", "--symlinks", place)
    pip = (sys.executable, "-m", "pip", "--python", place / "bin/python", "--disable-pip-version-check")
    install = ("install", "--quiet", "--no-compile", "--only-binary", ":all:")
    release.run(*pip, *install, "--require-hashes", "--requirement", release.tree / "requirements.lock")
    release.run(*pip, *install, "--no-deps", wheel)
    # It is in the lock to build the wheel.
    release.run(*pip, "uninstall", "--quiet", "--yes", "--root-user-action", "ignore", "setuptools")
    _forget_where_it_was_made(place)
    release.set_times(stage)
    _compile(release, stage)
    release.set_times(stage)
    return place


def _forget_where_it_was_made(place: Path) -> None:
    for program in (place / "bin").iterdir():
        if not program.name.startswith(PROGRAMS):
            program.unlink()
        elif not program.is_symlink():
            program.write_text(program.read_text().replace(str(place), str(PREFIX)))
    settings = place / "pyvenv.cfg"
    settings.write_text(re.sub(r"(?m)^command = .*\n", "", settings.read_text()))
    for metadata in place.glob("lib/python3*/site-packages/*.dist-info"):
        # pip's list of files, which dpkg has too; it has the hashes of programs before the change above.
        for name in ("RECORD", "direct_url.json"):
            (metadata / name).unlink(missing_ok=True)
    shutil.rmtree(place / "include", ignore_errors=True)
    shutil.rmtree(place / "share", ignore_errors=True)


def _compile(release: Release, stage: Path) -> None:
    """Write the bytecode: the daemon may not write it, and dpkg removes only files that it has installed."""
    times = ("--invalidation-mode", "timestamp")
    # -q -q: ansible-core has sources for other Pythons, and templates.
    command = (PYTHON, "-m", "compileall", "-q", "-q", "-j", "0", "-s", stage, "-p", "/", *times)
    release.run("sh", "-c", '"$@" || true', "sh", *command, stage / PREFIX.relative_to("/"))
