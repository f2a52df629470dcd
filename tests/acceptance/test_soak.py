"""Days of a daemon's life over real sshd nodes, at many times the speed, judged from outside.

Its plan keeps nodes as they should be, and they drift.  On each of three days the daemon is killed, its clock
is set, its disk is filled, and its inventory cannot be read.  The playbooks' own log, /proc and the directory
say what really happened.

ROLLOUTD_TEST_SOAK_S is how long it lasts in the machine's time: a minute, or two hours by `make soak`,
which at 36 times the speed are 72 hours of the daemon's.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rolloutd.audit.audit_segments import SEGMENTS_DIRECTORY
from rolloutd.control.client import ApiError, DaemonUnreachable
from rolloutd.store import SqliteBackend, compare_with_audit
from tests.acceptance.test_full_disk_and_clock_jumps import fill, small_disk
from tests.support.daemon_environment import DaemonEnvironment, fleet_labels, plan
from tests.support.fast_clock import LIBRARY, FastClock

pytestmark = [
    pytest.mark.servers,
    pytest.mark.long,
    pytest.mark.skipif(LIBRARY is None, reason="needs libfaketime (Debian: faketime)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk"),
]

LASTS_S = float(os.environ.get("ROLLOUTD_TEST_SOAK_S", "60"))
SPEED = int(os.environ.get("ROLLOUTD_TEST_SOAK_SPEED", "36"))
REPORT = os.environ.get("ROLLOUTD_TEST_SOAK_REPORT")
"""A file that gets each sample, one a line."""

DAYS, TEAMS = 3, 2
NODES = 4 if LASTS_S >= 600 else 2  # a run of Ansible takes two seconds of CPU time
DAY_S = LASTS_S / DAYS
"""A day in the machine's time; at the end of the last one, people and nodes are left alone."""

LOOK_S = 5.0
SETTLE_S = 90.0
"""What the daemon may need for the last drift, in the machine's time."""

UNTRUE_LOOKS = 4
"""Looks in a row at which a reason must be untrue: one look is at several moments."""

MEMORY_GROWTH, DESCRIPTOR_GROWTH, FILE_GROWTH = 1.15, 12, 1.5
"""From the second day to the end of the third: of resident memory, of open descriptors, of files."""

STALE_AFTER_S = 3600.0
"""How old an answer of the inventory may be, by default."""

AT_WORK = ("isolating", "maintaining", "verifying")

