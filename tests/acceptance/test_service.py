"""The daemon as a service: its units judged by systemd's tools, and run by a real systemd on real nodes."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd import __version__
from rolloutd.control.client import Client, DaemonUnreachable
from tests.support.daemon_environment import CHANGE_PLAYBOOK, DaemonEnvironment, plan
from tests.support.systemd import SYSTEMD, Systemd

CHECKOUT = Path(__file__).resolve().parents[2]
DEPLOY = CHECKOUT / "deploy"
UNITS = ("rolloutd.service", "rolloutd.socket")

MOST_EXPOSED = 2.0
"""What `systemd-analyze security` may call the unit's exposure: 0 is sealed, 10 is bare."""


def left_out(why: str) -> None:
    """Leave the test out, loudly; where CI is set nothing may be left out."""
    if os.environ.get("CI"):
        pytest.fail(f"this must run in CI: {why}")
    pytest.skip(f"LEFT OUT, the service was NOT tested: {why}")


# -- the units as files -------------------------------------------------------


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units as they are shipped, but for where the program is."""
    if shutil.which("systemd-analyze") is None:
        left_out("there is no systemd-analyze (Debian: apt-get install systemd)")
    for unit in UNITS:
        text = (DEPLOY / "systemd" / unit).read_text()
        (tmp_path / unit).write_text(text.replace("/opt/rolloutd/bin/rolloutd", sys.executable))
    return tmp_path


def test_systemd_finds_nothing_wrong_with_the_units(units: Path) -> None:
    """`systemd-analyze verify` is silent and content."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(units / unit) for unit in UNITS)],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_LOG_TARGET": "console"},
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "rolloutd" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_service_is_hardly_exposed(units: Path) -> None:
    """`systemd-analyze security` calls it at most 2.0, without PrivateUsers."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(units / UNITS[0])],
        capture_output=True,
        text=True,
    )
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= MOST_EXPOSED, done.stdout
    assert "PrivateUsers=" not in re.sub("#.*", "", (DEPLOY / "systemd" / UNITS[0]).read_text())


# -- the real thing -----------------------------------------------------------


class SystemdEnvironment(DaemonEnvironment):
    """Nodes of this machine, and a daemon that a systemd of its own runs as shipped."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        super().__init__(directory, {name: {"team": "t1", "role": "worker"} for name in names})
        (directory / "systemd").mkdir()
        self.systemd = Systemd(directory / "systemd")

    @property
    def etc(self) -> Path:
        """The daemon's /etc/rolloutd."""
        return self.systemd.root / "etc/rolloutd"

    @property
    def socket(self) -> Path:
        """The daemon's socket."""
        return self.systemd.root / "run/rolloutd/control.sock"

    def boot(self) -> None:
        """Install the units and boot; only the socket is started."""
        units = self.systemd.units
        for unit in UNITS:
            shutil.copy(DEPLOY / "systemd" / unit, units / unit)
        (units / "rolloutd.service.d").mkdir()
        (units / "rolloutd.service.d" / "here.conf").write_text(drop_in())
        self.systemd.start()
        self.systemd.inside("systemd-sysusers", str(DEPLOY / "sysusers.d" / "rolloutd.conf"))
        self.systemd.inside("systemd-tmpfiles", "--create", str(DEPLOY / "tmpfiles.d" / "rolloutd.conf"))
        self.install()
        self.systemd.ctl("start", "rolloutd.socket")
        self.client = Client(self.socket)

    def install(self) -> None:
        """Write settings, inventory and keys as an administrator would."""
        gid = int(self.systemd.inside("id", "-g", "rolloutd"))
        shutil.copy(self.directory / "known_hosts", self.etc / "known_hosts")
        hosts = {}
        for name, sshd in self.sshds.items():
            key = self.etc / f"{name}.key"
            shutil.copy(sshd.key_file, key)
            os.chown(key, 0, gid)
            key.chmod(0o640)
            connection = {
                **sshd.connection(),
                "ansible_ssh_private_key_file": f"/etc/rolloutd/{name}.key",
            }
            hosts[name] = {**connection, **self.labels[name]}
        (self.etc / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
        (self.etc / "credentials" / "example").write_text("a token\n")
        self.configure()

    def configure(self, **more: Any) -> None:
        """Write /etc/rolloutd/config.yaml."""
        settings = {
            "inventory": [{"ansible": {"path": "hosts.yml", "labels": ["team", "role"]}}],
            "teams": {"infra": {"members": ["root"]}, "t1": {"members": ["root"]}},
            "ssh": {"known_hosts": "known_hosts"},
            "ansible": {"fence_dir": str(self.directory / "fence")},
            **more,
        }
        (self.etc / "config.yaml").write_text(yaml.safe_dump(settings))

    def main_pid(self) -> str:
        """Return the daemon's pid inside; "0" while there is none."""
        return self.systemd.show("rolloutd.service", "MainPID")

    def status_text(self) -> str:
        """Return what `systemctl status` shows."""
        return self.systemd.show("rolloutd.service", "StatusText")

    def has_nodes(self) -> bool:
        """Say whether the daemon answers and knows its nodes."""
        return len(self.client.get("/v1/inventory")["nodes"]) == len(self.labels)

    def journal(self, *matches: str) -> str:
        """Return the messages of the journal that match."""
        return self.systemd.inside("journalctl", "--no-pager", "-o", "cat", *matches, check=False)

    def doctor(self) -> str:
        """Return what the doctor says to root, who sees the files that the daemon sees."""
        here = ("nsenter", "-t", self.main_pid(), "-m", "--", "env", "HOME=/root", f"PYTHONPATH={CHECKOUT}")
        return self.systemd.inside(*here, sys.executable, "-m", "rolloutd.cli", "doctor", check=False)

    def log_tail(self) -> str:
        """Return what the journal and systemd said last."""
        lines = self.journal("-u", "rolloutd.service", "-u", "rolloutd.socket").splitlines()
        return "\n".join([*lines[-40:], *self.systemd.log.splitlines()[-20:]])

    def stop(self) -> None:
        """End everything."""
        self.systemd.stop()
        super().stop()


def drop_in() -> str:
    """Return what is different here: the program is that of the checkout, wherever that is."""
    places = {sys.prefix, str(CHECKOUT), sys.base_prefix}
    hidden = [place for place in sorted(places) if not place.startswith("/usr")]
    start = f"{sys.executable} -m rolloutd --config /etc/rolloutd/config.yaml"
    lines = [
        "[Service]",
        "ExecStart=",
        f"ExecStart={start}",
        "ExecReload=",
        f"ExecReload={start} --check",
        "ExecReload=/bin/kill -HUP $MAINPID",
        f"Environment=PYTHONPATH={CHECKOUT}",
        f"BindReadOnlyPaths={' '.join(hidden)}",
    ]
    if any(place.startswith(("/root/", "/home/")) for place in hidden):
        lines.append("ProtectHome=tmpfs")
    return "\n".join(lines) + "\n"


@contextmanager
def systemd_environment(directory: Path) -> Iterator[SystemdEnvironment]:
    """Start three nodes and a systemd with our socket; end everything."""
    if os.geteuid() != 0:
        left_out("only root can make the namespaces")
    if not SYSTEMD.exists() or shutil.which("unshare") is None:
        left_out("there is no systemd or no unshare (Debian: apt-get install systemd util-linux)")
    made = SystemdEnvironment(directory, ("n1", "n2", "n3"))
    try:
        made.start_nodes()
        try:
            made.boot()
        except RuntimeError as error:
            left_out(f"no systemd of our own can be had here: {error}")
        yield made
    finally:
        made.stop()


@pytest.fixture
def serviced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdEnvironment]:
    """A systemd of the test's own, in which no daemon runs yet."""
    with systemd_environment(tmp_path_factory.mktemp("v")) as made:
        yield made


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdEnvironment]:
    """A daemon that knows its nodes, for the tests that leave it running."""
    with systemd_environment(tmp_path_factory.mktemp("v")) as made:
        made.wait_until(made.has_nodes, "the daemon knows its nodes")
        yield made


