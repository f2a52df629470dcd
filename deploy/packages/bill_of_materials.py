"""The SBOM: every library of the virtual environment, with version, licence and what needs it."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.packages.release import Release


def write(release: Release, environment: Path) -> None:
    """Write a CycloneDX file from the environment that the package has, which has what the lock names."""
    target = release.out / f"rolloutd-{release.version}.cdx.json"
    project = ("--pyproject", release.tree / "pyproject.toml", "--mc-type", "application")
    command = (Path(sys.executable).parent / "cyclonedx-py", "environment", "--output-reproducible", *project)
    release.run(*command, "--output-file", target, environment / "bin/python")
