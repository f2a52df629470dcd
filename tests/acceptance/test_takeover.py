"""Two daemons of one PostgreSQL with a synchronous standby server, over real sshd nodes, under faults.

The nodes' journal, which the playbooks write, says who acted: never two controllers on a node at once, and no
run lost or repeated but those that the daemons recorded as unknown.  ROLLOUTD_TEST_TAKEOVERS says how many
faults there are, ROLLOUTD_TEST_NODES how many nodes.  Databases are reached over Unix sockets, so a cut is a
proxy of each daemon and not a network namespace.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import ApiError, Client, DaemonUnreachable
from rolloutd.store.postgresql.backend import PostgresqlBackend
from rolloutd.store.postgresql.connection import Address
from tests.support.cutting_proxy import CuttingProxy
from tests.support.daemon_environment import DaemonEnvironment, fleet_labels, plan
from tests.support.forked_process import start_daemon
from tests.support.postgresql import ROLE, Postgresql, running_server

pytestmark = [pytest.mark.servers("postgresql"), pytest.mark.long]

FAULTS = int(os.environ.get("ROLLOUTD_TEST_TAKEOVERS", "3"))
NODES = int(os.environ.get("ROLLOUTD_TEST_NODES", "6"))
LEASE_S = 5.0
TAKEOVER_LEASES = 1.5
LIMIT_S = 120.0
WORK_S = 1.0

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  vars: {run: "{{ lookup('env', 'ROLLOUTD_RUN') }}"}
  tasks:
    - ansible.builtin.raw: echo "begin {{ inventory_hostname }} {{ run }}" >> {{ journal }}
    - ansible.builtin.raw: sleep {{ work_s }}
    - ansible.builtin.raw: echo "end {{ inventory_hostname }} {{ run }}" >> {{ journal }}
"""