@pytest.mark.servers
def test_a_rollout_under_systemd_survives_restart_and_stop(serviced: SystemdEnvironment) -> None:
    """The socket starts the daemon; a restart and a stop in the middle of a run lose and double nothing."""
    systemd = serviced.systemd
    assert systemd.show("rolloutd.service", "ActiveState") == "inactive"
    inode = serviced.socket.stat().st_ino
    serviced.wait_until(serviced.has_nodes, "the socket has started the daemon, which knows its nodes")
    serviced.wait_until(lambda: systemd.show("rolloutd.service", "ActiveState") == "active", "it is ready")
    serviced.wait_until(
        lambda: "No rollout is live; 3 nodes known" in serviced.status_text(), "its status says so"
    )
    is_hardened(serviced)

    rollout = serviced.submit(spec(serviced), {"change.yml": CHANGE_PLAYBOOK})
    serviced.vote(rollout, "start")
    serviced.wait_for_gate(rollout, "continue")
    serviced.wait_until(
        lambda: {"waits", "continue"} <= set(re.findall(r"\w+", serviced.status_text())),
        "the status names the gate",
    )
    serviced.pause_playbooks()
    serviced.vote(rollout, "continue")
    serviced.wait_until(lambda: in_work(serviced), "a playbook is in the middle of its work")
    before, runs = serviced.main_pid(), runs_of(serviced)
    assert runs
    systemd.ctl("restart", "rolloutd.service")
    assert serviced.main_pid() not in ("0", before)
    assert serviced.socket.stat().st_ino == inode, "the socket is the same one"
    assert in_work(serviced), "the restart was in the middle of it"
    systemd.ctl("stop", "rolloutd.socket", "rolloutd.service")
    assert serviced.main_pid() == "0"
    assert runs_of(serviced) == runs
    assert in_work(serviced), "the stop was in the middle of it"
    serviced.resume_playbooks()
    serviced.wait_until(lambda: serviced.spans()[-1].end, "the run ends without the daemon")
    assert serviced.main_pid() == "0"
    systemd.ctl("start", "rolloutd.socket")
    inode = serviced.socket.stat().st_ino

    serviced.wait_until(lambda: serviced.status(rollout)["state"] == "done", "the rollout ends")
    assert sorted(span.node for span in serviced.spans()) == ["n1", "n2", "n3"], "each node exactly once"
    assert serviced.client.get("/v1/audit/verify")["ok"]
    moved = ("ROLLOUTD_EVENT=PhaseMoved", "ROLLOUTD_NODE=n2", "ROLLOUTD_TRIGGER=maintained")
    serviced.wait_until(
        lambda: "maintaining → verifying" in serviced.journal(*moved),
        "the journal has the move",
    )

    systemd.ctl("stop", "rolloutd.service")
    assert serviced.socket.stat().st_ino == inode
    assert systemd.show("rolloutd.socket", "ActiveState") == "active"
    serviced.wait_until(lambda: serviced.status(rollout)["done"] == 3, "the socket starts the daemon again")


