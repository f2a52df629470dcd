"""Two daemons of one PostgreSQL with a synchronous standby server, over real sshd nodes, under faults.

The nodes' journal, which the playbooks write, says who acted: never two controllers on a node at once, and no
run lost or repeated but those that the daemons recorded as unknown.  ROLLOUTD_TEST_TAKEOVERS says how many
faults there are, ROLLOUTD_TEST_NODES how many nodes, ROLLOUTD_TEST_LEASE_S how long a lease is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import ApiError, Client, DaemonUnreachable
from rolloutd.store.postgresql.backend import PostgresqlBackend
from rolloutd.store.postgresql.connection import Address
from tests.support.daemon_environment import DaemonEnvironment, fleet_labels, plan
from tests.support.daemon_pair import NAMES, DaemonPair, daemon_pair
from tests.support.postgresql import ROLE

pytestmark = [
    pytest.mark.servers("postgresql"),
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for a namespace"
    ),
]

FAULTS = int(os.environ.get("ROLLOUTD_TEST_TAKEOVERS", "3"))
NODES = int(os.environ.get("ROLLOUTD_TEST_NODES", "6"))
LEASE_S = float(os.environ.get("ROLLOUTD_TEST_LEASE_S", "5"))
TAKEOVER_LEASES = 1.5
PAUSE_S = 0.2

WAIT_AT_INTENT = """
SELECT pg_advisory_lock(1);
CREATE FUNCTION wait_at_intent() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END';
CREATE TRIGGER wait_at_intent AFTER INSERT ON audit FOR EACH ROW
    WHEN (NEW.entry ~ '"action":"run".*"state":"intended"') EXECUTE FUNCTION wait_at_intent();
"""

# The middle task is one command, so that its end shows whether a superseded run still acts.
PLAYBOOK = """\
- hosts: all
  gather_facts: false
  vars:
    say: "{{ inventory_hostname }} {{ lookup('env', 'ROLLOUTD_RUN') }} >> {{ journal }}"
  tasks:
    - ansible.builtin.raw: echo begin {{ say }}
    - ansible.builtin.raw: sleep 1; echo work {{ say }}
    - ansible.builtin.raw: echo end {{ say }}
"""


SPARE = "spare"
"""A node that no plan has; people take holds on it all the time."""


class People:
    """Who submits plans, votes, and takes holds, all through the leader, until told to finish."""

    def __init__(self, pair: DaemonPair, journal: Path) -> None:
        self._pair, self._journal = pair, journal
        self.rollouts: list[str] = []
        self.acknowledged: set[str] = set()
        """Reasons of the commands that a leader has answered."""
        self._finishing, self._stopping = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._hold, self._work)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Submit no more, and return when the last rollout is done."""
        self._finishing.set()
        self._pair.wait_for(lambda: not self._threads[1].is_alive(), "the last rollout is done")

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _hold(self) -> None:
        number = 0
        while not self._stopping.wait(PAUSE_S):
            for name in NAMES:
                client = Client(self._pair.daemons[name].client.path, timeout_s=10.0)
                hold, number = {"node": SPARE, "source": "test", "id": "h"}, number + 1
                with suppress(DaemonUnreachable, ApiError):
                    client.delete("/v1/holds", hold)
                with suppress(DaemonUnreachable, ApiError):
                    client.put("/v1/holds", {**hold, "reason": f"hold {number}"})
                    self.acknowledged.add(f"hold {number}")

    def _work(self) -> None:
        while not self._stopping.wait(PAUSE_S):
            if leader := self._pair.leader():
                with suppress(DaemonUnreachable, ApiError):
                    if self._advance(self._pair.daemons[leader]) and self._finishing.is_set():
                        return

    def _advance(self, daemon: DaemonEnvironment) -> bool:
        """Submit a plan or vote; return whether the last rollout is done."""
        status = daemon.status(self.rollouts[-1]) if self.rollouts else {"state": "done"}
        if status["state"] == "done":
            if not self._finishing.is_set():
                self._submit(daemon)
            return True
        rollout = self.rollouts[-1]
        # A node whose run was superseded twice has failed: a person retries it.
        for name, node in daemon.nodes(rollout).items():
            if node["phase"] == "failed":
                daemon.client.post(f"/v1/rollouts/{rollout}/nodes/{name}/retry", {"reason": "a takeover"})
        for gate in status["gates"]:
            if gate["state"] == "waiting":
                reason = f"vote {len(self.acknowledged)}"
                daemon.vote(rollout, gate["gate"], reason=reason)
                self.acknowledged.add(reason)
        return False

    def _submit(self, daemon: DaemonEnvironment) -> None:
        number = len(self.rollouts)
        # Another change each time, else the nodes have it already.
        variables = {"journal": str(self._journal), "number": number}
        maintain = {"playbook": "change.yml", "vars": variables, "on_unknown": "rerun"}
        content = plan(f"pair{number}", maintain=maintain, probation="0s")
        self.rollouts.append(daemon.submit(content, {"change.yml": PLAYBOOK}))