class Pair:
    """Two daemons, their proxies, and two database servers."""

    def __init__(self, root: Path, primary: Postgresql, spare: Postgresql) -> None:
        self.root, self.primary, self.spare = root, primary, spare
        self.journal = root / "journal"
        self.database = primary.make_database()
        self.daemons: dict[str, DaemonEnvironment] = {}
        self.proxies: dict[str, list[CuttingProxy]] = {}
        self._stack = ExitStack()

    def start(self, labels: dict[str, dict[str, str]]) -> None:
        key = self.root / "redaction.key"
        key.write_bytes(b"k" * 32)
        for name in ("a", "b"):
            (self.root / name).mkdir()
            made = self.daemons[name] = DaemonEnvironment(self.root / name, labels)
            self.proxies[name] = [self._proxy(server) for server in (self.primary, self.spare)]
        first = self.daemons["a"]
        first.nodes_per_sshd = 8
        first.start_nodes()
        for name, made in self.daemons.items():
            hosts = ",".join(str(proxy.directory) for proxy in self.proxies[name])
            dsn = f"host={hosts} dbname={self.database} user={ROLE}"
            made.write_settings(
                name=name,
                inventory=[
                    {"ansible": {"path": str(first.directory / "hosts.yml"), "labels": ["team", "role"]}}
                ],
                ssh={"known_hosts": str(first.directory / "known_hosts")},
                ansible={"fence_dir": str(self.root / "fence")},
                files={"directory": str(self.root / "files")},
                redaction_key_file=str(key),
                observe_within="20s",
                store={"postgresql": {"dsn": dsn, "lease": f"{LEASE_S:g}s"}},
            )
            self.start_daemon(name)

    def _proxy(self, server: Postgresql) -> CuttingProxy:
        # A socket's path has at most 107 bytes.
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="cut", dir="/tmp"))
        proxy = CuttingProxy(Path(directory), server.directory)
        self._stack.callback(proxy.close)
        return proxy

    def start_daemon(self, name: str) -> None:
        made = self.daemons[name]
        words = ["--config", str(made.directory / "config.yaml")]
        made.process = start_daemon(words, made.directory / "daemon.log", dict(os.environ))

    def revive(self) -> None:
        """Start each daemon that has ended, as a service manager does."""
        for name, made in self.daemons.items():
            if made.process is not None and made.process.poll() is not None:
                self.start_daemon(name)

    def status(self, name: str) -> dict[str, Any]:
        with suppress(DaemonUnreachable, ApiError):
            answer: dict[str, Any] = Client(self.daemons[name].client.path, timeout_s=2.0).get("/v1/status")
            return answer
        return {}

    def leader(self) -> str:
        return next((name for name in self.daemons if self.status(name).get("role") == "leader"), "")

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"in vain: {what}\n" + "\n".join(
                f"{name}: {made.log_tail()}" for name, made in self.daemons.items()
            )
            time.sleep(0.05)
        return found

    def stop(self) -> None:
        for made in self.daemons.values():
            made.stop()
        self._stack.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with running_server() as primary:
        directory = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
        spare = Postgresql(directory)
        spare.copy_of(primary)
        spare.start()
        made = Pair(tmp_path, primary, spare)
        try:
            with primary.connect() as admin:
                admin.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                admin.execute("SELECT pg_reload_conf()")
            made.start(fleet_labels(NODES, max(2, NODES // 4), 1))
            yield made
        finally:
            made.stop()
            spare.stop()
            shutil.rmtree(directory)


# -- faults: each returns what ends it ---------------------------------------------


def killed(pair: Pair, leader: str) -> Callable[[], None]:
    pair.daemons[leader].kill_daemon()
    return lambda: pair.start_daemon(leader)


def stopped(pair: Pair, leader: str) -> Callable[[], None]:
    """Stopped anywhere, and continued after the takeover: then it must end."""
    process = pair.daemons[leader].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        process.send_signal(signal.SIGCONT)
        pair.wait_for(lambda: process.poll() is not None, f"{leader} ends after its takeover")

    return go_on


def stopped_in_a_commit(pair: Pair, leader: str) -> Callable[[], None]:
    """It holds the row of the term."""
    for proxy in pair.proxies[leader]:
        proxy.lets_pass.clear()
    time.sleep(0.2)  # a message of the writer waits in the proxy
    go_on = stopped(pair, leader)
    for proxy in pair.proxies[leader]:
        proxy.lets_pass.set()
    return go_on


def cut_off_by_a_black_hole(pair: Pair, leader: str) -> Callable[[], None]:
    for proxy in pair.proxies[leader]:
        proxy.lets_pass.clear()

    def end() -> None:
        for proxy in pair.proxies[leader]:
            proxy.lets_pass.set()

    return end


def cut_off_by_resets(pair: Pair, leader: str) -> Callable[[], None]:
    for proxy in pair.proxies[leader]:
        proxy.is_refusing = True
        proxy.reset()

    def end() -> None:
        for proxy in pair.proxies[leader]:
            proxy.is_refusing = False

    return end


TAKEOVERS = (killed, cut_off_by_a_black_hole, stopped, cut_off_by_resets, stopped_in_a_commit)


@contextmanager
def counted(times: list[float]) -> Iterator[None]:
    began = time.monotonic()
    yield
    times.append(time.monotonic() - began)


def test_pair_loses_and_repeats_nothing_under_faults(pair: Pair) -> None:
    pair.wait_for(pair.leader, "one leads")
    leader = pair.leader()
    client = pair.daemons[leader]
    pair.wait_for(lambda: client.client.get("/v1/inventory")["sources"][0]["refreshed_at"], "the inventory")
    variables = {"journal": str(pair.journal), "work_s": WORK_S}
    maintain = {"playbook": "change.yml", "vars": variables, "on_unknown": "rerun"}
    rollout = client.submit(plan("pair", maintain=maintain, probation="0s"), {"change.yml": PLAYBOOK})
    client.vote(rollout, "start")
    times: list[float] = []
    for number, fault in enumerate(islice(cycle(TAKEOVERS), FAULTS)):
        leader = pair.wait_for(pair.leader, "one leads")
        other = "b" if leader == "a" else "a"
        pair.wait_for(lambda other=other: pair.status(other).get("role") == "standby", f"{other} waits")
        begun = journal_lines(pair)
        pair.wait_for(
            lambda begun=begun, leader=leader: (
                open_gates(pair, leader, rollout)
                or journal_lines(pair) > begun
                or is_done(pair, leader, rollout)
            ),
            "a node is at work",
        )
        with counted(times):
            end = fault(pair, leader)
            pair.wait_for(
                lambda other=other: pair.status(other).get("role") == "leader",
                f"{other} leads after {fault.__name__}",
            )
        print(f"fault {number + 1}, {fault.__name__}: {other} leads after {times[-1]:.1f} s")
        end()
        pair.wait_for(
            lambda leader=leader, other=other: pair.revive() or pair.status(leader).get("role") == "standby",
            "the old one waits",
        )

    def finished() -> bool:
        leader = pair.leader()
        if leader:
            open_gates(pair, leader, rollout)
        return bool(leader) and is_done(pair, leader, rollout)

    pair.wait_for(finished, "the rollout is done")
    leader = pair.leader()
    entries = [json.loads(entry) for entry in read_audit(pair)]
    judge(pair, entries, rollout)
    assert statistics.median(times) < TAKEOVER_LEASES * LEASE_S, times
    status = pair.status(leader)
    assert status["synchronous"] is True
    assert [each["name"] for each in status["standbys"]] == ["b" if leader == "a" else "a"]


def is_done(pair: Pair, leader: str, rollout: str) -> bool:
    with suppress(DaemonUnreachable, ApiError):
        return bool(pair.daemons[leader].status(rollout)["state"] == "done")
    return False


def open_gates(pair: Pair, leader: str, rollout: str) -> None:
    made = pair.daemons[leader]
    with suppress(DaemonUnreachable, ApiError):
        # A node whose run was superseded twice has failed: a person retries it.
        for name, node in made.nodes(rollout).items():
            if node["phase"] == "failed":
                made.client.post(f"/v1/rollouts/{rollout}/nodes/{name}/retry", {"reason": "a takeover"})
        for gate in made.status(rollout)["gates"]:
            if gate["state"] == "waiting":
                made.vote(rollout, gate["gate"])


def journal_lines(pair: Pair) -> int:
    return len(pair.journal.read_text().splitlines()) if pair.journal.exists() else 0


def read_audit(pair: Pair) -> list[str]:
    server = pair.primary
    with server.connect(pair.database) as admin:
        return [text for (text,) in admin.execute("SELECT entry FROM rolloutd.audit ORDER BY seq")]


def judge(pair: Pair, entries: list[dict[str, Any]], rollout: str) -> None:
    """Compare the nodes' journal with the audit."""
    begun: Counter[str] = Counter()
    newest: dict[str, str] = {}
    for line in pair.journal.read_text().splitlines():
        what, node, run = line.split()
        if what == "begin":
            begun[node] += 1
            newest[node] = run
        else:
            assert newest[node] == run, f"{node}: {run} acts after {newest[node]} has begun"
    unknown = Counter(
        entry["node"]
        for entry in entries
        if entry["event"] == "StepRecorded"
        and entry["fields"]["action"] == "run"
        and entry["fields"]["state"] == "unknown"
    )
    for node in pair.daemons["a"].labels:
        assert 1 <= begun[node] <= 1 + unknown[node], f"{node}: begun {begun[node]}, unknown {unknown[node]}"
    epochs = [entry["fields"]["epoch"] for entry in entries if entry["event"] == "DaemonStarted"]
    assert epochs == sorted(set(epochs)), "each epoch has one holder"
    votes = [entry for entry in entries if entry["event"] == "VoteCast"]
    assert votes
    backend = PostgresqlBackend(Address(pair.primary.dsn(pair.database, ROLE)), pair.root)
    assert backend.verify_chain().ok