@pytest.mark.servers
def test_reload_applies_valid_and_rejects_invalid_settings(running: SystemdEnvironment) -> None:
    """Settings with a mistake fail the reload and leave the old ones; status and journal say so."""
    systemd, pid = running.systemd, running.main_pid()
    running.wait_until(lambda: systemd.show("rolloutd.service", "ActiveState") == "active", "it is ready")
    running.configure(max_parallel="many")
    with pytest.raises(RuntimeError):
        systemd.ctl("reload", "rolloutd.service")
    running.wait_until(
        lambda: "max_parallel" in running.journal("-u", "rolloutd.service"), "the journal says why"
    )
    systemd.ctl("kill", "--signal=HUP", "--kill-who=main", "rolloutd.service")
    running.wait_until(lambda: "the old ones stay" in running.status_text(), "the status says it")
    running.wait_until(
        lambda: "max_parallel" in (running.client.get("/v1/status")["trouble"] or ""), "so does the API"
    )

    running.configure(max_parallel=2, teams={"infra": {"members": ["root"]}, "t9": {"members": ["root"]}})
    systemd.ctl("reload", "rolloutd.service")
    running.wait_until(lambda: "mistakes" not in running.status_text(), "the trouble is over")
    entries = running.wait_until(
        lambda: running.client.get("/v1/audit?kind=SettingsChanged")["entries"], "the change is audited"
    )
    assert [entry["entry"]["fields"]["changed"] for entry in entries] == [["max_parallel", "teams"]]
    assert running.main_pid() == pid