# -- faults: each returns what ends it ---------------------------------------------

Ending = Callable[[], object]


def killed(pair: DaemonPair, leader: str) -> Ending:
    pair.daemons[leader].kill_daemon()
    return lambda: pair.start_daemon(leader)


def stopped_in_a_transaction(pair: DaemonPair, leader: str) -> Ending:
    """It holds the row of the term."""
    with closing(pair.connect()) as admin:
        admin.execute("BEGIN; SELECT 1 FROM term FOR UPDATE")
        pair.wait_for(lambda: _waits(pair, "wait_event_type = 'Lock'"), "a commit waits for the row")
        return _stopped(pair, leader, lambda: admin.execute("COMMIT"))


def stopped_between_intent_and_action(pair: DaemonPair, leader: str) -> Ending:
    """The answer to the commit of a run's intent reaches it when another daemon leads."""
    with closing(pair.spare.connect()) as spare:
        (receiver,) = spare.execute("SELECT pid FROM pg_stat_wal_receiver").fetchone() or (0,)
    with closing(pair.connect()) as admin:
        admin.execute(WAIT_AT_INTENT)
        pair.wait_for(lambda: _waits(pair, "wait_event = 'advisory'"), "a run is intended")
        os.kill(receiver, signal.SIGSTOP)
        try:
            admin.execute("SELECT pg_advisory_unlock_all()")
            pair.wait_for(lambda: _waits(pair, "wait_event = 'SyncRep'"), "the intent's commit waits")
            end = _stopped(pair, leader, lambda: os.kill(receiver, signal.SIGCONT))
        finally:
            os.kill(receiver, signal.SIGCONT)
        pair.wait_for(lambda: not _waits(pair, "wait_event = 'SyncRep'"), "the commit is done")
        admin.execute("DROP FUNCTION wait_at_intent CASCADE")
    return end


def _stopped(pair: DaemonPair, leader: str, let_pass: Callable[[], object]) -> Ending:
    process = pair.daemons[leader].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    let_pass()

    def resume() -> None:
        process.send_signal(signal.SIGCONT)
        pair.wait_for(lambda: process.poll() is not None, f"{leader} ends after its takeover")

    return resume


def _waits(pair: DaemonPair, condition: str) -> bool:
    with closing(pair.connect()) as admin:
        sql = f"SELECT 1 FROM pg_stat_activity WHERE usename = '{ROLE}' AND {condition}"
        return admin.execute(sql).fetchone() is not None


def cut_off_from_database(pair: DaemonPair, leader: str) -> Ending:
    pair.unplug(leader, "databases")
    return lambda: pair.plug(leader, "databases")


def refused_by_database(pair: DaemonPair, leader: str) -> Ending:
    pair.reset(leader)
    return lambda: pair.accept(leader)


def cut_off_from_nodes(pair: DaemonPair, leader: str) -> Ending:
    """It leads on until a person lets it step down; its runs go on when they reach the nodes again."""
    pair.unplug(leader, "nodes")
    pair.daemons[leader].client.post("/v1/leader/step-down", {"reason": "cut off"})
    return lambda: pair.plug(leader, "nodes")


def database_restarted(pair: DaemonPair, leader: str) -> Ending:
    pair.restart_primary()
    return lambda: None


def primary_replaced(pair: DaemonPair, leader: str) -> Ending:
    pair.replace_primary()
    return lambda: None


FAULT_KINDS = (
    killed,
    primary_replaced,
    stopped_between_intent_and_action,
    cut_off_from_database,
    stopped_in_a_transaction,
    cut_off_from_nodes,
    refused_by_database,
    database_restarted,
)
WITHOUT_TAKEOVER = (database_restarted, primary_replaced)


