"""Minimal Debians with their own sshd, as the nodes of a fleet: file system, processes, network, accounts.

Their sshd has Debian's settings and listens on port 22.  Each shares the layers below and writes to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.packaged_daemon import PackagedDaemon
from tests.support.private_nodes import SUBNET
from tests.support.sshd import Sshd

PACKAGES = ("openssh-server", "procps", "python3", "sudo")
"""What Debian installs on a server, and a minimal one lacks."""

PORT = 22

# PID 1 of a machine.  The host key is the one that the support of sshd has made.
_INIT = """\
set -eu
[ $$ = 1 ]
private=$1 keys=$2 layers=$3 name=$4
root=$private/root
mkdir -p "$root" "$private/upper" "$private/work"
mount -t overlay overlay -o "lowerdir=$layers,upperdir=$private/upper,workdir=$private/work" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir "$root/run/sshd"
rm -f "$root"/etc/ssh/ssh_host_*
cp "$keys/host_key" "$root/etc/ssh/ssh_host_ed25519_key"
cp "$keys/host_key.pub" "$root/etc/ssh/ssh_host_ed25519_key.pub"
mkdir -p -m 700 "$root/root/.ssh"
cp "$private/authorized_keys" "$root/root/.ssh/authorized_keys"
hostname "$name"
exec chroot "$root" /usr/sbin/sshd -D -e
"""


class DebianMachines(PackagedDaemon):
    """`start_machines(layers, key)` starts the nodes, then `boot(layers)` the daemon's machine."""

    def __init__(self, directory: Path, labels: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__(directory, labels)
        self._layers: Sequence[Path] = ()
        self._public_key = ""

    def start_machines(self, layers: Sequence[Path], public_key: str) -> None:
        """Start the nodes; root logs in with the key."""
        self._layers, self._public_key = layers, public_key
        self.start_nodes()

    def make_sshd(self, name: str) -> Sshd:
        private = self.private(name)
        private.mkdir(parents=True)
        (private / "init").write_text(_INIT)
        (private / "authorized_keys").write_text(self._public_key)
        enter = ("ip", "netns", "exec", self._namespace(name))
        unshare = "unshare --pid --fork --kill-child --mount --mount-proc --propagation private --uts --ipc"
        keys, layers = self.directory / "nodes" / name, ":".join(map(str, self._layers))
        words = (str(private / "init"), str(private), str(keys), layers, name)
        address = f"{SUBNET}.{list(self.labels).index(name) + 1}"
        sshd = Sshd((address,), (*enter, *unshare.split(), "sh", *words))
        sshd.port = PORT
        return sshd

    def known_hosts_lines(self) -> str:
        """Return the lines that a login by address would have added to known_hosts."""
        keys = [(sshd.directory / "host_key.pub").read_text().split()[:2] for sshd in self.sshds.values()]
        addresses = [sshd.addresses[0] for sshd in self.sshds.values()]
        return "".join(f"{address} {' '.join(key)}\n" for address, key in zip(addresses, keys, strict=True))