@pytest.mark.servers
def test_invalid_settings_do_not_restart_forever(serviced: SystemdEnvironment) -> None:
    """Whoever asks is told at once that nobody answers; once they are mended the next question starts it."""
    serviced.configure(max_parallel="many")
    with pytest.raises(DaemonUnreachable):
        serviced.client.get("/v1/health")
    systemd = serviced.systemd
    serviced.wait_until(
        lambda: systemd.show("rolloutd.service", "ActiveState") == "failed", "the service has given up"
    )
    assert systemd.show("rolloutd.socket", "SubState") == "listening"
    assert len(re.findall("(?m)^Failed to start", serviced.journal("-u", "rolloutd.service"))) == 1
    serviced.configure()
    serviced.wait_until(serviced.has_nodes, "the next question starts it")


@pytest.mark.servers
def test_the_doctor_that_root_calls_speaks_with_the_daemon(running: SystemdEnvironment) -> None:
    """Files are examined as the daemon's user, who may not open its own socket: that root does."""
    said = running.doctor()
    assert f"ok    daemon: {__version__}, pid {running.main_pid()}, epoch 1" in said, said
    assert "3 nodes, as the daemon sees it" in said
    ledger = running.systemd.root / "var/lib/rolloutd/rolloutd.sqlite"
    owner = ledger.stat().st_uid
    os.chown(ledger, 0, 0)
    try:
        assert f"WRONG database: the daemon's user may not write /var/lib/rolloutd/{ledger.name}" in (
            running.doctor()
        )
    finally:
        os.chown(ledger, owner, owner)


def is_hardened(serviced: SystemdEnvironment) -> None:
    """The daemon is nobody special, has its token, and its socket is for its group alone."""
    status = (serviced.systemd.root / "proc" / serviced.main_pid() / "status").read_text()
    assert re.search(r"^CapEff:\s+0+$", status, re.M)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.M)
    assert re.search(r"^Seccomp:\s+2$", status, re.M)
    inside = serviced.systemd.root / "proc" / serviced.main_pid() / "root"
    assert (inside / "run/credentials/rolloutd.service/tokens_example").read_text() == "a token\n"
    found = serviced.socket.stat()
    group = int(serviced.systemd.inside("getent", "group", "rolloutctl").split(":")[2])
    assert (found.st_mode & 0o777, found.st_gid) == (0o660, group)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(serviced.socket))


def spec(serviced: SystemdEnvironment) -> dict[str, Any]:
    """Return the plan: one node after the other."""
    variables = {"log_file": str(serviced.log_file)}
    return plan("serviced", soak="0s", maintain={"playbook": "change.yml", "vars": variables})


def in_work(serviced: SystemdEnvironment) -> bool:
    """Say whether the second playbook has begun and not ended."""
    spans = serviced.spans()
    return len(spans) == 2 and spans[-1].end is None


def runs_of(serviced: SystemdEnvironment) -> list[str]:
    """Return the runs that the daemon keeps."""
    runs = serviced.systemd.root / "var/lib/rolloutd/runs"
    return [entry.name for entry in runs.iterdir() if not entry.name.startswith(".")]
