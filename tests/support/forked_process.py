"""Our programs as processes forked from one that has imported them, which saves a second of CPU time each.

A process of its own, with its own environment, directory, session and output; only the command line in /proc
is that of the server.  What a new process imports and prints as it starts is for other tests.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rolloutd.adapters.ansible import self_test

DAEMON, ADMIN, CLI = "rolloutd.__main__", "rolloutd.admin.__main__", "rolloutd.cli.main"
"""Modules with a `main` that takes the arguments and returns the exit code."""

_CLONE_NEWNET = 0x40000000

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        __name__,
        "rolloutd.app",
        "rolloutd.adapters.ansible.inventory",
        "rolloutd.adapters.kubernetes.registration",
        "rolloutd.store.sqlite.backup",
        "rolloutd.store.audit_comparison",
        *(DAEMON, ADMIN, CLI),
    ]
)


class ForkedProcess:
    """What tests use of subprocess.Popen, for a process that the fork server has started."""

    def __init__(
        self,
        module: str,
        words: list[str],
        output: Path,
        errors: Path,
        environment: Mapping[str, str],
        namespace: str = "",
    ) -> None:
        """`namespace` is that of a network, by its name in /run/netns."""
        arguments = (module, words, str(output), str(errors), dict(environment), namespace)
        self._process = _CONTEXT.Process(target=_become, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_daemon(
    words: list[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    fork: bool = True,
    prefix: Sequence[str] = (),
    namespace: str = "",
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start a daemon; as a new process where `environment` preloads a library, which a fork lacks.

    `prefix` is a command that starts it, such as one that enters a network namespace; a fork enters
    `namespace`.
    """
    _remember_self_test(Path(words[words.index("--config") + 1]))
    if fork and not prefix and "LD_PRELOAD" not in environment:
        return ForkedProcess(DAEMON, words, log, log, environment, namespace)
    with log.open("ab") as output:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "rolloutd", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=environment,
            start_new_session=True,
        )


def _remember_self_test(config: Path) -> None:
    """Spare a daemon the self-test of fast runs, which has tests of its own and takes 3 CPU seconds."""
    state_dir = config.parent / yaml.safe_load(config.read_text())["state_dir"]
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    self_test.remember(state_dir)


def run_forked(
    module: str, words: list[str], *, timeout_s: float, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, like subprocess.run with captured output."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        process = ForkedProcess(module, words, output, errors, environment)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


def _become(
    module: str, words: list[str], output: str, errors: str, environment: dict[str, str], namespace: str
) -> None:
    """Be a process that runs the module's `main`; its exit code is that of this process."""
    os.setsid()
    if namespace:
        _enter_network(namespace)
    os.chdir("/")
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    for path, descriptor in (("/dev/null", 0), (output, 1), (errors, 2)):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        open(descriptor, "r" if descriptor == 0 else "w", closefd=False)  # noqa: SIM115
        for descriptor in range(3)
    )
    sys.argv = [module, *words]
    sys.exit(importlib.import_module(module).main(words))


def _enter_network(namespace: str) -> None:
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    # os.setns() came with Python 3.12.
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
    os.close(descriptor)