KEEP_AUDIT_H = 6

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  vars: {run: "{{ lookup('env', 'ROLLOUTD_RUN') }}"}
  tasks:
    - name: begin
      ansible.builtin.raw: echo "begin {{ inventory_hostname }} {{ run }} $(date +%s.%N)" >> {{ log_file }}
      when: not ansible_check_mode
    - name: set the limit
      ansible.builtin.copy: {content: "limit 9\\n", dest: "{{ conf_dir }}/{{ inventory_hostname }}.conf"}
    - name: end
      ansible.builtin.raw: echo "end {{ inventory_hostname }} {{ run }} $(date +%s.%N)" >> {{ log_file }}
      when: not ansible_check_mode
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the daemon takes at an instant, in seconds since the begin."""

    at: float
    memory_kib: int
    descriptors: int
    files: int
    state_kib: int


@dataclass(slots=True)
class Soak:
    """The daemon, what is done to it, and what was seen of it."""

    made: DaemonEnvironment
    clock: FastClock
    conf_dir: Path
    began: float
    samples: list[Sample] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    untrue: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    is_disk_full: bool = False
    is_source_gone: bool = False
    _doubted: dict[str, int] = field(default_factory=dict)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def note(self, what: str) -> None:
        self.done.append(f"{self.elapsed():.0f} s: {what}")
        print(self.done[-1], flush=True)

    # -- what is done to it

    def events(self) -> Iterator[tuple[float, str]]:
        """Yield when something happens, in order: a share of the day, and the method."""
        shares = (
            (0.05, "drift"),
            (0.2, "kill"),
            (0.35, "drift"),
            (0.45, "set_clock"),
            (0.55, "fill_disk"),
            (0.65, "free_disk"),
            (0.7, "drift"),
            (0.75, "stop_source"),
            (0.85, "start_source"),
        )
        # Long days have more drift: about every second hour.
        more = max(0, int(DAY_S * SPEED / 7200) - 3)
        drifts = [(0.9 * (number + 0.5) / more, "drift") for number in range(more)]
        for day in range(DAYS):
            yield from (((day + share) * DAY_S, name) for share, name in sorted((*shares, *drifts)))

    def drift(self) -> None:
        number = len(self.done) % NODES + 1
        (self.conf_dir / f"n{number}.conf").write_text("limit 1\n")
        self.note(f"n{number} drifts")

    def kill(self) -> None:
        self.made.kill_daemon()
        self.made.start_daemon()
        self.note("the daemon was killed")

    def set_clock(self) -> None:
        self.clock.set_forward(600)
        self.note("the clock was set ten minutes forward")

    def fill_disk(self) -> None:
        fill(self.made.directory / "state" / "filler")
        self.is_disk_full = True
        self.note("the disk is full")

    def free_disk(self) -> None:
        (self.made.directory / "state" / "filler").unlink()
        self.is_disk_full = False
        self.note("the disk has room again")

    def stop_source(self) -> None:
        hosts = self.made.directory / "hosts.yml"
        hosts.rename(hosts.with_suffix(".gone"))
        self.is_source_gone = True
        self.note("the inventory is gone")

    def start_source(self) -> None:
        hosts = self.made.directory / "hosts.yml"
        hosts.with_suffix(".gone").rename(hosts)
        self.is_source_gone = False
        self.note("the inventory is back")

    # -- what is seen of it

    def look(self, rollout: str) -> None:
        """Take a sample, and judge each reason that the daemon gives."""
        self._sample()
        with suppress(ApiError, DaemonUnreachable, TimeoutError):
            nodes = self.made.nodes(rollout)
            for name, node in nodes.items():
                self._judge(name, node, nodes)

    def _sample(self) -> None:
        process, state = self.made.process, self.made.directory / "state"
        assert process is not None
        proc = Path(f"/proc/{process.pid}")
        assert process.poll() is None, f"the daemon ended with {process.returncode}\n{self.made.log_tail()}"
        status = (proc / "status").read_text()
        memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        files = [path for path in state.rglob("*") if path.name != "filler"]
        size = 0
        for path in files:
            with suppress(FileNotFoundError):
                size += path.lstat().st_size
        descriptors = len(list((proc / "fd").iterdir()))
        self.samples.append(Sample(round(self.elapsed(), 1), memory, descriptors, len(files), size // 1024))
        if REPORT is not None:
            with Path(REPORT).open("a") as report:
                report.write(json.dumps(asdict(self.samples[-1])) + "\n")

    def _judge(self, name: str, node: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> None:
        reason = node["reason"]
        if reason is None:
            return
        self.reasons[reason["code"]] += 1
        doubt = f"{name} {reason['code']}: {reason['text']}"
        if self._is_true(reason["code"], node, nodes):
            self._doubted.pop(name, None)
            return
        self._doubted[name] = self._doubted.get(name, 0) + 1
        if self._doubted[name] == UNTRUE_LOOKS:
            self.untrue.append(f"{self.elapsed():.0f} s: {doubt}")

    def _is_true(self, code: str, node: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> bool:
        mates = [
            each for each in nodes.values() if each is not node and set(each["pools"]) & set(node["pools"])
        ]
        match code:
            case "pool-full":
                return any(each["phase"] in AT_WORK for each in mates)
            case "max-parallel":
                return any(each["phase"] in AT_WORK for each in nodes.values())
            case "earlier-wave":
                return any(each["wave"] == "canary" and each["phase"] != "done" for each in nodes.values())
            case "disk-full":
                return self.is_disk_full
            case "inventory-stale":
                # A loaded machine answers later than the daemon waits, at this speed: then it is so, too.
                answered = datetime.fromisoformat(node["reason"]["text"].split()[-4].rstrip(";"))
                return self.is_source_gone or self.clock.now() - answered.timestamp() >= STALE_AFTER_S
            case "isolating" | "maintaining" | "verifying":
                return bool(node["phase"] == code)
            case "done" | "changed" | "already-current" | "drifted":
                return bool(node["phase"] == "done")
            case _:
                # True for moments, such as `checking`, or of what does not happen here: untrue if it stays.
                return False


@contextmanager
def soaking(directory: Path) -> Iterator[Soak]:
    made, clock = DaemonEnvironment(directory, fleet_labels(NODES, TEAMS, 1)), FastClock(directory, SPEED)
    conf_dir = directory / "conf"
    conf_dir.mkdir()
    (directory / "state").mkdir()
    made.environment = clock.environment
    with small_disk(directory / "state"):
        try:
            made.start_nodes()
            keep = {
                "runs": "6h",
                "trees": "6h",
                "on_nodes": "6h",
                "records": "31d",
                "audit": f"{KEEP_AUDIT_H}h",
            }
            made.write_settings(keep=keep)
            made.start_daemon()
            yield Soak(made, clock, conf_dir, time.monotonic())
        finally:
            made.stop()
            clock.stop()


def test_daemon_lives_for_days(tmp_path: Path) -> None:
    with soaking(tmp_path) as soak:
        made = soak.made
        rollout = submit(made, soak.conf_dir)
        wait_until_kept(soak, rollout)
        soak.began = time.monotonic()
        for at, event in soak.events():
            soak.look(rollout)  # also if the machine is late
            while (left := at - soak.elapsed()) > 0:
                time.sleep(min(LOOK_S, left))
                soak.look(rollout)
            getattr(soak, event)()
        while soak.elapsed() < LASTS_S:
            soak.look(rollout)
            time.sleep(LOOK_S)
        wait_until_kept(soak, rollout, SETTLE_S)
        made.kill_daemon()
        print(f"reasons: {dict(soak.reasons)}; {len(soak.samples)} samples, the last {soak.samples[-1]}")
        judge_runs(made)
        assert not soak.untrue
        judge_growth(soak.samples)
        judge_audit(tmp_path / "state")


def submit(made: DaemonEnvironment, conf_dir: Path) -> str:
    """Submit the plan that keeps, and say yes wherever it asks."""
    variables = {"log_file": str(made.log_file), "conf_dir": str(conf_dir)}
    maintain = {"playbook": "change.yml", "vars": variables}
    spec = plan("kept", keep=True, every="30m", soak="1s", maintain=maintain)
    rollout = made.submit(spec, {"change.yml": PLAYBOOK})
    made.vote(rollout, "start")
    made.wait_for_gate(rollout, "continue")
    made.vote(rollout, "continue")
    made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout is done")
    return rollout


def wait_until_kept(soak: Soak, rollout: str, limit_s: float = 300.0) -> None:
    """Wait until each node is as the plan says, in the files and in the daemon's words."""

    def is_kept() -> bool:
        files = [(soak.conf_dir / f"n{number}.conf").read_text() for number in range(1, NODES + 1)]
        phases = {node["phase"] for node in soak.made.nodes(rollout).values()}
        return set(files) == {"limit 9\n"} and phases == {"done"}

    soak.made.wait_until(is_kept, "each node is as it should be", limit_s)


