"""Contract suites of the ports that packages can add adapters to.

A package subclasses the suite of its port in its own tests and implements
`open_backend`; pytest collects the rest.  Nothing but pytest is needed: each
test runs in an event loop of its own.  docs/plugins.md shows an example.
"""

import pytest

# Before the import of the suites, so that a failed assertion shows its values.
pytest.register_assert_rewrite("rolloutd.contracts.suites", "rolloutd.contracts.runner")

from rolloutd.adapters.timers import SystemClock  # noqa: E402
from rolloutd.contracts.harness import LocalShell, step_context  # noqa: E402
from rolloutd.contracts.runner import RunnerBackend, RunnerContract, Work  # noqa: E402
from rolloutd.contracts.suites import (  # noqa: E402
    CheckBackend,
    CheckContract,
    InventoryBackend,
    InventoryContract,
    IsolatorBackend,
    IsolatorContract,
    NodeGuardBackend,
    NodeGuardContract,
    ObserverBackend,
    ObserverContract,
    TrafficProbeBackend,
    TrafficProbeContract,
    WatchBackend,
    WatchContract,
)

__all__ = [
    "CheckBackend",
    "CheckContract",
    "InventoryBackend",
    "InventoryContract",
    "IsolatorBackend",
    "IsolatorContract",
    "LocalShell",
    "NodeGuardBackend",
    "NodeGuardContract",
    "ObserverBackend",
    "ObserverContract",
    "RunnerBackend",
    "RunnerContract",
    "SystemClock",
    "TrafficProbeBackend",
    "TrafficProbeContract",
    "WatchBackend",
    "WatchContract",
    "Work",
    "step_context",
]
