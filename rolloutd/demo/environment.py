"""The demo's environment: a directory with a fleet and a daemon.

    DIR/plan.yml  DIR/playbooks/   the plan to submit
    DIR/config.yaml                the daemon's settings
    DIR/control.sock               the daemon's socket
    DIR/state/                     the daemon's state
    DIR/fleet/                     the nodes' directories
    DIR/home/  DIR/tmp/            HOME and TMPDIR of its processes
    DIR/daemon.log  DIR/fleet.log

The length of a Unix socket's path is limited: if DIR is too long, sockets are in a
directory under /tmp, which the demo removes at its end.

Fleet and daemon are processes that end with the demo.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

import rolloutd
from rolloutd.cli import exits
from rolloutd.control.client import ApiError, Client, DaemonUnreachable, api_path
from rolloutd.demo import cleanup
from rolloutd.demo.fleet import TEAMS

READY_TIMEOUT_S = 90.0
"""How long the fleet and the daemon may take to start: usually two seconds, more on a loaded machine."""

POLL_INTERVAL_S = 0.05
"""Pause between two checks whether they have started."""

CLEANUP_TIMEOUT_S = 40.0
"""More than the cleanup process's own limit."""

MAX_SOCKET_DIR_BYTES = 80
"""Bytes of DIR: a socket's path may have 107, and the daemon adds a name and, temporarily, a number."""

MAX_TMP_DIR_BYTES = 28
"""Bytes of DIR: ssh adds about 70 for its control sockets."""

LOG_LINES = 25

MAX_PARALLEL = 4
"""Runs at once: more would only be slower on a small machine."""


@dataclass(frozen=True, slots=True)
class DemoEnvironment:
    directory: Path
    short_directory: Path

    @property
    def socket(self) -> Path:
        fits = len(os.fsencode(self.directory)) <= MAX_SOCKET_DIR_BYTES
        return (self.directory if fits else self.short_directory) / "control.sock"

    @property
    def tmp_directory(self) -> Path:
        return self.short_directory / "tmp"

    @property
    def fleet_directory(self) -> Path:
        return self.directory / "fleet"

    @property
    def plan_file(self) -> Path:
        return self.directory / "plan.yml"

    @property
    def client(self) -> Client:
        return Client(self.socket)


@contextmanager
def demo_environment(directory: Path, *, nodes: int, keep: bool) -> Iterator[DemoEnvironment]:
    """Write the files, start fleet and daemon, and end all processes at exit; raises exits.Exit."""
    is_short = len(os.fsencode(directory)) <= MAX_TMP_DIR_BYTES
    short = directory if is_short else Path(tempfile.mkdtemp(prefix="rolloutd-demo-", dir="/tmp"))
    demo = DemoEnvironment(directory, short)
    directories = {demo.directory, demo.short_directory} - ({directory} if keep else set())
    with _with_cleanup(directory, directories):
        _write_files(demo)
        fleet = _start_process(
            demo, "fleet", "rolloutd.demo.fleet", "--dir", str(demo.fleet_directory), "--nodes", str(nodes)
        )
        _wait_until_ready(demo, "fleet", fleet, (demo.fleet_directory / "fleet.json").exists)
        daemon = _start_process(demo, "daemon", "rolloutd", "--config", str(directory / "config.yaml"))
        _wait_until_ready(demo, "daemon", daemon, lambda: _has_read_inventory(demo.client, nodes))
        with _exit_when_process_ends(demo, {"fleet": fleet, "daemon": daemon}):
            yield demo


