"""Registrations of adapters: what is installed and what is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pkgutil import resolve_name

import pytest

from rolloutd import plugin
from rolloutd.adapters.registry import AdapterNotFound, AdapterRegistry
from rolloutd.plugin import CHECKS, INVENTORIES, ISOLATORS, OBSERVERS, PROBES, WATCHES, installed_adapters
from rolloutd.ports import AdapterContext, InventorySnapshot
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner
from tests.contracts.fakes.shell import FakeShell

GROUPS = (INVENTORIES, OBSERVERS, ISOLATORS, CHECKS, PROBES, WATCHES)

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Replace the installed isolators by entry points, each `name=value`."""

    def replace(**points: str) -> None:
        found = [EntryPoint(name, value, ISOLATORS) for name, value in points.items()]
        monkeypatch.setattr(plugin, "entry_points", lambda *, group: found)
        plugin._load_entry_points.cache_clear()

    yield replace
    plugin._load_entry_points.cache_clear()


def context() -> AdapterContext:
    """Return what a daemon without a fleet gives its adapters."""
    runner = FakeRunner(FakeRunHost({}))
    return AdapterContext(FakeShell(), FakeClock(), runner, lambda: InventorySnapshot({}), None)


@pytest.mark.parametrize("group", GROUPS)
def test_every_factory_exists(group: str) -> None:
    assert installed_adapters(group)
    for registration in installed_adapters(group).values():
        assert registration.factory is None or callable(resolve_name(registration.factory))


def test_broken_registration_is_logged_and_left_out(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(
        command="rolloutd.adapters.ssh.registration:COMMAND_ISOLATOR",
        gone="no_such_package:ISOLATOR",
        odd="rolloutd.adapters.ssh.command:CommandIsolator",
    )
    assert list(installed_adapters(ISOLATORS)) == ["command"]
    assert "adapter gone (rolloutd.isolators): cannot be loaded" in caplog.text
    assert (
        "adapter odd (rolloutd.isolators): rolloutd.adapters.ssh.command:CommandIsolator is not a Reg"
        in caplog.text
    )


def test_missing_adapter_names_installed_ones() -> None:
    with pytest.raises(AdapterNotFound, match=r"adapter flagfile \(rolloutd.isolators\): not installed"):
        AdapterRegistry(ISOLATORS, context())["flagfile"]
