"""The Debian package: the files where Debian expects them, and dpkg-deb."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import sys
from pathlib import Path

from deploy.packages import virtual_environment
from deploy.packages.release import PYTHON, Release

HERE = Path(__file__).parent / "debian"
"""Of the builder, not of the tree that is built: the tree of 0.1 has no package."""

_PAGES = (("rolloutctl", "1", "rolloutd.cli.main"), ("rolloutd", "8", "rolloutd.__main__"))

SCRIPTS = ("preinst", "postinst", "prerm", "postrm")


def build(release: Release, wheel: Path, *, bare: bool = False) -> Path:
    """Build the package and its SBOM; return the package's file.

    A bare package has neither an SBOM nor what the command line prints about itself.
    """
    stage = release.work / "deb"
    stage.mkdir(mode=0o755)
    environment = virtual_environment.make(release, wheel, stage)
    _install_files(release, stage)
    if not bare:
        _write_bill_of_materials(release, environment)
        _install_generated(release, environment, stage)
    _write_control(release, stage)
    release.set_times(stage)
    architecture = release.run("dpkg", "--print-architecture").strip()
    package = release.out / f"rolloutd_{release.version}_{architecture}.deb"
    # zstd takes a tenth of the time of xz, and Debian 12 and Ubuntu 22.04 read it.
    release.run("dpkg-deb", "--root-owner-group", "-Zzstd", "-z9", "--build", stage, package)
    return package


def _install_files(release: Release, stage: Path) -> None:
    deploy, documents = release.tree / "deploy", stage / "usr/share/doc/rolloutd"
    places = {
        "lib/systemd/system": (deploy / "systemd").glob("*"),
        "usr/lib/sysusers.d": (deploy / "sysusers.d").glob("*"),
        "usr/lib/tmpfiles.d": (deploy / "tmpfiles.d").glob("*"),
        "etc/rolloutd": (deploy / "etc").glob("*"),
        "usr/share/doc/rolloutd": (release.tree / "docs").glob("*.md"),
    }
    for place, files in places.items():
        (stage / place).mkdir(parents=True)
        for file in files:
            shutil.copy(file, stage / place / file.name)
    for place in ("config.d", "credentials"):
        (stage / "etc/rolloutd" / place).mkdir()
    for name in ("examples", "playbooks", "deploy/monitoring"):
        if (release.tree / name).is_dir():
            shutil.copytree(release.tree / name, documents / Path(name).name)
    for link, program in {"usr/bin/rolloutctl": "rolloutctl", "usr/sbin/rolloutd": "rolloutd"}.items():
        (stage / link).parent.mkdir(parents=True, exist_ok=True)
        (stage / link).symlink_to(virtual_environment.PREFIX / "bin" / program)
    (documents / "copyright").write_text(_copyright())
    _compress((release.tree / "CHANGELOG.md").read_bytes(), documents / "changelog.gz")


def _copyright() -> str:
    return (
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n"
        "Files: *\nCopyright: the authors of rolloutd\nLicense: Apache-2.0\n"
        " On Debian systems the license is in /usr/share/common-licenses/Apache-2.0.\n\n"
        "Files: opt/rolloutd/lib/*\nCopyright: their authors\nLicense: several\n"
        " Each library's license is in its directory NAME.dist-info.\n"
    )


def _install_generated(release: Release, environment: Path, stage: Path) -> None:
    """Write man pages and completions from the command line, and the links in /usr."""
    shells = {
        "bash": "usr/share/bash-completion/completions/rolloutctl",
        "zsh": "usr/share/zsh/vendor-completions/_rolloutctl",
        "fish": "usr/share/fish/vendor_completions.d/rolloutctl.fish",
    }
    for shell, place in shells.items():
        (stage / place).parent.mkdir(parents=True, exist_ok=True)
        script = release.run(environment / "bin/python", "-m", "rolloutd.cli", "completion", shell)
        (stage / place).write_text(script)
    packages = next(environment.glob("lib/python3*/site-packages"))
    for program, section, module in _PAGES:
        words = ("-m", "deploy.packages.manual_page", packages, module, section, release.version)
        page = release.run(sys.executable, *words, cwd=HERE.parents[2])
        if page:
            target = stage / f"usr/share/man/man{section}/{program}.{section}.gz"
            target.parent.mkdir(parents=True)
            _compress(page.encode(), target)


def _compress(content: bytes, target: Path) -> None:
    target.write_bytes(gzip.compress(content, 9, mtime=0))


def _write_control(release: Release, stage: Path) -> None:
    for path in stage.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    (stage / "etc/rolloutd/credentials").chmod(0o700)
    files = sorted(path for path in stage.rglob("*") if path.is_file() and not path.is_symlink())
    version = release.run(PYTHON, "-c", "import sys; print(sys.version_info.minor)").strip()
    control = (
        (HERE / "control.in")
        .read_text()
        .format(
            version=release.version,
            architecture=release.run("dpkg", "--print-architecture").strip(),
            # The compiled libraries and the bytecode are for this Python only.
            python=f"python3 (>= 3.{version}~), python3 (<< 3.{int(version) + 1})",
            size=sum(path.stat().st_size for path in files) // 1024,
        )
    )
    target = stage / "DEBIAN"
    target.mkdir(mode=0o755)
    (target / "control").write_text(control)
    etc = [f"/{path.relative_to(stage)}\n" for path in files if path.is_relative_to(stage / "etc")]
    (target / "conffiles").write_text("".join(etc))
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(stage)}\n" for path in files]
    (target / "md5sums").write_text("".join(sums))
    for name in SCRIPTS:
        shutil.copy(HERE / name, target / name)
        (target / name).chmod(0o755)


def _write_bill_of_materials(release: Release, environment: Path) -> None:
    """Write the SBOM as a CycloneDX file, from the environment, which has what the lock names."""
    target = release.out / f"rolloutd-{release.version}.cdx.json"
    project = ("--pyproject", release.tree / "pyproject.toml", "--mc-type", "application")
    command = (Path(sys.executable).parent / "cyclonedx-py", "environment", "--output-reproducible", *project)
    release.run(*command, "--output-file", target, environment / "bin/python")
