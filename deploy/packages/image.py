"""The OCI image, as an archive: Debian's packages and ours, put together without a container engine.

mmdebstrap installs from the Debian sources of this machine's apt; umoci writes the image.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from deploy.packages.release import Release

SUITE = "bookworm"
"""Debian 12, whose Python 3.11 is the one that the package is built for."""

USER = 10001
"""uid and gid of the daemon; the manifests name it, and ssh needs an account with it in the image."""

PACKAGES = (
    "ca-certificates",
    "git",
    "openssh-client",
    "python3",
    # Without them the package would bring all of systemd, which runs in no container.
    "systemd-standalone-sysusers",
    "systemd-standalone-tmpfiles",
    "tini",
)

_EXCLUDED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")

# Before the package's postinst, which would take any free uid.
_ACCOUNTS = f"""\
#!/bin/sh -e
echo "rolloutd:x:{USER}:{USER}:rolloutd daemon:/var/lib/rolloutd:/usr/sbin/nologin" >> "$1/etc/passwd"
echo "rolloutd:x:{USER}:" >> "$1/etc/group"
"""

# The manifests mount volumes there; without one, an unprivileged engine may still write to them.
_DIRECTORIES = f"""\
#!/bin/sh -e
for place in var/lib/rolloutd run/rolloutd; do install -d -o {USER} -g {USER} -m 755 "$1/$place"; done
rm -rf "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap "$1"/var/log/* "$1"/var/cache/ldconfig "$1"/etc/machine-id
"""

CONFIGURATION = {
    "config.user": f"{USER}:{USER}",
    # PID 1 passes signals on and reaps what playbooks leave.
    "config.entrypoint": ("/usr/bin/tini", "--", "/opt/rolloutd/bin/rolloutd"),
    "config.cmd": ("--config", "/etc/rolloutd/config.yaml"),
    "config.workingdir": "/var/lib/rolloutd",
    "config.stopsignal": "SIGTERM",
    # SHELL, because ssh runs ProxyCommand with it and the account has none.
    "config.env": (
        "PATH=/opt/rolloutd/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        *("HOME=/var/lib/rolloutd", "SHELL=/bin/sh", "LC_ALL=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1"),
    ),
    "config.volume": ("/var/lib/rolloutd", "/run/rolloutd", "/tmp"),
}


def build(release: Release, package: Path) -> Path:
    """Build the image with the package; return the archive."""
    root, layout = release.work / "root.tar", release.work / "image"
    _install(release, package, root)
    name = f"{layout}:{release.version}"
    created = release.run("date", "--utc", "--date", f"@{release.epoch}", "+%Y-%m-%dT%H:%M:%SZ").strip()
    history = ("--history.created", created, "--history.created_by", "make packages")
    release.run("umoci", "init", "--layout", layout)
    release.run("umoci", "new", "--image", name)
    release.run("umoci", "raw", "add-layer", *history, "--image", name, root)
    options = [
        word
        for option, values in CONFIGURATION.items()
        for value in ([values] if isinstance(values, str) else values)
        for word in (f"--{option}", value)
    ]
    labels = ("--config.label", f"org.opencontainers.image.version={release.version}")
    release.run("umoci", "config", *history, "--created", created, *labels, *options, "--image", name)
    release.run("umoci", "gc", "--layout", layout)
    release.set_times(layout)
    target = release.out / f"rolloutd-{release.version}.oci.tar"
    plain = ("--sort=name", "--owner=0", "--group=0", "--numeric-owner")
    release.run("tar", *plain, "-C", layout, "-cf", target, "blobs", "index.json", "oci-layout")
    return target


def debian_sources() -> str:
    """Return the Debian sources of this machine's apt, as lines of sources.list."""
    line = "deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = ("apt-get", "indextargets", "--format", line, "Created-By: Packages", "Origin: Debian")
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = sorted({line for line in listed.splitlines() if f" {SUITE}" in line})
    if not lines:
        raise SystemExit(f"apt: no source of Debian {SUITE}; add one and run apt-get update")
    return "\n".join(lines) + "\n"


def _install(release: Release, package: Path, root: Path) -> None:
    hooks = {"essential": _ACCOUNTS, "customize": _DIRECTORIES}
    for name, text in hooks.items():
        (release.work / name).write_text(text)
        (release.work / name).chmod(0o755)
    copies_package = "/usr/share/mmdebstrap/hooks/file-mirror-automount"
    command = (
        *("mmdebstrap", "--quiet", "--variant=essential", f"--hook-dir={copies_package}"),
        f"--include={','.join((*PACKAGES, str(package)))}",
        *("--aptopt=APT::Install-Recommends false", "--dpkgopt=force-unsafe-io"),
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED),
        *(f"--{name}-hook={release.work / name}" for name in hooks),
        *(SUITE, str(root), "-"),
    )
    environment = release.environment()
    subprocess.run(command, check=True, input=debian_sources(), text=True, env=environment, cwd="/")
