"""A minimal Debian as a directory, from the sources of this machine's apt, and packages in a layer over it.

It needs root, mmdebstrap and overlayfs, and knows neither pytest nor rolloutd.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deploy.packages.image import SUITE, debian_sources

LIMIT_S = 900.0
"""A hundred packages are unpacked within half a minute; a busy machine needs some minutes."""

# Nothing starts, because there is no service manager; the mounts end with the namespace.
_INSTALL_SCRIPT = """\
set -eu
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
mount -t proc proc "$2/root/proc"
mount --rbind /dev "$2/root/dev"
chroot "$2/root" apt-get install -y -q --no-install-recommends $3
"""


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


def install_in_layer(root: Path, directory: Path, packages: Sequence[str]) -> None:
    """Install packages over a root file system; `upper` in the directory is their layer."""
    for name in ("root", "upper", "work"):
        (directory / name).mkdir(parents=True)
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", _INSTALL_SCRIPT, "sh"),
            *(str(root), str(directory), " ".join(packages)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
    )
    if done.returncode:
        raise RuntimeError(f"apt-get install: {done.returncode}\n{done.stdout}{done.stderr}")
