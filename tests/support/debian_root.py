"""A minimal Debian as a directory, from the Debian sources of this machine's apt.

It needs root and mmdebstrap, and knows neither pytest nor rolloutd.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from deploy.packages.image import SUITE, debian_sources

LIMIT_S = 900.0
"""A hundred packages are unpacked within half a minute; a busy machine needs some minutes."""


def make_debian_root(directory: Path) -> Path:
    """Install Debian's essential packages, apt and systemd into the directory, and return it."""
    command = (
        *("mmdebstrap", "--quiet", "--variant=apt", "--format=directory", "--include=systemd,systemd-sysv"),
        # Kept: the package's dependencies are installed later.  Unsafe: nobody needs it after a power cut.
        *("--skip=cleanup/apt/lists", "--dpkgopt=force-unsafe-io"),
        *("--aptopt=APT::Install-Recommends false", SUITE, str(directory), "-"),
    )
    sources = debian_sources()
    subprocess.run(command, input=sources, check=True, text=True, cwd="/", timeout=LIMIT_S)
    for name in ("resolv.conf", "hosts"):
        shutil.copy(Path("/etc") / name, directory / "etc" / name)
    # As unattended upgrades do: settings that were changed are kept without a question.
    (directory / "etc/apt/apt.conf.d/99keep").write_text('Dpkg::Options {"--force-confold";};\n')
    return directory
