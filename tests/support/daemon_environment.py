"""A real daemon over real nodes: one sshd each, the daemon as a process of its own, asked over its socket.

For acceptance tests and benches.  The nodes' playbooks write a log of their own
(`log_file`), so what really ran is known without believing the daemon.  It
knows no pytest.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rolloutd.cli.main import main as rolloutctl
from rolloutd.control.client import ApiError, Client, DaemonUnreachable, api_path
from rolloutd.files.source_archive import pack_tree
from rolloutd.planfile.manifest import format_manifest
from tests.support.forked_process import ForkedProcess, start_daemon
from tests.support.sshd import Sshd

WAIT_LIMIT_S = 300.0
"""What is waited for comes within seconds; a machine that needs five minutes is broken."""

WARM = os.environ.get("ROLLOUTD_TEST_WARM", "auto")
"""`ansible.warm` of the daemons and runners of tests; `make plain-runs` sets it to `off`."""

POLL_S = 0.05
"""First pause between two requests to the daemon; each next one is longer."""

MAX_POLL_S = 0.2
"""Longest pause: tests wait most of their time, and an answer costs the daemon CPU time."""

# `raw`: a module costs ten times the CPU time, and what one does to a node is tested elsewhere.
CHANGE_PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: begin
      ansible.builtin.raw: echo "begin {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
    - name: work
      ansible.builtin.raw: |
        sleep {{ work_s | default(0) }}
        while test -e {{ log_file }}.hold; do sleep 0.1; done
    - name: end
      ansible.builtin.raw: echo "end {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
"""


@dataclass(frozen=True, slots=True)
class RunSpan:
    """When a playbook ran on a node, by its own log; `end` is None when it never ended."""

    node: str
    begin: float
    end: float | None


