"""A real systemd as PID 1 of namespaces of its own, for tests of what runs under it.

It sees this machine's files read-only, but for one directory of the test, and
has its own /run, /etc and /tmp (laid over the machine's), /dev, /var/lib,
/var/log and cgroups.  It knows only the units it is given: none of the machine's are loaded,
so nothing mounts, cleans or configures anything.  The network is the machine's.
It needs root and util-linux, and knows neither pytest nor rolloutd.

`DebianSystemd` boots a root file system of its own instead, with all units of that, and writes only there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")

START_LIMIT_S = 120.0
"""A loaded machine boots these few units late; one that needs longer is broken."""

POLL_S = 0.05

TARGETS = (
    "basic.target",
    "local-fs.target",
    "multi-user.target",
    "network-online.target",
    "shutdown.target",
    "sockets.target",
    "sysinit.target",
    "umount.target",
)
"""What units refer to by default; empty here."""

JOURNAL = ("systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket")

# In a cgroup of its own, so that what is left of it can be found and removed.
_OUTER_SCRIPT = """\
set -eu
mkdir "$1/cgroup"
mount -t cgroup2 none "$1/cgroup"
mkdir "$1/cgroup/$2"
echo $$ > "$1/cgroup/$2/cgroup.procs"
umount "$1/cgroup"
exec unshare --pid --fork --kill-child --mount --propagation private --uts --ipc --cgroup \
    sh "$1/inner" "$1"
"""

# First of all nothing of the machine can be written any more.
_INNER_SCRIPT = """\
set -eu
mount --bind "$1" "$1"
mount -o remount,bind,ro /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/own /run/dev/pts /run/dev/shm /run/lock
mount --bind "$1" /run/own
for place in etc tmp; do
    mkdir -p /run/overlay/$place/upper /run/overlay/$place/work
    chmod --reference=/$place /run/overlay/$place/upper
    mount -t overlay overlay /$place \
        -o lowerdir=/$place,upperdir=/run/overlay/$place/upper,workdir=/run/overlay/$place/work
done
mount --bind /run/own "$1"
for node in null zero full random urandom tty; do
    touch /run/dev/$node
    mount --bind /dev/$node /run/dev/$node
done
ln -s /proc/self/fd /run/dev/fd
ln -s pts/ptmx /run/dev/ptmx
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts /run/dev/pts
chmod 1777 /run/dev/shm
mount --rbind /run/dev /dev
for place in /var/lib /var/log; do mount -t tmpfs -o mode=755 tmpfs $place; done
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# Among themselves: credentials are mounted in one namespace and seen in another.
mount --make-rshared /
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_LOG_TARGET=journal \
    SYSTEMD_UNIT_PATH="$1/units" SYSTEMD_GENERATOR_PATH="$1/none" \
    SYSTEMD_ENVIRONMENT_GENERATOR_PATH="$1/none" SYSTEMD_PRESET_PATH="$1/none" \
    /lib/systemd/systemd --system --unit=test.target --show-status=no
"""

# The same over the root file system of another Debian, which pivot_root makes the only one.
_DEBIAN_SCRIPT = """\
set -eu
mkdir "$1/root" "$1/upper" "$1/work"
mount -t overlay overlay -o "lowerdir=$(cat "$1/layers"),upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount --rbind /sys sys
umount -R sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
for node in null zero full random urandom tty; do
    touch dev/$node
    mount --bind /dev/$node dev/$node
done
ln -s /proc/self/fd dev/fd
ln -s pts/ptmx dev/ptmx
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
pivot_root . mnt
umount -l /mnt
mount --make-rshared /
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_LOG_TARGET=journal \
    /lib/systemd/systemd --system --unit=multi-user.target --show-status=no
