"""`make packages`: builds everything that a release has, into one directory.

    python -m deploy.packages [--out DIR] [--tree DIR] [--bare] [wheel deb image]

It needs the packages of requirements.lock from pip's own configuration, and for the image those of
Debian from apt's.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.packages import debian_package, distributions, image
from deploy.packages.release import KINDS, Release, open_release


def main() -> int:
    """Build what was asked for; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.packages", description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="(default: dist)")
    parser.add_argument(
        "--tree", type=Path, default=Path.cwd(), metavar="DIR", help="checkout to build (default: this one)"
    )
    parser.add_argument(
        "--bare",
        action="store_true",
        help="no man pages, completions and SBOM, for a tree that cannot print them",
    )
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: unknown; name some of {', '.join(KINDS)}")
    with open_release(options.tree.resolve(), options.out.resolve()) as release:
        try:
            build(release, options.kinds or KINDS, bare=options.bare)
        except subprocess.CalledProcessError as failed:
            sys.stderr.write(f"{failed.cmd[0]}: it ended with {failed.returncode}; see its messages above\n")
            return 1
    return 0


def build(release: Release, kinds: Sequence[str], *, bare: bool) -> None:
    """Build the kinds, each from those before it, and write the checksums."""
    wheel = distributions.build_wheel_and_sdist(release)
    package: Path | None = None
    if {"deb", "image"} & set(kinds):
        package = debian_package.build(release, wheel, bare=bare)
    if "image" in kinds and package is not None:
        image.build(release, package)
    files = sorted(path for path in release.out.iterdir() if release.version in path.name)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (release.out / "SHA256SUMS").write_text("".join(lines))
    for line in lines:
        sys.stdout.write(line)


if __name__ == "__main__":
    sys.exit(main())
