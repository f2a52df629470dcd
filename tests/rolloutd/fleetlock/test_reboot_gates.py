"""When people decide about reboots that machines ask for: the gate of a group, and stopped rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rolloutd.cli.main import main
from rolloutd.control.client import ApiError
from rolloutd.control.identity import ACCOUNT_CACHE_TTL_S, Account
from tests.rolloutd.control_environment import ACCOUNTS, SETTINGS, settings_of
from tests.rolloutd.fleetlock.test_fleetlock import IDS, Machines, machines

WEEK_S = 7 * 86_400.0
GATES: dict[str, Any] = {"groups": {"workers": {"ids": IDS, "owner": "infra", "gate": {"owner": 1}}}}
EACH_TEAM: dict[str, Any] = {"groups": {"workers": {"ids": IDS, "gate": {"each_team": 1}}}}


def body_of(fleet: Machines, for_s: float = WEEK_S, **more: Any) -> dict[str, Any]:
    until = datetime.fromtimestamp(fleet.inside.clock.now() + for_s, UTC)
    return {"reason": "security updates", "until": until.isoformat()} | more


async def approve(fleet: Machines, who: str, for_s: float = WEEK_S) -> Any:
    return await fleet.inside.request(who, "put", "/v1/fleetlock/workers/approval", body_of(fleet, for_s))


async def withdraw(fleet: Machines, who: str) -> Any:
    path = "/v1/fleetlock/workers/approval"
    return await fleet.inside.request(who, "delete", path, {"reason": "enough"})


async def why(fleet: Machines, node: str) -> Any:
    path = f"/v1/fleetlock/workers/nodes/{node}/why"
    return (await fleet.inside.request("olga", "get", path))["reason"]


async def test_gate_is_shut_until_people_approve(tmp_path: Path) -> None:
    async with machines(tmp_path, fleetlock=GATES) as fleet:
        status, refusal = await fleet.lock("p1")
        assert (status, refusal["kind"]) == (423, "gate_closed")
        assert "team infra" in refusal["value"]
        assert (await why(fleet, "p1"))["code"] == "gate-closed"
        assert fleet.holders() == set()
        gate = await approve(fleet, "olga")
        assert (gate["state"], gate["approvals"][0]["by"], gate["missing"]) == ("open", "olga", None)
        assert await why(fleet, "p1") is None
        assert (await fleet.lock("p1"))[0] == 200
        (entry,) = await fleet.inside.state.store.read_audit(event="RebootsApproved")
        assert "security updates" in entry.text
        assert "olga" in entry.text


async def test_gate_shuts_when_approval_ends(tmp_path: Path) -> None:
    async with machines(tmp_path, fleetlock=GATES) as fleet:
        await approve(fleet, "olga")
        fleet.inside.clock.advance(WEEK_S + 1)
        fleet.inside.observe_all_up()
        assert (await fleet.lock("p1"))[1]["kind"] == "gate_closed"
        await approve(fleet, "oscar")
        # The end of the other is recorded by then.
        assert [each.id for each in fleet.inside.state.index.reboot_approvals] == ["workers/oscar"]
        await withdraw(fleet, "oscar")
        assert (await fleet.lock("p1"))[1]["kind"] == "gate_closed"


async def test_machine_with_slot_keeps_it_after_withdrawal(tmp_path: Path) -> None:
    async with machines(tmp_path, fleetlock=GATES) as fleet:
        await approve(fleet, "olga")
        await fleet.lock("p1")
        await withdraw(fleet, "olga")
        # It may be on its way down already.
        assert (await fleet.lock("p1"))[0] == 200
        assert (await fleet.unlock("p1"))[0] == 200


async def test_approval_counts_while_its_person_is_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = {"groups": {"workers": {"ids": IDS, "owner": "infra", "gate": {"owner": 1, "each_team": 1}}}}
    async with machines(tmp_path, fleetlock=gate) as fleet:
        for who in ("olga", "paul", "sara"):
            await approve(fleet, who)
        approved = fleet.inside.state.index.reboot_approvals
        assert (await fleet.lock("p1"))[0] == 200
        # As a reload does: olga is no longer in team infra, and sara's account has no group any more.
        served = fleet.inside.state.settings.fleetlock
        teams = {**SETTINGS["teams"], "infra": {"members": ["oscar"]}}
        changed = settings_of(teams=teams).model_copy(update={"fleetlock": served})
        fleet.inside.state.settings = changed
        monkeypatch.setitem(ACCOUNTS, "sara", replace(ACCOUNTS["sara"], groups=frozenset()))
        fleet.inside.clock.advance(ACCOUNT_CACHE_TTL_S + 1)
        assert (await fleet.lock("s1"))[1]["kind"] == "gate_closed"
        assert fleet.inside.state.index.reboot_approvals == approved
        assert (await fleet.lock("p1"))[0] == 200, "a slot that was taken stays"


async def test_outage_of_name_service_ends_no_approval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machines(tmp_path, fleetlock=GATES) as fleet:
        await approve(fleet, "olga")
        with monkeypatch.context() as outage:
            outage.setitem(ACCOUNTS, "olga", Account(1001, "#1001", frozenset()))
            assert (await fleet.lock("p1"))[1]["kind"] == "gate_closed"
        assert (await why(fleet, "p1"))["code"] == "gate-closed"
        fleet.inside.clock.advance(ACCOUNT_CACHE_TTL_S + 1)
        assert (await fleet.lock("p1"))[0] == 200


async def test_person_who_comes_back_approves_again(tmp_path: Path) -> None:
    async with machines(tmp_path, fleetlock=GATES) as fleet:
        await approve(fleet, "olga")
        state = fleet.inside.state
        before = state.settings
        teams = {**SETTINGS["teams"], "infra": {"members": ["oscar"]}}
        state.settings = settings_of(teams=teams).model_copy(update={"fleetlock": before.fleetlock})
        assert (await fleet.lock("p1"))[1]["kind"] == "gate_closed"
        state.settings = before
        assert (await approve(fleet, "olga"))["state"] == "open"


async def test_person_who_left_one_team_approves_for_other(tmp_path: Path) -> None:
    async with machines(tmp_path, fleetlock=EACH_TEAM) as fleet:
        state = fleet.inside.state
        both = {**SETTINGS["teams"], "search": {"members": ["paul"]}}
        asked = {"fleetlock": state.settings.fleetlock}
        state.settings = settings_of(teams=both).model_copy(update=asked)
        gate = await approve(fleet, "paul")
        assert gate["state"] == "open"
        state.settings = settings_of().model_copy(update=asked)
        assert (await fleet.lock("s1"))[1]["kind"] == "gate_closed"
        assert (await fleet.lock("p1"))[0] == 200


async def test_each_team_approves_its_own_nodes(tmp_path: Path) -> None:
    async with machines(tmp_path, fleetlock=EACH_TEAM) as fleet:
        gate = await approve(fleet, "paul")
        assert gate["state"] == "waiting"
        assert (await fleet.lock("p1"))[0] == 200
        assert (await fleet.lock("s1"))[1]["kind"] == "gate_closed"
        await approve(fleet, "sara")
        assert (await fleet.lock("s1"))[0] == 200


async def test_two_votes_are_two_people(tmp_path: Path) -> None:
    gate = {"groups": {"workers": {"ids": IDS, "owner": "infra", "gate": {"owner": 2}}}}
    async with machines(tmp_path, fleetlock=gate) as fleet:
        await approve(fleet, "olga")
        await approve(fleet, "olga", for_s=60.0)
        assert len(fleet.inside.state.index.reboot_approvals) == 1
        assert (await fleet.lock("p1"))[1]["kind"] == "gate_closed"
        await approve(fleet, "oscar")
        assert (await fleet.lock("p1"))[0] == 200


@pytest.mark.parametrize(
    ("who", "more", "problem"),
    [
        ("paul", {}, "ask a member of infra"),
        ("adam", {}, "ask a member of infra"),
        ("olga", {"for_s": -60.0}, "in the past"),
        ("olga", {"for_s": 91 * 86_400.0}, "more than 90 days away"),
        ("olga", {"reason": " "}, "reason"),
        ("olga", {"reason": "x\x1b[2Jy"}, "reason"),
        ("olga", {"reason": "x" * 100_000}, "reason"),
        ("olga", {"team": "payments"}, "ask a member of infra"),
    ],
)
async def test_approval_is_refused(tmp_path: Path, who: str, more: Any, problem: str) -> None:
    async with machines(tmp_path, fleetlock=GATES) as fleet:
        with pytest.raises(ApiError, match=problem):
            await fleet.inside.request(who, "put", "/v1/fleetlock/workers/approval", body_of(fleet, **more))
        assert fleet.inside.state.index.reboot_approvals == ()


async def test_group_without_gate_takes_no_approval(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        with pytest.raises(ApiError, match="it has no gate"):
            await approve(fleet, "olga")
        with pytest.raises(ApiError, match="no such group"):
            await fleet.inside.request("olga", "put", "/v1/fleetlock/x/approval", body_of(fleet))


async def test_approval_survives_restart(tmp_path: Path) -> None:
    async with machines(tmp_path, fleetlock=GATES) as fleet:
        await approve(fleet, "olga")
        await fleet.inside.restart()
        assert (await fleet.lock("p1"))[0] == 200


# -- rollouts ------------------------------------------------------------------------


async def test_gate_of_rollout_holds_no_reboot(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        await fleet.inside.submit()
        assert (await fleet.lock("p1"))[0] == 200


async def test_paused_rollout_holds_reboots_until_resumed(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        rollout = await fleet.inside.start()
        path, reason = f"/v1/rollouts/{rollout}", {"reason": "wait"}
        await fleet.inside.request("olga", "post", f"{path}/pause", reason)
        status, refusal = await fleet.lock("p1")
        assert (status, refusal["kind"]) == (423, "rollout_stopped")
        assert rollout in refusal["value"]
        await fleet.inside.request("olga", "post", f"{path}/resume", reason)
        assert (await fleet.lock("p1"))[0] == 200


async def test_failed_rollout_holds_reboots_of_its_nodes(tmp_path: Path) -> None:
    async with machines(tmp_path, pools={"team": {"max_unavailable": 2}}) as fleet:
        rollout = await fleet.inside.start()
        await fleet.inside.finish(rollout, "s1")
        await fleet.inside.fail(rollout, "p1")
        fleet.inside.observe_all_up()
        for node in ("p1", "p2"):
            assert (await fleet.lock(node))[1]["kind"] == "rollout_stopped"
        # A node that is done is none of the rollout's any more.
        assert (await fleet.lock("s1"))[0] == 200


async def test_closed_rollout_holds_no_reboot(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        rollout = await fleet.inside.start()
        path, reason = f"/v1/rollouts/{rollout}", {"reason": "wait"}
        await fleet.inside.request("olga", "post", f"{path}/pause", reason)
        await fleet.inside.request("olga", "post", f"{path}/cancel", reason)
        assert (await fleet.lock("p1"))[0] == 200


# -- what people read ----------------------------------------------------------------


async def test_command_line_shows_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with machines(tmp_path, fleetlock=GATES) as fleet:
        socket = str(fleet.inside.client.path)

        async def run(*words: str) -> tuple[int, str]:
            code = await asyncio.to_thread(main, ["--socket", socket, *words])
            return code, capsys.readouterr().out

        assert "reboots waiting: the vote of the owner, team infra" in (await run("gates"))[1]
        until = body_of(fleet)["until"]
        code, shown = await run("approve", "fleetlock/workers", "--until", until, "--reason", "patches")
        assert code == 0
        assert "yes by olga for infra" in shown
        for command in (["gates", "fleetlock/workers"], ["locks"], ["why", "fleetlock/workers"]):
            assert "yes by olga for infra" in (await run(*command))[1]
        assert (await run("why", "fleetlock/workers", "p1"))[1] == "p1 may reboot itself\n"
        code, shown = await run("withdraw", "fleetlock/workers", "--reason", "enough")
        assert code == 0
        assert "reboots waiting" in shown
        assert "gate-closed" in (await run("why", "fleetlock/workers", "p1"))[1]
        assert (await run("approve", "fleetlock/workers", "--reason", "x"))[0] == 2


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({"gate": {}}, "requires no vote"),
        ({"gate": {"owner": 1}}, "there is none"),
        ({"gate": {"owner": 1}, "owner": "nobody"}, "no such team"),
        ({"gate": {"owner": 21}, "owner": "infra"}, "20"),
    ],
)
def test_gate_that_cannot_open_is_refused(group: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings_of(fleetlock={"listen": "127.0.0.1:9478", "groups": {"workers": group}})