def judge_runs(made: DaemonEnvironment) -> None:
    """No run began twice, ran beside another on its node, or was lost."""
    lines = [line.split() for line in made.log_file.read_text().splitlines()]
    began = Counter((node, run) for what, node, run, _ in lines if what == "begin")
    ended = Counter((node, run) for what, node, run, _ in lines if what == "end")
    print(f"{len(began)} runs")
    assert set(began.values()) == {1}, "no run began twice"
    assert began == ended, "each run that began has ended"
    for name in made.labels:
        kinds = [what for what, node, *_ in lines if node == name]
        assert all(pair == ("begin", "end") for pair in zip(kinds[::2], kinds[1::2], strict=True)), kinds


def judge_growth(samples: list[Sample]) -> None:
    """What the daemon takes after two days is what it took after one."""
    day = len(samples) // DAYS
    second, last = samples[day : 2 * day], samples[-day // 2 :]
    assert max(e.memory_kib for e in last) <= MEMORY_GROWTH * max(e.memory_kib for e in second)
    assert min(e.descriptors for e in last) <= min(e.descriptors for e in second) + DESCRIPTOR_GROWTH
    if DAY_S * SPEED > 7 * 3600:  # `keep.runs` is less than a day
        assert min(e.files for e in last) <= FILE_GROWTH * min(e.files for e in second)


def judge_audit(state_dir: Path) -> None:
    backend = SqliteBackend(state_dir / "rolloutd.sqlite")
    report = compare_with_audit(backend, segments=state_dir / SEGMENTS_DIRECTORY)
    assert report.ok, report
    base = backend.read_base()
    print(f"audit: {report.chain.entries} entries, {base.seq} of them in segments")
    # The oldest entry gets twice as old before a segment is written, and a pass comes each hour.
    assert (base.seq > 0) == (LASTS_S * SPEED > (2 * KEEP_AUDIT_H + 1) * 3600)
