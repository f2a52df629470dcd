"""Switch of the fast runs: a tested ansible-core, and a self-test that finds no difference."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from pathlib import Path

from rolloutd.adapters.ansible.environment import TreeConfig
from rolloutd.adapters.ansible.fast.fork_servers import ForkServers, NotForked
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.ports import TunedRunnerStatus

__all__ = ["FastRuns", "NotForked", "SelfTest"]

log = logging.getLogger(__name__)

TESTED_VERSIONS = ("2.19.14", "2.20.10", "2.21.5")
"""Versions of ansible-core with which tests/rolloutd/adapters/ansible/test_forks.py was run.

The first is for Python 3.11, the others for 3.12 and 3.13.
"""

HERE = Path(__file__).parent

DEFAULT_INVENTORY_PATHS = "~/.ansible/plugins/inventory:/usr/share/ansible/plugins/inventory"
"""Ansible's own default, which our environment would otherwise replace."""

SelfTest = Callable[[], Awaitable[str]]
"""Compares a fast run with a plain one; returns the difference, or an empty text."""


class FastRuns:
    """What runs use of ansible-core's private parts: nothing while `status.plain_because` says why."""

    def __init__(
        self, binary: str, status: TunedRunnerStatus, *, enabled: bool, self_test: SelfTest | None
    ) -> None:
        """`binary` is the ansible-playbook command of the runs; without a `self_test` none is needed."""
        self._status = status
        self._servers = ForkServers(binary, status.servers)
        self._self_test = self_test
        self._testing: asyncio.Future[str] | None = None
        status.plain_because = "settings: ansible.warm is off" if not enabled else _why_untested(binary)
        if enabled and status.plain_because:
            log.warning("runs start as new processes: %s", status.plain_because)
        if not status.plain_because and self_test is not None:
            status.plain_because = NOT_TESTED

    def begin_self_test(self) -> None:
        """Begin it unless that was done, or no result could help; runs do not wait for it."""
        if self._self_test is not None and self._status.plain_because == NOT_TESTED and not self._testing:
            self._testing = asyncio.ensure_future(self._self_test())
            self._testing.add_done_callback(self._record_self_test)

    def environment(self, config: TreeConfig, callbacks: str, modules: Path | None) -> Mapping[str, str]:
        """Return the variables by which Ansible loads our plugins, after the `callbacks` of each run."""
        if self._status.plain_because:
            return {}
        inventories = config.search_paths("inventory_plugins", DEFAULT_INVENTORY_PATHS)
        plugins = {
            "ANSIBLE_CALLBACK_PLUGINS": f"{callbacks}:{HERE / 'callback'}",
            # The yaml plugin reads the same file, should ours not take it.
            "ANSIBLE_INVENTORY_ENABLED": "rolloutd_inventory,yaml",
            "ANSIBLE_INVENTORY_PLUGINS": f"{inventories}:{HERE / 'inventory_plugin'}",
        }
        return plugins if modules is None else {**plugins, "ROLLOUTD_MODULE_CACHE": str(modules)}

    async def fork(self, directory: RunDirectory, tree: Path) -> int:
        """Start the run's wrapper in a fork and return its pid; raises NotForked."""
        if self._status.plain_because:
            raise NotForked(self._status.plain_because)
        return await self._servers.fork(directory, tree)

    def close(self) -> None:
        if self._testing is not None:
            self._testing.cancel()
        self._servers.close()

    def _record_self_test(self, tested: asyncio.Future[str]) -> None:
        if tested.cancelled():
            return
        error = tested.exception()
        problem = tested.result() if error is None else f"{type(error).__name__}: {error}"
        self._status.plain_because = f"self-test: {problem}" if problem else ""
        if problem:
            log.warning("runs start as new processes: %s", self._status.plain_because)


NOT_TESTED = "the self-test has not ended"


def _why_untested(binary: str) -> str:
    """Return why an ansible-playbook is none of those that were tested, or an empty text."""
    if Path(binary) != Path(sys.executable).with_name("ansible-playbook"):
        return f"{binary} is not the command of rolloutd's Python"
    version = metadata.version("ansible-core")
    tested = ", ".join(TESTED_VERSIONS)
    return (
        "" if version in TESTED_VERSIONS else f"ansible-core {version} is not tested; install one of {tested}"
    )
