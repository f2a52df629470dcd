"""Two daemons of one PostgreSQL, a synchronous standby server, and nodes, in network namespaces of their own.

    home        the nodes' sshd (10.79.0.1 and up) and both servers (10.78.0.1, 10.78.0.2), each net a bridge
    a, b        one daemon each, with a link to either bridge

Tests reach the servers and the daemons over Unix sockets, which no cut concerns.  It needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from rolloutd.control.client import ApiError, Client, DaemonUnreachable
from tests.support.daemon_environment import DaemonEnvironment
from tests.support.forked_process import start_daemon
from tests.support.postgresql import ROLE, Postgresql
from tests.support.private_nodes import ip
from tests.support.s3_server import Bucket, running_s3_server
from tests.support.sshd import Sshd

NAMES = ("a", "b")

NETS = {"databases": "10.78.0", "nodes": "10.79.0"}
"""Subnets of the two nets, in namespaces of the tests."""

SERVERS = ("10.78.0.1", "10.78.0.2")

SSHD_PORT = 2222

LIMIT_S = 120.0
"""What is waited for comes within seconds."""


class Nodes(DaemonEnvironment):
    """A daemon of the pair; the nodes are the first one's."""

    def make_sshd(self, name: str) -> Sshd:
        # Their processes are not seen by the daemons, nor theirs by the nodes.
        unshare = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
        address = f"{NETS['nodes']}.{list(self.labels).index(name) + 1}"
        sshd = Sshd((address,), ("ip", "netns", "exec", namespace("home"), *unshare))
        sshd.port = SSHD_PORT
        return sshd


class DaemonPair:
    """The daemons, the servers, and what cuts them off."""

    def __init__(
        self, root: Path, lease_s: float, primary: Postgresql, spare: Postgresql, bucket: Bucket
    ) -> None:
        self.root, self.lease_s, self.primary, self.spare, self.bucket = root, lease_s, primary, spare, bucket
        self.database = primary.make_database()
        self.daemons: dict[str, DaemonEnvironment] = {}

    # -- daemons

    def start(self, labels: Mapping[str, Mapping[str, str]], **settings: Any) -> None:
        """Start the nodes and both daemons."""
        key = self.root / "redaction.key"
        key.write_bytes(b"k" * 32)
        for name in NAMES:
            (self.root / name).mkdir()
            self.daemons[name] = Nodes(self.root / name, labels)
        first = self.daemons["a"]
        first.start_nodes()
        dsn = f"host={','.join(SERVERS)} dbname={self.database} user={ROLE} sslmode=disable"
        inventory = {"path": str(first.directory / "hosts.yml"), "labels": ["team", "role"]}
        for name, daemon in self.daemons.items():
            daemon.write_settings(
                name=name,
                inventory=[{"ansible": inventory}],
                ssh={"known_hosts": str(first.directory / "known_hosts")},
                ansible={"fence_dir": str(self.root / "fence")},
                files={"s3": self.bucket.settings().model_dump(mode="json", exclude_none=True)},
                redaction_key_file=str(key),
                store={"postgresql": {"dsn": dsn, "lease": f"{self.lease_s:g}s"}},
                **settings,
            )
            self.start_daemon(name)

    def start_daemon(self, name: str) -> None:
        daemon = self.daemons[name]
        words = ["--config", str(daemon.directory / "config.yaml")]
        log = daemon.directory / "daemon.log"
        daemon.process = start_daemon(words, log, dict(os.environ), namespace=namespace(name))

    def revive(self) -> None:
        """Start each daemon that has ended, as a service manager does."""
        for name, daemon in self.daemons.items():
            if daemon.process is not None and daemon.process.poll() is not None:
                self.start_daemon(name)

    def status(self, name: str) -> dict[str, Any]:
        with suppress(DaemonUnreachable, ApiError):
            answer: dict[str, Any] = Client(self.daemons[name].client.path, timeout_s=2.0).get("/v1/status")
            return answer
        return {}

    def role(self, name: str) -> str:
        return str(self.status(name).get("role", ""))

    def leader(self) -> str:
        return next((name for name in NAMES if self.role(name) == "leader"), "")

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"in vain: {what}\n" + "\n".join(
                f"{name}: {daemon.log_tail()}" for name, daemon in self.daemons.items()
            )
            time.sleep(0.05)
        return value

    def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.stop()

    # -- cuts

    def unplug(self, name: str, net: str) -> None:
        """Lose each packet between a daemon and a net, from now on."""
        ip(f"-n {namespace('home')} link set {net}-{name} nomaster")

    def plug(self, name: str, net: str) -> None:
        ip(f"-n {namespace('home')} link set {net}-{name} master {net}")

    def reset(self, name: str) -> None:
        """End a daemon's connections with the servers, and refuse others."""
        for server in SERVERS:
            ip(f"-n {namespace(name)} route add unreachable {server}/32")
        sockets = ("ss", "--kill", "state", "established", "dst", f"{NETS['databases']}.0/24")
        subprocess.run(
            ["ip", "netns", "exec", namespace(name), *sockets], check=True, stdout=subprocess.DEVNULL
        )

    def accept(self, name: str) -> None:
        for server in SERVERS:
            ip(f"-n {namespace(name)} route del unreachable {server}/32")

    # -- servers

    def connect(self) -> psycopg.Connection[Any]:
        """Return a session of a superuser on the primary."""
        session = self.primary.connect(self.database)
        session.execute("SET search_path = rolloutd; SET synchronous_commit = local")
        return session

    def restart_primary(self) -> None:
        self.primary.stop()
        self.primary.start()

    def replace_primary(self) -> None:
        """Let the standby server be the primary, and make the old primary its standby server."""
        self.primary.stop()
        self.spare.promote()
        self.primary, self.spare = self.spare, self.primary
        shutil.rmtree(self.spare.data)
        self.spare.copy_of(self.primary)
        self.spare.start()


