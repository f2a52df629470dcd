"""The isolator `haproxy` on real balancers: sessions, prior states, and balancers that do not answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.haproxy.isolator import HaproxyIsolator, HaproxyTrafficProbe
from rolloutd.adapters.haproxy.runtime_api import HaproxyFailed
from rolloutd.contracts import step_context
from rolloutd.ports import Busy, Failed, IsolationStatus, Ok, StepContext, Unknown
from tests.support.balanced_server import BalancedServer, balanced_server

pytestmark = pytest.mark.servers("haproxy")

READY, MAINT, DRAIN = (0, 40), (1, 40), (8, 40)


def isolator_of(server: BalancedServer) -> HaproxyIsolator:
    return HaproxyIsolator(server.context, polls=3)


async def inspected(server: BalancedServer, **params: Any) -> StepContext:
    """Return the context with the prior state, which the daemon records before it acts."""
    ctx = step_context(server.host, {**server.params, **params}, server.clock)
    status = await isolator_of(server).inspect(ctx)
    assert isinstance(status, IsolationStatus)
    return replace(ctx, prior=status.prior)


async def test_server_is_maint_only_when_its_sessions_have_ended(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        isolator, ctx = isolator_of(server), await inspected(server)
        await server.start_request("lb1")
        await server.start_request("lb2")
        assert await isolator.isolate(ctx) == Busy("n1: 2 sessions (lb1 drain 1, lb2 drain 1)")
        assert server.admin_states() == [DRAIN, DRAIN]
        status = await isolator.inspect(ctx)
        assert isinstance(status, IsolationStatus)
        assert status.is_isolated is False
        assert all(response.endswith(b"ok") for response in await server.answer_requests())
        assert await isolator.isolate(ctx) == Ok("n1: 0 sessions (lb1 maint 0, lb2 maint 0)")
        assert server.admin_states() == [MAINT, MAINT]
        assert await isolator.return_to_service(ctx) == Ok("n1: 0 sessions (lb1 ready 0, lb2 ready 0)")
        assert server.admin_states() == [READY, READY]


async def test_cordon_only_drains_and_stops_there(tmp_path: Path) -> None:
    async with balanced_server(tmp_path) as server:
        ctx = replace(await inspected(server), cordon_only=True)
        assert isinstance(await isolator_of(server).isolate(ctx), Ok)
        assert server.admin_states() == [DRAIN]


@pytest.mark.parametrize(("state", "mask"), [("drain", DRAIN), ("maint", MAINT)])
async def test_server_that_another_took_out_is_waited_for(
    tmp_path: Path, state: str, mask: tuple[int, int]
) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        server.balancers["lb2"].command(f"set server web/n1 state {state}")
        isolator, ctx = isolator_of(server), step_context(server.host, server.params, server.clock)
        waits = Busy(f"n1 is set to {state} on lb2, not by this rollout", is_permanent=True)
        assert await isolator.dry_run(ctx) == await isolator.inspect(ctx) == waits
        assert server.admin_states() == [READY, mask]
        server.balancers["lb2"].command("set server web/n1 state ready")
        assert isinstance(await isolator.dry_run(ctx), Ok)
        assert isinstance(await isolator.isolate(await inspected(server)), Ok)


async def test_foreign_weight_is_left_and_named(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        isolator, ctx = isolator_of(server), await inspected(server)
        assert isinstance(await isolator.isolate(ctx), Ok)
        server.balancers["lb2"].command("set server web/n1 weight 7")
        text = "n1: 0 sessions (lb1 ready 0, lb2 ready 0); left as changed: lb2 weight 7 (40 before)"
        assert await isolator.return_to_service(ctx) == Ok(text)
        assert server.admin_states() == [READY, (0, 7)]


async def test_foreign_maint_during_drain_is_left(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        isolator, ctx = isolator_of(server), await inspected(server)
        await server.start_request("lb1")
        assert isinstance(await isolator.isolate(ctx), Busy)
        server.balancers["lb2"].command("set server web/n1 state maint")
        waits = Busy("n1 is set to maint on lb2, not by this rollout", is_permanent=True)
        assert await isolator.isolate(ctx) == waits
        await server.answer_requests()
        assert await isolator.inspect(ctx) == waits
        result = await isolator.return_to_service(ctx)
        assert result == Ok("n1: 0 sessions (lb1 ready 0, lb2 maint 0); left as changed: lb2 maint")
        assert server.admin_states() == [READY, MAINT]


async def test_foreign_drain_during_maint_is_left(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        isolator, ctx = isolator_of(server), await inspected(server)
        assert isinstance(await isolator.isolate(ctx), Ok)
        server.balancers["lb1"].command("set server web/n1 state drain")
        waits = Busy("n1 is set to drain on lb1, not by this rollout", is_permanent=True)
        assert await isolator.inspect(ctx) == waits
        assert isinstance(await isolator.return_to_service(ctx), Ok)
        assert server.admin_states() == [DRAIN, READY]


async def test_successor_returns_what_it_finds_and_leaves_later_changes(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        ctx = await inspected(server)
        await server.start_request("lb1")
        assert isinstance(await isolator_of(server).isolate(ctx), Busy)
        successor = isolator_of(server)
        await successor.inspect(ctx)
        server.balancers["lb2"].command("set server web/n1 state maint")
        assert isinstance(await successor.return_to_service(ctx), Ok)
        assert server.admin_states() == [READY, MAINT]
        await server.answer_requests()


async def test_successor_of_crash_after_record_begins(tmp_path: Path) -> None:
    """The intent was recorded, and nothing was set."""
    async with balanced_server(tmp_path) as server:
        ctx, successor = await inspected(server), isolator_of(server)
        assert isinstance(await successor.inspect(ctx), IsolationStatus)
        server.balancers["lb1"].command("set server web/n1 state maint")
        assert isinstance(await successor.isolate(ctx), Busy)
        assert isinstance(await successor.return_to_service(ctx), Ok)
        assert server.admin_states() == [MAINT]


async def test_unreachable_balancer_changes_nothing(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        isolator, ctx = isolator_of(server), await inspected(server)
        server.balancers["lb2"].hide_socket()
        for status in (await isolator.inspect(ctx), await isolator.isolate(ctx)):
            assert isinstance(status, Busy)
            assert "haproxy lb2: " in status.text
            assert "there is no socket" in status.text
        assert server.admin_states() == [READY, READY]


async def test_balancer_lost_while_draining_is_waited_for(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        isolator, ctx = isolator_of(server), await inspected(server)
        await server.start_request("lb1")
        assert isinstance(await isolator.isolate(ctx), Busy)
        server.balancers["lb2"].hide_socket()
        await server.answer_requests()
        for result in (await isolator.isolate(ctx), await isolator.return_to_service(ctx)):
            assert isinstance(result, Busy)
            assert "haproxy lb2: " in result.text
        # The return restored the balancer that answers.
        assert server.admin_states() == [READY, DRAIN]
        server.balancers["lb2"].show_socket()
        assert isinstance(await isolator.isolate(ctx), Ok)
        assert server.admin_states() == [MAINT, MAINT]


async def test_dead_balancer_keeps_no_other_from_return(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2", "lb3") as server:
        isolator, ctx = isolator_of(server), await inspected(server)
        assert isinstance(await isolator.isolate(ctx), Ok)
        server.balancers["lb2"].hide_socket()
        result = await isolator.return_to_service(ctx)
        assert isinstance(result, Busy)
        assert result.text.startswith("not restored on lb2: haproxy lb2: ")
        assert result.text.endswith("; restored: n1: 0 sessions (lb1 ready 0, lb3 ready 0)")
        assert server.admin_states() == [READY, MAINT, READY]
        server.balancers["lb2"].show_socket()
        assert isinstance(await isolator.return_to_service(ctx), Ok)
        assert server.admin_states() == [READY, READY, READY]


async def test_restarted_balancer_is_isolated_again(tmp_path: Path) -> None:
    async with balanced_server(tmp_path) as server:
        isolator, ctx = isolator_of(server), await inspected(server)
        assert isinstance(await isolator.isolate(ctx), Ok)
        server.balancers["lb1"].stop()
        assert isinstance(await isolator.inspect(ctx), Busy)
        server.balancers["lb1"].start()
        status = await isolator.inspect(ctx)
        assert isinstance(status, IsolationStatus)
        assert status.is_isolated is False
        assert isinstance(await isolator.isolate(ctx), Ok)
        assert isinstance(await isolator.return_to_service(ctx), Ok)
        assert server.admin_states() == [READY]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"server": "n9"}, "haproxy lb1: there is no server web/n9"),
        ({"backend": "wob"}, "`show servers state wob` was answered with: Can't find backend."),
        ({"balancers": ["lb9"]}, "haproxy lb9: not in the settings"),
        ({"server": "n1 state ready;show info"}, "is not a name of HAProxy"),
    ],
)
async def test_unknown_server_is_refused_before_anything_changes(
    tmp_path: Path, params: dict[str, Any], text: str
) -> None:
    async with balanced_server(tmp_path) as server:
        ctx = step_context(server.host, {**server.params, **params}, server.clock)
        with pytest.raises(HaproxyFailed, match=text.replace("'", ".").replace("`", ".")):
            await isolator_of(server).inspect(ctx)
        assert isinstance(await isolator_of(server).isolate(replace(ctx, prior=None)), Failed)
        assert isinstance(await HaproxyTrafficProbe(server.context).probe(ctx), Unknown)
        assert server.admin_states() == [READY]


async def test_named_balancers_alone_are_changed(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        ctx = await inspected(server, balancers=["lb2"])
        assert isinstance(await isolator_of(server).isolate(ctx), Ok)
        assert server.admin_states() == [READY, MAINT]


async def test_socket_without_admin_level_fails_and_says_so(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, level="operator") as server:
        result = await isolator_of(server).isolate(await inspected(server))
        assert isinstance(result, Failed)
        assert "the socket needs `level admin`" in result.text


async def test_settings_without_balancers_are_refused(tmp_path: Path) -> None:
    server = BalancedServer({})
    ctx = step_context(server.host, server.params, server.clock)
    with pytest.raises(HaproxyFailed, match="the settings name no balancer"):
        await isolator_of(server).inspect(ctx)


async def test_probe_counts_sessions_of_all_balancers(tmp_path: Path) -> None:
    async with balanced_server(tmp_path, "lb1", "lb2") as server:
        await server.start_request("lb1")
        await server.start_request("lb2")
        probe = HaproxyTrafficProbe(server.context)
        ctx = step_context(server.host, {**server.params, "max": 1}, server.clock)
        assert await probe.probe(ctx) == Busy("n1 is busy: 2 sessions of web/n1 (lb1 1, lb2 1)", count=2)
        assert isinstance(await probe.probe(replace(ctx, params={**ctx.params, "max": 2})), Ok)
        await server.answer_requests()


async def test_backend_named_as_an_id_is_not_taken_for_another(tmp_path: Path) -> None:
    """`show stat` takes a number for a name before it takes it for an id; `web` has the id 3."""
    more = "".join(f"backend {number}\n  server n1 127.0.0.1:9 weight 7\n" for number in range(2, 7))
    async with balanced_server(tmp_path, more=more) as server:
        ids = {
            line.split()[0]
            for line in server.balancers["lb1"].command("show servers state web").splitlines()[2:]
            if line
        }
        assert ids <= set("23456"), "the names are ids"
        probe = HaproxyTrafficProbe(server.context)
        ctx = step_context(server.host, server.params, server.clock)
        assert isinstance(await probe.probe(ctx), Ok)
        await server.start_request()
        assert await probe.probe(ctx) == Busy("n1 is busy: 1 session of web/n1 (lb1 1)", count=1)
        other = replace(ctx, params={**ctx.params, "backend": "4"})
        assert isinstance(await probe.probe(other), Ok)
        await server.answer_requests()