def test_pair_loses_and_repeats_nothing_under_faults(tmp_path: Path) -> None:
    with daemon_pair(tmp_path, LEASE_S, NODES + 1) as pair:
        labels = {**fleet_labels(NODES, max(2, NODES // 4), 1), SPARE: {"team": "people", "role": "spare"}}
        pair.start(labels, observe_within="20s")
        leader = pair.wait_for(pair.leader, "one leads")
        client = pair.daemons[leader].client
        pair.wait_for(lambda: client.get("/v1/inventory")["sources"][0]["refreshed_at"], "the inventory")
        people = People(pair, journal_of(pair))
        people.start()
        try:
            beats = [
                beat
                for number, fault in enumerate(islice(cycle(FAULT_KINDS), FAULTS), 1)
                if (beat := suffer(pair, number, fault)) is not None
            ]
            people.finish()
        finally:
            people.stop()
        judge(pair, people)
        times = [first_step_after(pair, epoch) - beat for beat, epoch in beats]
        print("from the last beat to the first step:", sorted(round(each, 1) for each in times))
        assert statistics.median(times) < TAKEOVER_LEASES * LEASE_S, times
        leader = pair.wait_for(lambda: leader_of_pair(pair), "one leads, and the other waits")
        status = pair.status(leader)
        assert status["synchronous"] is True
        assert [each["name"] for each in status["standbys"]] == [other_than(leader)]


def other_than(name: str) -> str:
    return next(other for other in NAMES if other != name)


def leader_of_pair(pair: DaemonPair) -> str:
    """Return the leader if the other daemon waits; start what has ended."""
    pair.revive()
    leader = pair.leader()
    return leader if leader and pair.role(other_than(leader)) == "standby" else ""


def suffer(
    pair: DaemonPair, number: int, fault: Callable[[DaemonPair, str], Ending]
) -> tuple[float, int] | None:
    """Let a fault happen while nodes are at work; return the last beat and the next epoch of a takeover."""

    is_pair = partial(leader_of_pair, pair)
    pair.wait_for(is_pair, "one leads, and the other waits")
    begun = journal_lines(pair)
    pair.wait_for(lambda: journal_lines(pair) > begun, "a node is at work")
    leader = pair.wait_for(is_pair, "one leads, and the other waits")
    other, began = other_than(leader), time.monotonic()
    end = fault(pair, leader)
    if fault in WITHOUT_TAKEOVER:
        pair.wait_for(is_pair, "one leads, and the other waits")
        begun = journal_lines(pair)
        pair.wait_for(lambda: journal_lines(pair) > begun, "a node is at work again")
        print(f"fault {number}, {fault.__name__}: work goes on after {time.monotonic() - began:.1f} s")
        return None
    with closing(pair.connect()) as admin:
        row = admin.execute("SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin)) FROM lease").fetchone()
    assert row is not None
    pair.wait_for(lambda: pair.role(other) == "leader", f"{other} leads after {fault.__name__}")
    print(f"fault {number}, {fault.__name__}: {other} leads after {time.monotonic() - began:.1f} s")
    epoch = int(pair.wait_for(lambda: pair.status(other).get("leader"), "its epoch")["epoch"])
    end()
    return None if fault is cut_off_from_nodes else (float(row[0]), epoch)


# -- what was seen from outside ------------------------------------------------------


def journal_of(pair: DaemonPair) -> Path:
    return pair.root / "journal"


def journal_lines(pair: DaemonPair) -> int:
    return journal_of(pair).read_text().count("\n") if journal_of(pair).exists() else 0


def read_entries(pair: DaemonPair) -> list[dict[str, Any]]:
    with closing(pair.connect()) as admin:
        return [json.loads(text) for (text,) in admin.execute("SELECT entry FROM audit ORDER BY seq")]


def first_step_after(pair: DaemonPair, epoch: int) -> float:
    """Return when the leader of an epoch recorded its first step."""
    entries = iter(read_entries(pair))
    next(
        entry for entry in entries if entry["event"] == "DaemonStarted" and entry["fields"]["epoch"] == epoch
    )
    return float(next(entry["at"] for entry in entries if entry["event"] == "StepRecorded"))


def judge(pair: DaemonPair, people: People) -> None:
    """Compare the nodes' journal with the audit."""
    entries = read_entries(pair)
    begun: Counter[tuple[str, str]] = Counter()
    newest: dict[str, str] = {}
    for line in journal_of(pair).read_text().splitlines():
        what, node, run = line.split()
        if what == "begin":
            begun[run.partition(".")[0], node] += 1
            newest[node] = run
        else:
            assert newest[node] == run, f"{node}: {run} acts after {newest[node]} has begun"
    unknown = Counter(
        (entry["rollout"], entry["node"])
        for entry in entries
        if entry["event"] == "StepRecorded"
        and (entry["fields"]["action"], entry["fields"]["state"]) == ("run", "unknown")
    )
    for rollout in people.rollouts:
        for node in pair.daemons["a"].labels.keys() - {SPARE}:
            key = rollout, node
            assert 1 <= begun[key] <= 1 + unknown[key], f"{key}: begun {begun[key]}, unknown {unknown[key]}"
    epochs = [entry["fields"]["epoch"] for entry in entries if entry["event"] == "DaemonStarted"]
    assert epochs == sorted(set(epochs)), "each epoch has one holder"
    causes = " ".join(entry["cause"] for entry in entries) + " "
    assert people.acknowledged
    lost = [reason for reason in people.acknowledged if f": {reason} " not in causes]
    assert not lost, "what was acknowledged is there"
    backend = PostgresqlBackend(Address(pair.primary.dsn(pair.database, ROLE)), pair.root)
    assert backend.verify_chain().ok
    print(f"{len(people.rollouts)} rollouts, {sum(begun.values())} runs, {sum(unknown.values())} unknown,")
    print(f"{len(epochs)} epochs, {len(people.acknowledged)} acknowledged commands, {len(entries)} entries")