class DaemonEnvironment:
    """Nodes, a daemon and somebody who asks it."""

    def __init__(self, directory: Path, labels: Mapping[str, Mapping[str, str]]) -> None:
        self.directory = directory
        self.labels = labels
        self.sshds: dict[str, Sshd] = {}
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.forks_daemon = True
        self.daemon_prefix: Sequence[str] = ()
        self.nodes_per_sshd = 1
        """At most 16, each with an address of its own: sshd listens on no more."""
        self.settings: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.client = Client(directory / "s")

    # -- its life

    def start_nodes(self) -> None:
        """Start the servers of the nodes, and write the inventory."""

        names, size = list(self.labels), self.nodes_per_sshd
        groups = [names[at : at + size] for at in range(0, len(names), size)]

        def start(group: Sequence[str]) -> Sshd:
            return self.make_sshd(group[0]).start(self.directory / "nodes" / group[0])

        with ThreadPoolExecutor(4) as pool:
            started = list(pool.map(start, groups))
        self.sshds = {name: sshd for group, sshd in zip(groups, started, strict=True) for name in group}
        lines = "".join(sshd.known_hosts.read_text() for sshd in started)
        (self.directory / "known_hosts").write_text(lines)
        hosts = {  # the checkpoints of each node are its own, though all nodes are this machine
            name: {
                **sshd.connection(address),
                "rolloutd_fact_path": str(self.directory / "facts" / name),
                **self.labels[name],
            }
            for group, sshd in zip(groups, started, strict=True)
            for name, address in zip(group, sshd.addresses, strict=True)
        }
        (self.directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))

    def make_sshd(self, name: str) -> Sshd:
        """Return the server of a node, and of those after it that share it, that is about to start."""
        number = list(self.labels).index(name)
        shared = min(self.nodes_per_sshd, len(self.labels) - number)
        return Sshd([f"127.0.0.{host}" for host in range(1, shared + 1)])

    def write_settings(self, **more: Any) -> None:
        """Write the daemon's settings; the current user is a member of every team."""
        myself = pwd.getpwuid(os.geteuid()).pw_name
        teams = {"infra", *(labels["team"] for labels in self.labels.values())}
        inventory = {"path": str(self.directory / "hosts.yml"), "labels": ["team", "rack", "role", "canary"]}
        self.settings = {
            "state_dir": str(self.directory / "state"),
            "socket": str(self.directory / "s"),
            "inventory": [{"ansible": inventory}],
            "pools": {"team": {"max_unavailable": 1}},
            "teams": {team: {"members": [myself]} for team in sorted(teams)},
            "admins": [myself],
            "ssh": {"known_hosts": str(self.directory / "known_hosts")},
            **more,
        }
        # The nodes are this machine: what would be theirs stays in the world's directory.
        fence = {"fence_dir": str(self.directory / "fence"), "warm": WARM}
        self.settings["ansible"] = {**fence, **self.settings.get("ansible", {})}
        (self.directory / "config.yaml").write_text(yaml.safe_dump(self.settings))

    def start_daemon(self) -> None:
        """Start the daemon and wait until it answers and has asked its inventory."""
        words = ["--config", str(self.directory / "config.yaml")]
        environment = {**os.environ, **self.environment}
        log, prefix = self.directory / "daemon.log", self.daemon_prefix
        self.process = start_daemon(words, log, environment, fork=self.forks_daemon, prefix=prefix)
        self.wait_until(self._is_ready, "the daemon answers")

    def kill_daemon(self, number: int = signal.SIGKILL) -> None:
        """Send the daemon a signal and wait for its end."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(WAIT_LIMIT_S)
        self.process = None

    def stop(self) -> None:
        """End everything."""
        if self.process is not None:
            self.kill_daemon()
        self._kill_runs()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda sshd: sshd.stop(), set(self.sshds.values())))
        for sockets in self.shared_sockets():  # of nodes that were at work
            shutil.rmtree(sockets, ignore_errors=True)

    def pause_playbooks(self) -> None:
        """Keep every playbook in the middle of its work until `release`, however slow the machine is."""
        self._pause_file.touch()

    def resume_playbooks(self) -> None:
        """Let playbooks end their work."""
        self._pause_file.unlink()

    def daemon_cpu_s(self) -> float:
        """Return the CPU seconds of the daemon's own process."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill_fork_servers(self) -> int:
        """SIGKILL the processes that fork runs of this daemon; return their number."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        servers = [int(pid) for pid in set(children) & set(map(str, find_processes(_is_fork_server)))]
        for pid in servers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(servers)

    def shared_sockets(self) -> list[Path]:
        """Return the directories of control sockets that runs of a node share."""
        return [link.readlink() for link in self.directory.glob("state/runs/.connections/*")]

    def run_processes(self) -> list[int]:
        """Return the processes on this machine that belong to runs of this world's daemon."""
        runs = str(self.directory / "state" / "runs").encode()
        return find_processes(
            lambda command, environ: b"ROLLOUTD_RUN=" in environ and (runs in environ or runs in command)
        )

    # -- what people do

    def submit(self, plan: Mapping[str, Any], playbooks: Mapping[str, str], **more: Any) -> str:
        """Pack the playbooks, submit the plan, and return the rollout's id."""
        tree = self.directory / "tree"
        tree.mkdir(exist_ok=True)
        for name, text in playbooks.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
        upload = self.client.upload("/v1/uploads", pack_tree(tree))["upload"]
        body = {"file": "plan.yml", "text": yaml.safe_dump(dict(plan)), "upload": upload, **more}
        return str(self.client.post("/v1/plans/submit", body)["rollout"])

    def write_artifacts(self, files: Mapping[str, bytes], **fields: Any) -> str:
        """Write artifacts and their manifest into the plans' tree; return the manifest's path.

        `fields` are added to each artifact.
        """
        directory = self.directory / "tree" / "files"
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).write_bytes(content)
        assert rolloutctl(["artifacts", "manifest", str(directory)]) == 0
        manifest = directory / "artifacts.yml"
        records = yaml.safe_load(manifest.read_text())["artifacts"]
        manifest.write_text(format_manifest([{**each, **fields} for each in records]))
        return "files/artifacts.yml"

    def vote(self, rollout: str, gate: str, *, reason: str = "seen", unseen: bool = False) -> None:
        """Vote yes until the gate is open: one vote fills one need of each kind."""
        body: dict[str, Any] = {"gate": gate, "yes": True, "reason": reason, "unseen": unseen}
        if gate == "proceed":
            failures = self.client.get(api_path("rollouts", rollout, "failures"))["failures"]
            body["shown"] = [each["id"] for each in failures]
        self.client.post(api_path("rollouts", rollout, "votes"), body)

    def status(self, rollout: str) -> dict[str, Any]:
        """Return the rollout's status."""
        answer: dict[str, Any] = self.client.get(api_path("rollouts", rollout))
        return answer

    def nodes(self, rollout: str) -> dict[str, dict[str, Any]]:
        """Return the rollout's nodes by name."""
        return {n["node"]: n for n in self.client.get(api_path("rollouts", rollout, "nodes"))["nodes"]}

    def finish(self, rollout: str, limit_s: float = WAIT_LIMIT_S) -> dict[str, Any]:
        """Vote where votes are asked for until the rollout is done; return its status."""

        def ended() -> dict[str, Any] | None:
            status = self.status(rollout)
            assert status["state"] != "paused", status["reason"]
            for gate in status["gates"]:
                if gate["state"] == "waiting" and status["state"] != "done":
                    self.vote(rollout, gate["gate"])
            return status if status["state"] == "done" else None

        found: dict[str, Any] = self.wait_until(ended, f"{rollout} is done", limit_s)
        return found

    def carried_artifacts(self, rollout: str) -> list[tuple[str, str, list[str]]]:
        """Return the digests that the nodes carry: expected, found, and the nodes."""
        answer = self.client.get(api_path("rollouts", rollout, "artifacts"))
        return [(each["expected"], each["found"], sorted(each["nodes"])) for each in answer["artifacts"]]

    def wait_for_gate(self, rollout: str, gate: str) -> None:
        """Wait until the gate asks for votes."""

        def is_waiting() -> bool:
            gates = self.status(rollout)["gates"]
            return any(g["gate"] == gate and g["state"] == "waiting" for g in gates)

        self.wait_until(is_waiting, f"gate {gate} of {rollout} waits")

    def wait_until(self, condition: Callable[[], Any], what: str, limit_s: float = WAIT_LIMIT_S) -> Any:
        """Wait until something is so; a daemon that is not there is asked again."""
        deadline, pause_s = time.monotonic() + limit_s, POLL_S
        while True:
            try:
                found = condition()
            except (DaemonUnreachable, ApiError):
                found = None
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain until {what}\n{self.log_tail()}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, MAX_POLL_S)

    # -- what really happened

    @property
    def log_file(self) -> Path:
        """What the playbooks wrote."""
        return self.directory / "playbooks.log"

    def spans(self) -> list[RunSpan]:
        """Return what ran, from the playbooks' own log, in order of their begin."""
        if not self.log_file.exists():
            return []
        began: list[tuple[str, float]] = []
        ended: dict[str, list[float]] = {}
        for line in self.log_file.read_text().splitlines():
            what, node, at = line.split()
            if what == "begin":
                began.append((node, float(at)))
            else:
                ended.setdefault(node, []).append(float(at))
        spans = []
        for node, at in began:
            later = [end for end in ended.get(node, []) if end >= at]
            spans.append(RunSpan(node, at, min(later) if later else None))
        return spans

    def log_tail(self) -> str:
        """Return the end of the daemon's log."""
        log = self.directory / "daemon.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-30:]) if log.exists() else ""

    @property
    def _pause_file(self) -> Path:
        return Path(f"{self.log_file}.hold")

    def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the daemon ended with {self.process.returncode}\n{self.log_tail()}")
        sources = self.client.get("/v1/inventory")["sources"]
        return bool(sources) and all(source["refreshed_at"] for source in sources)

    def _kill_runs(self) -> None:
        for pid in self.run_processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def find_processes(is_wanted: Callable[[bytes, bytes], bool]) -> list[int]:
    """Return the processes of this machine whose command line and environment are wanted."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):
            if is_wanted((entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()):
                found.append(int(entry.name))
    return found


def _is_fork_server(command: bytes, environ: bytes) -> bool:
    return command.startswith(b"rolloutd fork server of\0") or b"/fork_server.py\0" in command


@contextmanager
def daemon_environment(
    directory: Path, labels: Mapping[str, Mapping[str, str]], *, nodes_per_sshd: int = 1, **settings: Any
) -> Iterator[DaemonEnvironment]:
    """Start the nodes and a daemon over them; end everything."""
    made = DaemonEnvironment(directory, labels)
    made.nodes_per_sshd = nodes_per_sshd
    try:
        made.start_nodes()
        made.write_settings(**settings)
        made.start_daemon()
        yield made
    finally:
        made.stop()


def plan(name: str, **spec: Any) -> dict[str, Any]:
    """Return a plan over all workers whose playbook writes the world's log."""
    return {
        "apiVersion": "rolloutd/v1",
        "kind": "MaintenancePlan",
        "metadata": {"name": name, "owner": "infra"},
        "spec": {
            "source": {"path": "./playbooks"},
            "targets": "role=worker",
            "maintain": {"playbook": "change.yml"},
            "verify": [{"reachable": {"within": "60s"}}],
            **spec,
        },
    }


def fleet_labels(nodes: int, teams: int, racks: int) -> dict[str, dict[str, str]]:
    """Return labels of nodes n1.. over teams t1.. and racks r1.., the first of each team a canary."""
    labels = {}
    for number in range(1, nodes + 1):
        team = (number - 1) % teams + 1
        labels[f"n{number}"] = {
            "team": f"t{team}",
            "rack": f"r{(number - 1) // teams % racks + 1}",
            "role": "worker",
            "canary": "true" if number <= teams else "false",
        }
    return labels
