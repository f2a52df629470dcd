"""What holds for all tests: which of them this machine can run, and that CI runs them all."""

from __future__ import annotations

import gc
import os
import shutil
import tomllib
from collections.abc import Generator, Iterator
from importlib.metadata import distribution
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.node_python import node_python
from tests.support.sshd import Sshd

if TYPE_CHECKING:
    from tests.support.postgresql import Postgresql
    from tests.support.s3_server import S3Server

Sshd.python = node_python()

settings.register_profile(
    "rolloutd",
    # The machine's speed is no property of the code.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("rolloutd")

PROGRAMS = {
    "sshd": ("/usr/sbin/sshd", "openssh-server"),
    "ssh": ("/usr/bin/ssh", "openssh-client"),
    "ssh-keygen": ("/usr/bin/ssh-keygen", "openssh-client"),
    "haproxy": ("/usr/sbin/haproxy", "haproxy"),
    "lua5.1": ("/usr/bin/lua5.1", "lua5.1"),
    "prometheus": ("/usr/bin/prometheus", "prometheus"),
    "postgresql": (
        str(next(Path("/usr/lib/postgresql").glob("*/bin/initdb"), "/usr/lib/postgresql/initdb")),
        "postgresql",
    ),
}
"""Programs that tests need, where they usually are, and their Debian packages."""

SSH_PROGRAMS = frozenset({"sshd", "ssh", "ssh-keygen"})
"""Programs of each test marked `servers`; the mark's arguments name more."""

SLOW = (
    "tests/acceptance/",
    "tests/contracts/kubernetes/",
    "tests/rolloutd/adapters/ansible/",
    "tests/rolloutd/demo/",
    "tests/rolloutd/service/",
    "tests/sim/",
)
"""Tests with processes of their own; most wait longer than they compute."""

DEAREST = (
    "tests/acceptance/test_image.py",
    "tests/acceptance/test_packages.py",
    "tests/sim/test_sim.py",
    "tests/rolloutd/engine/test_forecast_of_daemon.py",
    "tests/acceptance/test_example_plans.py",
    "tests/acceptance/test_console_figures.py",
    "tests/acceptance/playbooks/test_packages.py",
    "tests/acceptance/test_killed_daemon.py",
    "tests/acceptance/playbooks/test_network.py",
    "tests/acceptance/test_console.py",
    "tests/rolloutd/adapters/ansible/test_forks.py",
    "tests/acceptance/test_demo.py",
    "tests/acceptance/playbooks/test_gpu_driver.py",
    "tests/acceptance/test_two_rollouts.py",
)
"""Files with the longest tests, which begin first: the last one would leave a core idle for minutes."""

_left_out: dict[str, str] = {}


def _missing() -> set[str]:
    return {name for name, (path, _) in PROGRAMS.items() if not (shutil.which(name) or Path(path).exists())}


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    """A real server for the tests of this worker."""
    from tests.support.postgresql import running_server  # only here: it loads the store and the driver

    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real server for the tests of this worker."""
    from tests.support.s3_server import running_s3_server  # only here: most workers need none

    with running_s3_server() as server:
        yield server


def pytest_configure() -> None:
    """Stop if the installed package is older than pyproject.toml: its entry points name the adapters."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = {
        (group, *point) for group, points in project["entry-points"].items() for point in points.items()
    }
    installed = {(point.group, point.name, point.value) for point in distribution("rolloutd").entry_points}
    if not declared <= installed:
        command = ".venv-dev/bin/python -m pip install --no-deps --no-build-isolation --editable ."
        raise pytest.UsageError(f"the installed entry points are old; run `{command}`")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector, which takes a third of the time.

    It ignores them later: a collection by a test would examine all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after the tests that `-m` excludes are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs servers that are not here, and begin with the slow tests."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = _begin_with_slow(items, workers)
    missing = _missing()
    for item in items:
        mark = item.get_closest_marker("servers")
        lacking = sorted(missing & SSH_PROGRAMS.union(mark.args)) if mark else []
        if lacking:
            packages = ", ".join(sorted({PROGRAMS[name][1] for name in lacking}))
            reason = f"needs {', '.join(lacking)} (Debian: {packages})"
            item.add_marker(pytest.mark.skip(reason=reason))


def _begin_with_slow(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order in which each worker begins with its share of the slow files.

    The files with long tests come first.  xdist gives each worker consecutive tests, and idle workers the
    last ones of others: so the run ends with quick tests, and no worker waits long for the last.
    """
    long = {item.path for item in items if item.get_closest_marker("long")}
    first = [item for item in items if item.path in long]
    slow = [item for item in items if item.path not in long and item.nodeid.startswith(SLOW)]
    quick = [item for item in items if item.path not in long and not item.nodeid.startswith(SLOW)]
    files = [list(group) for _, group in groupby((*first, *slow), lambda item: item.path)]
    ranks = {name: rank for rank, name in enumerate(DEAREST)}
    files.sort(key=lambda file: ranks.get(file[0].nodeid.partition("::")[0], len(ranks)))
    ordered: list[pytest.Item] = []
    for number in range(workers):
        size = (len(items) - len(ordered)) // (workers - number)
        share = [item for file in files[number::workers] for item in file]
        room = max(0, size - len(share))
        ordered += [*share, *quick[:room]]
        del quick[:room]
    return ordered + quick


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what was left out."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _left_out[report.nodeid] = reason


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a test that was left out is a failure: it would prove less than it seems to."""
    if not _left_out or os.environ.get("CI") != "true":
        return
    if exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    # A second run of the failed tests alone would not see what was left out, so it finds no test and fails.
    if session.config.cache is not None:
        session.config.cache.set("cache/lastfailed", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what was left out."""
    if not _left_out:
        return
    terminalreporter.section("LEFT OUT", red=True)
    for reason in sorted(set(_left_out.values())):
        count = sum(1 for told in _left_out.values() if told == reason)
        terminalreporter.write_line(f"{count} tests: {reason.removeprefix('Skipped: ')}", red=True)
    if os.environ.get("CI") == "true":
        terminalreporter.write_line("CI=true: what is left out counts as failed", red=True)