def log_tail(demo: DemoEnvironment, name: str) -> str:
    lines = (demo.directory / f"{name}.log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def _process_ended(demo: DemoEnvironment, name: str, problem: str) -> exits.Exit:
    return exits.Exit(exits.REFUSED, f"the {name}: {problem}; read its log:\n{log_tail(demo, name)}")


@contextmanager
def _with_cleanup(directory: Path, directories: Iterable[Path]) -> Iterator[None]:
    """Start the cleanup process; it cleans up on exit, and also if this process is killed."""
    arguments = [str(directory), *map(str, directories)]
    command = [sys.executable, "-I", "-S", str(cleanup.__file__), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/")
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(CLEANUP_TIMEOUT_S)


@contextmanager
def _exit_when_process_ends(
    demo: DemoEnvironment, processes: Mapping[str, subprocess.Popen[bytes]]
) -> Iterator[None]:
    """Raise exits.Exit, from a signal handler, as soon as the fleet or the daemon ends early."""

    def check_processes(_number: int, _frame: object) -> None:
        for name, process in processes.items():
            if process.poll() is not None:
                raise _process_ended(demo, name, f"ended early (exit {process.returncode})")

    previous_handler = signal.signal(signal.SIGCHLD, check_processes)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous_handler)


def _write_files(demo: DemoEnvironment) -> None:
    for place in (demo.directory / "home", demo.directory / "state", demo.tmp_directory):
        place.mkdir(mode=0o700)
    ours = resources.files("rolloutd")
    _copy(ours / "demo" / "files" / "plan.yml", demo.plan_file)
    _copy(ours / "playbooks", demo.directory / "playbooks")
    text = yaml.safe_dump(_settings(demo), sort_keys=False)
    (demo.directory / "config.yaml").write_text(f"# The daemon's settings in the demo.\n{text}")


def _settings(demo: DemoEnvironment) -> dict[str, Any]:
    user = _current_user()
    check = {"ssh": {"run": "healthcheck"}}
    teams: dict[str, Any] = {team: {"members": [user], "verify": [check]} for team in TEAMS}
    inventory = {
        "path": str(demo.fleet_directory / "inventory.yml"),
        "labels": ["team", "rack", "role", "canary"],
    }
    return {
        "state_dir": str(demo.directory / "state"),
        "socket": str(demo.socket),
        "inventory": [{"ansible": inventory}],
        "observe": [{"reachable": {}}],
        "pools": {"team": {"max_unavailable": 1}, "rack": {"max_unavailable": 2}},
        "max_parallel": MAX_PARALLEL,
        "teams": {"infra": {"members": [user]}, **teams},
        "admins": [user],
        "ssh": {"known_hosts": str(demo.fleet_directory / "known_hosts")},
        "shell": {"host": _shell_command(demo.fleet_directory)},
        "ansible": {"parallel": MAX_PARALLEL, "fence_dir": str(demo.directory / "fence")},
    }


def _shell_command(fleet_directory: Path) -> list[str]:
    """Return the command of a shell on a node: with the demo's key, because no person has one there."""
    options = {"IdentitiesOnly": "yes", "UserKnownHostsFile": str(fleet_directory / "known_hosts")}
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    # The demo's nodes have no terminals; an interactive shell still has a prompt.
    key = str(fleet_directory / "id_ed25519")
    return ["ssh", "-T", "-i", key, *words, "-p", "{port}", "--", "{address}", "sh -i"]


def _current_user() -> str:
    uid = os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _copy(source: Traversable, target: Path) -> None:
    if source.is_dir():
        target.mkdir()
        for inner in source.iterdir():
            _copy(inner, target / inner.name)
    else:
        target.write_bytes(source.read_bytes())


def _start_process(demo: DemoEnvironment, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (demo.directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            cwd=demo.directory,
            env=_process_environment(demo),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C reaches only the demo, which then ends both in order.
            start_new_session=True,
        )


def _process_environment(demo: DemoEnvironment) -> Mapping[str, str]:
    """Return an environment whose HOME and TMPDIR are the demo's; HOME is also the cleanup's mark."""
    passed = {name: os.environ[name] for name in ("PATH", "TZ", "LANG", "LC_ALL") if name in os.environ}
    return {
        "PATH": os.defpath,
        **passed,
        "HOME": str(demo.directory / "home"),
        "TMPDIR": str(demo.tmp_directory),
        "PYTHONPATH": str(Path(rolloutd.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _wait_until_ready(
    demo: DemoEnvironment, name: str, process: subprocess.Popen[bytes], is_ready: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not is_ready():
        if process.poll() is not None:
            raise _process_ended(demo, name, f"did not start (exit {process.returncode})")
        if time.monotonic() > deadline:
            raise _process_ended(demo, name, f"did not start within {READY_TIMEOUT_S:.0f} s")
        time.sleep(POLL_INTERVAL_S)


def _has_read_inventory(client: Client, nodes: int) -> bool:
    try:
        return len(client.get(api_path("inventory"))["nodes"]) == nodes
    except (DaemonUnreachable, ApiError):
        return False