@contextmanager
def daemon_pair(root: Path, lease_s: float, nodes: int) -> Iterator[DaemonPair]:
    """Make the networks and the servers of a pair; `start()` makes the rest."""
    servers: list[Postgresql] = []
    pair: DaemonPair | None = None
    try:
        _make_networks(nodes)
        servers += map(_server, SERVERS)
        primary, spare = servers
        primary.initialize()
        with (primary.data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {NETS['databases']}.0/24 trust\n")
        primary.start()
        primary.make_template()
        with primary.connect() as admin:
            # Also of the copy; in effect only when that is there.
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            spare.copy_of(primary)
            spare.start()
            admin.execute("SELECT pg_reload_conf()")
        # The servers' machine has the bucket too: uploaded trees, and what ended runs said.
        prefix = ("ip", "netns", "exec", namespace("home"))
        with running_s3_server(prefix, SERVERS[0]) as s3:
            pair = DaemonPair(root, lease_s, primary, spare, s3.make_bucket())
            yield pair
    finally:
        if pair is not None:
            pair.stop()
        for server in servers:
            server.stop()
            shutil.rmtree(server.directory)
        for name in ("home", *NAMES):
            subprocess.run(["ip", "netns", "del", namespace(name)], check=False, capture_output=True)


def namespace(name: str) -> str:
    return f"rolloutd-{os.getpid()}-{name}"


def _server(address: str) -> Postgresql:
    # Below /tmp: a socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    prefix = ("ip", "netns", "exec", namespace("home"))
    return Postgresql(directory, prefix=prefix, listen_addresses=address, track_commit_timestamp="on")


def _make_networks(nodes: int) -> None:
    home = namespace("home")
    ip(f"netns add {home}")
    # Else the servers' side answers for its addresses at a link that is unplugged.
    ip(f"netns exec {home} sysctl -q -w net.ipv4.conf.all.arp_ignore=1")
    hosts = {"databases": len(SERVERS), "nodes": nodes}
    for number, (net, subnet) in enumerate(NETS.items()):
        # An address of its own, else that of a link: a link that is unplugged would take its packets.
        ip(f"-n {home} link add {net} address 02:00:00:00:00:0{number} type bridge")
        for host in range(1, hosts[net] + 1):
            ip(f"-n {home} addr add {subnet}.{host}/24 dev {net}")
        ip(f"-n {home} link set {net} up")
    for number, name in enumerate(NAMES):
        ip(f"netns add {namespace(name)}")
        ip(f"-n {namespace(name)} link set lo up")
        for net, subnet in NETS.items():
            ip(f"-n {home} link add {net}-{name} type veth peer name {net} netns {namespace(name)}")
            ip(f"-n {home} link set {net}-{name} master {net} up")
            ip(f"-n {namespace(name)} addr add {subnet}.{200 + number}/24 dev {net}")
            ip(f"-n {namespace(name)} link set {net} up")
