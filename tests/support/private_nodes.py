"""A daemon over nodes with namespaces of their own, on a network that no route leaves.

Each node has its own processes, mounts, network and boot id, so what a playbook does to it is seen on no
other node, nor on this machine.  The daemon is in a network namespace too.  It needs root, iproute2 and
util-linux.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.daemon_environment import DaemonEnvironment
from tests.support.sshd import Sshd

SUBNET = "10.77.0"
"""In namespaces of its own, so it collides with nothing of this machine."""

SERVICE_PORT = 8080

PORT = 2222
"""Of each node's sshd."""

# PID 1 of a node: sshd and a service, started again when they end.  A boot ends when sshd ends.
_INIT = f"""\
[ $$ = 1 ] || exit 1
directory=$1; shift
readlink /proc/self/ns/pid > "$directory/namespace"
cat /proc/sys/kernel/random/boot_id > "$directory/boot_id"
mount --bind "$directory/boot_id" /proc/sys/kernel/random/boot_id
while :; do
    while :; do {sys.executable} -SE "$directory/service" {SERVICE_PORT} "$directory/service.pid"; done &
    "$@" & wait $!
done
"""

_REBOOT = """\
#!/bin/sh
directory=${0%/*}
# Elsewhere it would end all processes of this machine.
[ "$(readlink /proc/self/ns/pid)" = "$(cat "$directory/namespace")" ] || exit 1
cat /proc/sys/kernel/random/uuid > "$directory/boot_id"
kill -KILL -1
"""

_SERVICE = """\
import os, signal, socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    with open(sys.argv[2] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.replace(sys.argv[2] + ".new", sys.argv[2])
    signal.pause()
"""
"""Listens on a port, and then writes its pid to a file."""


class PrivateNodes(DaemonEnvironment):
    """Nodes in namespaces; the playbooks of a node find `directory(node)` in its variable `private`."""

    def __init__(self, directory: Path, labels: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__(directory, {name: {**each} for name, each in labels.items()})
        for name, each in self.labels.items():
            assert isinstance(each, dict)
            each["private"] = str(self.private(name))
        self.daemon_prefix = ("ip", "netns", "exec", self._namespace(""))

    def private(self, node: str) -> Path:
        """Return the directory with what a node keeps: service, service.pid, boot_id and reboot."""
        return self.directory / "private" / node

    def make_networks(self) -> None:
        """Make a namespace with a bridge for the daemon, and one for each node."""
        home, bridge = self._namespace(""), "bridge"
        ip(f"netns add {home}")
        ip(f"-n {home} link set lo up")
        ip(f"-n {home} link add {bridge} type bridge")
        ip(f"-n {home} addr add {SUBNET}.254/24 dev {bridge}")
        ip(f"-n {home} link set {bridge} up")
        for number, name in enumerate(self.labels, 1):
            namespace = self._namespace(name)
            ip(f"netns add {namespace}")
            ip(f"-n {home} link add port{number} type veth peer name eth0 netns {namespace}")
            ip(f"-n {home} link set port{number} master {bridge} up")
            ip(f"-n {namespace} addr add {SUBNET}.{number}/24 dev eth0")
            ip(f"-n {namespace} link set eth0 up")
            ip(f"-n {namespace} link set lo up")

    def routes(self) -> str:
        """Return all routes out of the namespaces' own networks: none."""
        names = map(self._namespace, ("", *self.labels))
        return "".join(ip(f"-n {name} route show default") for name in names)

    def sysctls(self, node: str, names: Sequence[str]) -> dict[str, str]:
        """Return parameters of a node's network, with one space between values."""
        found = ip(f"netns exec {self._namespace(node)} sysctl -n {' '.join(names)}").splitlines()
        return {name: " ".join(value.split()) for name, value in zip(names, found, strict=True)}

    def set_sysctl(self, node: str, name: str, value: str) -> None:
        """Set a parameter of a node's network, as a person there would."""
        ip(f"netns exec {self._namespace(node)} sysctl -q -w {name}={value}")

    def make_sshd(self, name: str) -> Sshd:
        private = self.private(name)
        private.mkdir(parents=True)
        for file, text in (("init", _INIT), ("reboot", _REBOOT), ("service", _SERVICE)):
            (private / file).write_text(text)
            (private / file).chmod(0o755)
        address = f"{SUBNET}.{list(self.labels).index(name) + 1}"
        enter = ("ip", "netns", "exec", self._namespace(name))
        unshare = "unshare --pid --fork --kill-child --mount --mount-proc --propagation private --uts --ipc"
        prefix: Sequence[str] = (*enter, *unshare.split(), "sh", str(private / "init"), str(private))
        sshd = Sshd((address,), prefix)
        sshd.port = PORT
        return sshd

    def stop(self) -> None:
        super().stop()
        for name in ("", *self.labels):
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False, capture_output=True)

    def _namespace(self, node: str) -> str:
        return f"rolloutd-{os.getpid()}-{node or 'daemon'}"


@contextmanager
def private_nodes(
    directory: Path, labels: Mapping[str, Mapping[str, str]], **settings: object
) -> Iterator[PrivateNodes]:
    """Start the nodes and a daemon over them; end everything."""
    made = PrivateNodes(directory, labels)
    try:
        made.make_networks()
        made.start_nodes()
        made.write_settings(**settings)
        made.start_daemon()
        yield made
    finally:
        made.stop()


def ip(words: str) -> str:
    """Run `ip` with these words; return its output."""
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout
