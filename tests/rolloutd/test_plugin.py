"""Registrations of adapters: what is installed and what is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from pkgutil import resolve_name

import pytest

from machines.model.node import NodeKind
from rolloutd import plugin
from rolloutd.adapters.registry import AdapterNotFound, AdapterRegistry
from rolloutd.plugin import (
    ANCHORS,
    CHECKS,
    GUARDS,
    INVENTORIES,
    ISOLATORS,
    OBSERVERS,
    PROBES,
    WATCHES,
    installed_adapters,
)
from rolloutd.ports import AdapterContext, InventorySnapshot
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner
from tests.contracts.fakes.shell import FakeShell
from tests.rolloutd.planfile.plan_samples import SMALLEST_PLAN

GROUPS = (ANCHORS, GUARDS, INVENTORIES, OBSERVERS, ISOLATORS, CHECKS, PROBES, WATCHES)

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


SWITCH = """
from rolloutd.plugin import Field, GuardParams, Registration

class SwitchParams(GuardParams):
    \"\"\"The device rolls back what was not committed in time.\"\"\"

    device: str = Field(description="The device.")
    slow: bool = Field(default=False, description="Wait longer.")

GUARD = Registration("switch:make", SwitchParams)
"""

READ_GUARDS = """
import json, sys, warnings
from rolloutd.settings.compile import compile_plan
from rolloutd.planfile import read, written_content
from rolloutd.planfile.model import PlanDocument
from rolloutd.planfile.schema import known_keys, schema_of_model

warnings.simplefilter("error")
for text in sys.argv[1:]:
    content = read(text.encode(), "plan.yaml").content
    step = compile_plan(content, teams={}).guard.step
    written = written_content(content)["spec"]["guard"]
    print(json.dumps([content["spec"]["guard"], written, step.kind, step.params]))
print(json.dumps(sorted(known_keys(schema_of_model(PlanDocument, "plan"), ("spec", "guard")))))
"""


def test_plan_chooses_guard_of_another_package(tmp_path: Path) -> None:
    (tmp_path / "switch.py").write_text(SWITCH)
    metadata = tmp_path / "switch-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: switch\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[rolloutd.guards]\nswitch = switch:GUARD\n")
    plans = [
        f"{SMALLEST_PLAN}  guard: {guard}\n"
        for guard in ("{kind: switch, device: d1, after: 5m}", "{paths: [/etc/net]}")
    ]
    done = subprocess.run(
        [sys.executable, "-c", READ_GUARDS, *plans],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    switch, ssh, keys = map(json.loads, done.stdout.splitlines())
    params = {"device": "d1", "slow": False, "after": 300}
    written = {"kind": "switch", "device": "d1", "after": 300}
    assert switch == [{"kind": "switch", "confirm": None, **params}, written, "switch", params]
    params = {"paths": ["/etc/net"], "commands": [], "after": 120, "across_reboot": False}
    assert ssh == [{"confirm": None, **params}, {"paths": ["/etc/net"]}, "ssh", params]
    assert {"kind", "device", "paths"} <= set(keys)


def test_ssh_and_balancers_are_for_machines() -> None:
    for group, kinds in ((CHECKS, "node reachable self_updates ssh"), (ISOLATORS, "command haproxy")):
        for kind in kinds.split():
            assert NodeKind.CLUSTER not in (installed_adapters(group)[kind].node_kinds or NodeKind), kind


def test_kind_that_is_not_installed_is_not_contained() -> None:
    registry = AdapterRegistry(ISOLATORS, context())
    assert "command" in registry
    assert "no-such-kind" not in registry, "asked of the name of a runner, which is no kind of change"