"""

_CLEANUP_SCRIPT = """\
set -eu
mount -t cgroup2 none "$1/cgroup"
find "$1/cgroup/$2" -depth -type d -exec rmdir {} +
"""


class Systemd:
    """A service manager of its own: `start()`, `ctl(...)`, `inside(...)`, `stop()`.

    `prefix` is a command that starts it, such as one that enters a network namespace.
    """

    script = _INNER_SCRIPT
    target = "test.target"

    def __init__(self, directory: Path, prefix: Sequence[str] = ()) -> None:
        """Use the directory, which must be empty, for units and everything else."""
        self.directory = directory
        self._prefix = prefix
        self.units = directory / "units"
        self.units.mkdir()
        self.pid = 0
        self._outer: subprocess.Popen[bytes] | None = None
        # A test process may run several at once, each below a directory of its own.
        self._cgroup = f"rolloutd-test-{os.getpid()}-{directory.parent.name}"

    @property
    def root(self) -> Path:
        """The file system as it sees it."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def log(self) -> str:
        """What systemd itself said."""
        return (self.directory / "systemd.log").read_text(errors="replace")

    def start(self, *wanted: str) -> None:
        """Boot into a target that wants these units; raises RuntimeError when that fails."""
        for name in TARGETS:
            (self.units / name).write_text("[Unit]\nDefaultDependencies=no\n")
        for name in JOURNAL:
            shutil.copy(SYSTEMD.parent / "system" / name, self.units / name)
        wants = " ".join(("systemd-journald.socket", *wanted))
        (self.units / "test.target").write_text(f"[Unit]\nWants={wants}\nAfter={wants}\n")
        self._boot()

    def _boot(self) -> None:
        (self.directory / "inner").write_text(self.script)
        with (self.directory / "systemd.log").open("wb") as log:
            self._outer = subprocess.Popen(
                # Whatever ends the test ends it as well.
                [*self._prefix, "setpriv", "--pdeathsig", "KILL", *self._in_private_mounts(_OUTER_SCRIPT)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not self._booted():
            if self._outer.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"systemd did not boot:\n{self.log}")
            time.sleep(POLL_S)

    def ctl(self, *words: str, check: bool = True) -> str:
        """Run systemctl and return what it said; raises RuntimeError when it fails and that matters."""
        return self.inside("systemctl", *words, check=check)

    def inside(self, *words: str, check: bool = True) -> str:
        """Run a command as root in its namespaces."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-m", "-p", "-u", "-i", "-C", "--", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_LIMIT_S,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """Return one property of a unit."""
        return self.ctl("show", "--property", name, "--value", unit)

    def stop(self) -> None:
        """End it and everything that it started; safe to repeat."""
        outer, self._outer = self._outer, None
        if outer is None:
            return
        with contextlib.suppress(ProcessLookupError):
            # The end of PID 1 is the end of its whole namespace.
            os.kill(self.pid or outer.pid, signal.SIGKILL)
        outer.wait(START_LIMIT_S)
        subprocess.run(self._in_private_mounts(_CLEANUP_SCRIPT), capture_output=True)

    def _in_private_mounts(self, script: str) -> list[str]:
        """Return the command that runs a script where nobody else sees what it mounts."""
        private = ["unshare", "--mount", "--propagation", "private"]
        return [*private, "sh", "-c", script, "sh", str(self.directory), self._cgroup]

    def _booted(self) -> bool:
        if not self.pid:
            self.pid = self._first_process()
        return bool(self.pid) and self.target in self._active()

    def _first_process(self) -> int:
        """Return the pid of the namespaces' PID 1 as this machine counts; 0 while there is none."""
        assert self._outer is not None
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        try:
            found = children.read_text().split()
            if found and Path(f"/proc/{found[0]}/comm").read_text().strip() == "systemd":
                return int(found[0])
        except OSError:
            return 0
        return 0

    def _active(self) -> str:
        return self.ctl("list-units", "--plain", "--no-legend", "--state=active", check=False)


class DebianSystemd(Systemd):
    """The systemd of a root file system; what is written there stays in the given directory."""

    script = _DEBIAN_SCRIPT
    target = "multi-user.target"

    def boot(self, layers: Sequence[Path]) -> None:
        """Boot a root file system, the upper layer first; raises RuntimeError when that fails."""
        (self.directory / "layers").write_text(":".join(map(str, layers)))
        self._boot()
