"""The wheel and the sdist, by setuptools, which is in the lock."""

from __future__ import annotations

import gzip
import shutil
import sys
import tarfile
from pathlib import Path

from deploy.packages.release import Release

_BUILD = """\
import sys
from setuptools import build_meta
out = sys.argv[1]
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


def build_wheel_and_sdist(release: Release) -> Path:
    """Write both to the release's directory; return the wheel."""
    built = release.work / "distributions"
    built.mkdir()
    release.run(sys.executable, "-c", _BUILD, built)
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    _repack(release, sdist, release.out / sdist.name)
    # Not rename: the directories may be on two file systems.
    return Path(shutil.move(wheel, release.out / wheel.name))


def _repack(release: Release, sdist: Path, target: Path) -> None:
    """Write the archive again, sorted, with one time and no owner: setuptools keeps this machine's."""
    with (
        tarfile.open(sdist) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=release.epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = release.epoch
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
