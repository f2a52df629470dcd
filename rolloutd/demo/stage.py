"""The stage of the demo: a directory with a fleet and a daemon in it.

    DIR/plan.yml  DIR/playbooks/   what is submitted
    DIR/config.yaml                the daemon's settings
    DIR/control.sock               where it is asked
    DIR/state/                     the daemon's own
    DIR/fleet/                     the nodes' worlds
    DIR/home/  DIR/tmp/            where its processes believe to be at home
    DIR/daemon.log  DIR/fleet.log

A Unix socket's path is short by law: where DIR is too long for that, what holds
sockets is in a directory under /tmp, which goes when the demo does.

It starts both as processes and sees to it that they end with the demo.  What is
then done with them, the story knows.
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
from rolloutd.control.client import Answer, Client, NoDaemon, path_of
from rolloutd.demo import sweeper
from rolloutd.demo.fleet import TEAMS

READY_LIMIT_S = 90.0
"""How long the fleet and the daemon may take to be there; two seconds are usual, a loaded machine is slow."""

LOOK_S = 0.05
"""Between two looks whether they are there."""

SWEPT_LIMIT_S = 40.0
"""More than the sweeper's own limit."""

LONGEST_FOR_SOCKET = 80
"""Bytes of DIR: a socket's path may have 107, and the daemon adds a name and a number while it makes it."""

LONGEST_FOR_TEMPORARY = 28
"""Bytes of DIR: ssh adds some 70 to the place of its control sockets."""

LOG_LINES = 25
"""Of a log that are shown when something did not start."""

AT_ONCE = 4
"""Runs at once: more only wait for each other on a small machine."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where everything is."""

    directory: Path
    short: Path

    @property
    def socket(self) -> Path:
        """The daemon's socket."""
        fits = len(os.fsencode(self.directory)) <= LONGEST_FOR_SOCKET
        return (self.directory if fits else self.short) / "control.sock"

    @property
    def temporary(self) -> Path:
        """Where its processes put what is temporary."""
        return self.short / "tmp"

    @property
    def fleet(self) -> Path:
        """The fleet's directory."""
        return self.directory / "fleet"

    @property
    def plan(self) -> Path:
        """The plan file."""
        return self.directory / "plan.yml"

    @property
    def client(self) -> Client:
        """Somebody who asks the daemon."""
        return Client(self.socket)


@contextmanager
def staged(directory: Path, *, nodes: int, keep: bool) -> Iterator[Stage]:
    """Set the stage, start fleet and daemon, and leave no process behind; raises exits.Stop."""
    stage = Stage(directory, _short(directory))
    removed = {stage.directory, stage.short} - ({directory} if keep else set())
    with _swept(directory, removed):
        _furnish(stage)
        fleet = _start(
            stage, "fleet", "rolloutd.demo.fleet", "--dir", str(stage.fleet), "--nodes", str(nodes)
        )
        _await(stage, "fleet", fleet, (stage.fleet / "fleet.json").exists)
        daemon = _start(stage, "daemon", "rolloutd", "--config", str(directory / "config.yaml"))
        _await(stage, "daemon", daemon, lambda: _knows(stage.client, nodes))
        with _minded(stage, {"fleet": fleet, "daemon": daemon}):
            yield stage


def log_tail(stage: Stage, name: str) -> str:
    """Return the end of a log."""
    lines = (stage.directory / f"{name}.log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def _short(directory: Path) -> Path:
    if len(os.fsencode(directory)) <= LONGEST_FOR_TEMPORARY:
        return directory
    return Path(tempfile.mkdtemp(prefix="rolloutd-demo-", dir="/tmp"))


@contextmanager
def _swept(directory: Path, removed: Iterable[Path]) -> Iterator[None]:
    """Have a sweeper wait for our end; it sweeps when we leave, and also when we are killed."""
    places = [str(directory), *map(str, removed)]
    command = [sys.executable, "-I", "-S", str(sweeper.__file__), *places]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/")
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(SWEPT_LIMIT_S)


@contextmanager
def _minded(stage: Stage, processes: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Raise exits.Stop, wherever we are, at the moment the fleet or the daemon ends before its time."""

    def look(_number: int, _frame: object) -> None:
        for name, process in processes.items():
            if process.poll() is not None:
                told = log_tail(stage, name)
                raise exits.Stop(exits.NO, f"the {name} has ended (exit {process.returncode}):\n{told}")

    before = signal.signal(signal.SIGCHLD, look)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _furnish(stage: Stage) -> None:
    for place in (stage.directory / "home", stage.directory / "state", stage.temporary):
        place.mkdir(mode=0o700)
    ours = resources.files("rolloutd")
    _copy(ours / "demo" / "files" / "plan.yml", stage.plan)
    _copy(ours / "playbooks", stage.directory / "playbooks")
    text = yaml.safe_dump(_settings(stage), sort_keys=False)
    (stage.directory / "config.yaml").write_text(f"# The daemon's settings in the demo.\n{text}")


def _settings(stage: Stage) -> dict[str, Any]:
    myself = _user()
    check = {"ssh": {"run": "healthcheck"}}
    teams: dict[str, Any] = {team: {"members": [myself], "verify": [check]} for team in TEAMS}
    inventory = {"path": str(stage.fleet / "inventory.yml"), "labels": ["team", "rack", "role", "canary"]}
    return {
        "state_dir": str(stage.directory / "state"),
        "socket": str(stage.socket),
        "inventory": [{"ansible": inventory}],
        "observe": [{"reachable": {}}],
        "pools": {"team": {"max_unavailable": 1}, "rack": {"max_unavailable": 2}},
        "max_parallel": AT_ONCE,
        "teams": {"infra": {"members": [myself]}, **teams},
        "admins": [myself],
        "ssh": {"known_hosts": str(stage.fleet / "known_hosts")},
        "ansible": {"parallel": AT_ONCE, "fence_dir": str(stage.directory / "fence")},
    }


def _user() -> str:
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


def _start(stage: Stage, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (stage.directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            cwd=stage.directory,
            env=_environment(stage),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for the story, which then ends everybody in order.
            start_new_session=True,
        )


def _environment(stage: Stage) -> Mapping[str, str]:
    """Return an environment in which nothing is written outside; its HOME is the sweeper's mark."""
    passed = {name: os.environ[name] for name in ("PATH", "TZ", "LANG", "LC_ALL") if name in os.environ}
    return {
        "PATH": os.defpath,
        **passed,
        "HOME": str(stage.directory / "home"),
        "TMPDIR": str(stage.temporary),
        "PYTHONPATH": str(Path(rolloutd.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _await(stage: Stage, name: str, process: subprocess.Popen[bytes], is_there: Callable[[], bool]) -> None:
    until = time.monotonic() + READY_LIMIT_S
    while not is_there():
        if process.poll() is not None:
            told = log_tail(stage, name)
            raise exits.Stop(exits.NO, f"the {name} did not start (exit {process.returncode}):\n{told}")
        if time.monotonic() > until:
            raise exits.Stop(
                exits.NO, f"the {name} is not there after {READY_LIMIT_S:.0f} s:\n{log_tail(stage, name)}"
            )
        time.sleep(LOOK_S)


def _knows(client: Client, nodes: int) -> bool:
    """Say whether the daemon answers and has read its inventory."""
    try:
        return len(client.get(path_of("inventory"))["nodes"]) == nodes
    except (NoDaemon, Answer):
        return False
