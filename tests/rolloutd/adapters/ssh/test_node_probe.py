"""The check `node`: probes that run on the node itself."""

from __future__ import annotations

import socket
from typing import Any

from rolloutd.adapters.ssh.node_probe import NO_TOOL, NodeProbe
from rolloutd.ports import Failed, Host, Ok, ShellResult, StepResult, Unknown
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.ssh_fixtures import step_context
from tests.support.local_shell import LocalShell


async def probe(shell: Any = None, **params: str) -> StepResult:
    return await NodeProbe(shell or LocalShell(), FakeClock()).check(step_context(Host("n1"), params))


async def test_open_port_passes_and_closed_port_fails() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert await probe(tcp=address) == Ok(f"n1 reaches {address}")
    closed = await probe(tcp=address)
    assert isinstance(closed, Failed)
    assert f"n1 does not reach {address}" in closed.text


async def test_name_is_resolved_by_node() -> None:
    assert isinstance(await probe(dns="localhost"), Ok)
    assert isinstance(await probe(dns="no.such.name.invalid"), Failed)


async def test_hostile_name_is_no_command() -> None:
    assert isinstance(await probe(dns="x; exit 0"), Failed)
    assert isinstance(await probe(tcp="$(exit 0):80"), Failed)


async def test_address_without_port_fails() -> None:
    found = await probe(tcp="192.0.2.1")
    assert isinstance(found, Failed)
    assert "HOST:PORT" in found.text


async def test_missing_program_is_named() -> None:
    class BareNode(FakeShell):
        async def run(self, host: Host, command: str, **_: Any) -> ShellResult:
            return ShellResult(NO_TOOL, "", "")

    found = await probe(BareNode(), icmp="192.0.2.1")
    assert isinstance(found, Failed)
    assert "install" in found.text


async def test_silent_node_is_unknown() -> None:
    shell = FakeShell()
    shell.down.add("n1")
    assert isinstance(await probe(shell, icmp="192.0.2.1"), Unknown)
