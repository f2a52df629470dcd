"""The FleetLock server over a real port: the protocol, the rules of a slot, and what a machine cannot get."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from machines.model.node import Node, NodeHealth, Observation
from rolloutd.control.identity import Account, CachedNameService
from rolloutd.fleetlock.machine_ids import client_id
from rolloutd.fleetlock.server import FleetLockServer, serve_fleetlock
from tests.rolloutd.control_environment import ACCOUNTS, NODES, ControlEnvironment, control_environment
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
HEADERS = {"fleet-lock-protocol": "true"}
IDS = {f"id-{node.name}": node.name for node in NODES}
MACHINE_ID = "00112233445566778899aabbccddeeff"


@dataclass
class Machines:
    """Clients of the server, by the public description of the protocol."""

    inside: ControlEnvironment
    session: aiohttp.ClientSession
    base: str
    seen_down: set[str]

    async def call(self, call: str, machine_id: str, group: str = "workers") -> tuple[int, Any]:
        body = json.dumps({"client_params": {"id": machine_id, "group": group}}).encode()
        return await self.send(call, body)

    async def send(
        self, path: str, body: bytes, headers: dict[str, str] = HEADERS, method: str = "POST"
    ) -> tuple[int, Any]:
        url = path if path.startswith("http") else f"{self.base}/v1/{path}"
        # As Zincati: without a content type.
        async with self.session.request(
            method, url, data=body, headers=headers, skip_auto_headers=["Content-Type"]
        ) as response:
            return response.status, json.loads(await response.read())

    async def lock(self, node: str) -> tuple[int, Any]:
        return await self.call("pre-reboot", f"id-{node}")

    async def unlock(self, node: str) -> tuple[int, Any]:
        return await self.call("steady-state", f"id-{node}")

    def holders(self) -> set[str]:
        return {hold.node for hold in self.inside.state.index.holds}


@asynccontextmanager
async def machines(
    tmp_path: Path, *, nodes: Sequence[Node] = NODES, fleetlock: dict[str, Any] | None = None, **changed: Any
) -> AsyncIterator[Machines]:
    address = f"127.0.0.1:{free_port()}"
    settings = {"listen": address, "groups": {"workers": {"ids": IDS}}} | (fleetlock or {})
    async with control_environment(tmp_path, nodes=nodes, fleetlock=settings, **changed) as inside:
        inside.observe_all_up()
        seen_down: set[str] = set()

        async def observe(asked: Sequence[str]) -> None:
            now = inside.clock.now()
            health = {name: NodeHealth.DOWN if name in seen_down else NodeHealth.UP for name in asked}
            inside.state.index.record_observations([Observation(*each, now) for each in health.items()], now)

        served = inside.state.settings.fleetlock
        assert served is not None

        def look_up(uid: int) -> Account:
            return next(each for each in ACCOUNTS.values() if each.uid == uid)

        accounts = CachedNameService(inside.state.now, look_up)
        async with (
            serve_fleetlock(FleetLockServer(inside.state, observe, accounts), served),
            aiohttp.ClientSession() as session,
        ):
            yield Machines(inside, session, f"http://{address}", seen_down)


async def test_slot_is_taken_once_and_given_back(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        assert await fleet.lock("p1") == (200, {})
        # Recursive: a machine with users logged in asks each minute.
        assert (await fleet.lock("p1"))[0] == 200
        assert fleet.holders() == {"p1"}
        status, refusal = await fleet.lock("p2")
        assert (status, refusal["kind"]) == (423, "lock_held")
        assert "p1" in refusal["value"]
        assert (await fleet.unlock("p1"))[0] == 200
        assert (await fleet.lock("p2"))[0] == 200
        entries = await fleet.inside.request("olga", "get", "/v1/locks")
        assert [each["source"] for each in entries["holds"]] == ["fleetlock"]


async def test_release_without_lock_succeeds(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        assert (await fleet.unlock("p1"))[0] == 200
        assert (await fleet.call("steady-state", "stranger", "elsewhere"))[0] == 200
        await fleet.lock("p1")
        assert (await fleet.unlock("p2"))[0] == 200
        assert fleet.holders() == {"p1"}


async def test_slot_stays_until_node_is_seen_up(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        await fleet.lock("p1")
        fleet.seen_down.add("p1")
        status, refusal = await fleet.unlock("p1")
        assert (status, refusal["kind"]) == (423, "not_back")
        assert fleet.holders() == {"p1"}
        fleet.seen_down.clear()
        assert (await fleet.unlock("p1"))[0] == 200
        assert fleet.holders() == set()


async def test_unobserved_peers_are_observed_first(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        fleet.inside.clock.advance(3600)
        assert (await fleet.lock("p1"))[0] == 200
        fleet.inside.clock.advance(3600)
        fleet.seen_down.add("s2")
        status, refusal = await fleet.lock("s1")
        assert (status, refusal["kind"]) == (423, "lock_held")


@pytest.mark.parametrize(
    ("scope", "node"), [("all", "p1"), ("team/payments", "p1"), ("node/p1", "p1"), ("rack/r1", "p1")]
)
async def test_freeze_refuses_machine(tmp_path: Path, scope: str, node: str) -> None:
    async with machines(tmp_path) as fleet:
        await fleet.inside.request("adam", "post", "/v1/freezes", {"scope": scope, "reason": "sale"})
        status, refusal = await fleet.lock(node)
        assert (status, refusal["kind"]) == (423, "frozen")
        assert "sale" in refusal["value"]
        assert fleet.holders() == set()


async def test_closed_window_of_team_refuses_machine(tmp_path: Path) -> None:
    window = {"days": "mon-sun", "from": "00:00", "to": "00:01", "zone": "UTC"}
    teams = {"payments": {"members": ["paul"], "windows": [window]}}
    async with machines(tmp_path, teams=teams) as fleet:
        fleet.inside.clock.advance(120 + (-fleet.inside.clock.now()) % 86_400)
        fleet.inside.observe_all_up()
        status, refusal = await fleet.lock("p1")
        assert (status, refusal["kind"]) == (423, "outside_window")


async def test_observing_daemon_grants_nothing(tmp_path: Path) -> None:
    async with machines(tmp_path, observe_only=True) as fleet:
        assert (await fleet.lock("p1"))[0] == 423
        assert fleet.holders() == set()


async def test_rollout_and_machines_share_budget(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        rollout = await fleet.inside.start()
        await fleet.inside.isolate(rollout, "p1")
        fleet.inside.observe_all_up()
        assert (await fleet.lock("p2"))[1]["kind"] == "lock_held"
        status, refusal = await fleet.lock("p1")
        assert (status, refusal["kind"]) == (423, "node_in_use")
        assert rollout in refusal["value"]


async def test_machine_is_no_hold_of_person(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        hold = {"node": "p1", "reason": "disk"}
        await fleet.inside.request("paul", "put", "/v1/holds", hold)
        assert (await fleet.lock("p1"))[1]["kind"] == "node_in_use"
        with pytest.raises(Exception, match="reserved for machines"):
            await fleet.inside.request("paul", "put", "/v1/holds", hold | {"source": "fleetlock", "id": "x"})


@pytest.mark.parametrize(("is_locked", "status"), [(False, 200), (True, 423)])
async def test_own_drain_is_no_obstacle_foreign_lock_is(tmp_path: Path, is_locked: bool, status: int) -> None:
    async with machines(tmp_path) as fleet:
        # A machine may cordon itself before it asks; kured's lock says that kured reboots it.
        taken = Observation("p1", NodeHealth.UP, fleet.inside.clock.now(), "x", cordoned_by_other=True)
        seen = replace(taken, is_locked=is_locked)
        fleet.inside.state.index.record_observations([seen], fleet.inside.clock.now())
        answered, refusal = await fleet.lock("p1")
        assert (answered, refusal.get("kind")) == (status, "node_in_use" if is_locked else None)
        assert (await fleet.lock("p2"))[1]["kind"] == "lock_held"


async def test_team_releases_machine_that_stays_away(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        await fleet.lock("p1")
        release = {"node": "p1", "source": "fleetlock", "id": "workers/id-p1"}
        with pytest.raises(Exception, match="may not release"):
            await fleet.inside.request("sara", "delete", "/v1/holds", release)
        await fleet.inside.request("paul", "delete", "/v1/holds", release)
        assert fleet.holders() == set()


async def test_slot_ends_by_rule_of_team(tmp_path: Path) -> None:
    teams = {"payments": {"members": ["paul"], "reboot_within": "30m"}, "search": {"members": ["sara"]}}
    async with machines(tmp_path, teams=teams) as fleet:
        await fleet.lock("p1")
        await fleet.lock("s1")
        ends = {hold.node: hold.until for hold in fleet.inside.state.index.holds}
        assert ends == {"p1": fleet.inside.clock.now() + 1800, "s1": None}
        fleet.inside.clock.advance(1801)
        fleet.inside.observe_all_up()
        assert (await fleet.lock("p2"))[0] == 200


async def test_all_at_once_get_no_more_than_budget(tmp_path: Path) -> None:
    fleet_of = [replace(NODES[0], name=f"n{number}", labels={"team": "payments"}) for number in range(200)]
    settings = {"groups": {"workers": {"ids": {f"id-{node.name}": node.name for node in fleet_of}}}}
    async with machines(
        tmp_path, nodes=fleet_of, fleetlock=settings, pools={"team": {"max_unavailable": 3}}
    ) as fleet:
        answers = await asyncio.gather(*(fleet.lock(node.name) for node in fleet_of))
        assert sorted({status for status, _ in answers}) == [200, 423]
        assert sum(status == 200 for status, _ in answers) == 3
        assert len(fleet.holders()) == 3


def test_client_id_is_that_of_systemd() -> None:
    # systemd-id128 machine-id --app-specific=de35106b6ec24688b63afddaa156679b
    assert client_id(MACHINE_ID) == "eee0097b460c4b2dbf94510d0330626c"
    assert client_id("not hexadecimal") is client_id("00") is client_id("") is None


async def test_machine_is_found_by_pinned_machine_id(tmp_path: Path) -> None:
    pinned = [replace(NODES[0], identity={"machine_id": MACHINE_ID}), *NODES[1:]]
    async with machines(tmp_path, nodes=pinned) as fleet:
        made = client_id(MACHINE_ID)
        assert made is not None
        assert (await fleet.call("pre-reboot", made))[0] == 200
        assert fleet.holders() == {"p1"}
        assert (await fleet.call("steady-state", made))[0] == 200


async def test_shared_machine_id_names_no_node(tmp_path: Path) -> None:
    clones = [replace(node, identity={"machine_id": MACHINE_ID}) for node in NODES[:2]]
    async with machines(tmp_path, nodes=clones) as fleet:
        status, refusal = await fleet.call("pre-reboot", client_id(MACHINE_ID) or "")
        assert (status, refusal["kind"]) == (404, "unknown_node")
        assert "2 nodes" in refusal["value"]


async def test_group_has_only_its_nodes(tmp_path: Path) -> None:
    settings = {"groups": {"workers": {"ids": IDS, "nodes": "team=search"}}}
    async with machines(tmp_path, fleetlock=settings) as fleet:
        assert (await fleet.lock("p1"))[1]["kind"] == "unknown_node"
        assert (await fleet.call("pre-reboot", "id-p1", "unheard-of"))[1]["kind"] == "unknown_group"
        assert (await fleet.lock("s1"))[0] == 200


BODY = json.dumps({"client_params": {"id": "id-p1", "group": "workers"}}).encode()


@pytest.mark.parametrize(
    ("path", "body", "headers", "method", "status"),
    [
        ("pre-reboot", BODY, {}, "POST", 400),
        ("pre-reboot", BODY, {"fleet-lock-protocol": "yes"}, "POST", 400),
        ("pre-reboot", b"", HEADERS, "POST", 400),
        ("pre-reboot", b"{}", HEADERS, "POST", 400),
        ("pre-reboot", b"\xff\x00", HEADERS, "POST", 400),
        ("pre-reboot", b'{"client_params": {"id": "", "group": "workers"}}', HEADERS, "POST", 400),
        ("pre-reboot", b'{"client_params": {"id": 7, "group": "workers"}}', HEADERS, "POST", 400),
        ("pre-reboot", b'{"client_params": {"id": "a", "group": "a b"}}', HEADERS, "POST", 400),
        ("pre-reboot", b'{"client_params": {"id": "a", "group": "a\\n"}}', HEADERS, "POST", 400),
        ("pre-reboot", b"[" * 4000, HEADERS, "POST", 400),
        ("pre-reboot", b"x" * 5000, HEADERS, "POST", 413),
        ("pre-reboot", BODY, HEADERS, "PUT", 405),
        ("renew", BODY, HEADERS, "POST", 404),
    ],
)
async def test_malformed_request_is_refused(
    tmp_path: Path, path: str, body: bytes, headers: dict[str, str], method: str, status: int
) -> None:
    async with machines(tmp_path) as fleet:
        answered, refusal = await fleet.send(path, body, headers, method)
        assert answered == status
        assert set(refusal) == {"kind", "value"}
        assert fleet.holders() == set()


async def test_prefix_and_double_slash_are_accepted(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        for path in ("//v1/pre-reboot", "/base/v1/pre-reboot"):
            assert (await fleet.send(fleet.base + path, BODY))[0] == 200


async def test_raw_garbage_ends_nothing(tmp_path: Path) -> None:
    async with machines(tmp_path) as fleet:
        host, _, port = fleet.base.removeprefix("http://").partition(":")
        random_bytes = random.Random(36)
        for _ in range(1000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(random_bytes.randbytes(random_bytes.randrange(200)) + b"\r\n\r\n")
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await fleet.lock("p1"))[0] == 200


async def test_documented_request_takes_slot(tmp_path: Path) -> None:
    [line] = re.findall(r"^\$ (curl .*)$", (ROOT / "docs/fleetlock.md").read_text(), re.MULTILINE)
    async with machines(tmp_path, fleetlock={"groups": {"workers": {"ids": {"a0b1c2d3": "p1"}}}}) as fleet:
        words = shlex.split(line.replace("https://rolloutd.example:9478", fleet.base))
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True)
        assert (done.stdout, fleet.holders()) == ("{}", {"p1"})


async def test_machine_proves_itself_by_certificate(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    tls = {"cert": str(certificates / "server.pem"), "key": str(certificates / "server.key")}
    tls["client_ca"] = str(certificates / "ca.pem")
    async with machines(tmp_path, fleetlock={"tls": tls}) as fleet:
        url = fleet.base.replace("http:", "https:") + "/v1/pre-reboot"
        command = ("curl", "-sS", "--cacert", certificates / "ca.pem", "-H", "fleet-lock-protocol: true")
        own = ("--cert", certificates / "client.pem", "--key", certificates / "client.key")

        def ask(*more: str | Path) -> str:
            words = (*command, *more, "-d", BODY.decode(), "-w", "%{http_code}", url)
            return subprocess.run([*map(str, words)], capture_output=True, text=True).stdout

        assert (await asyncio.to_thread(ask)).endswith("000")
        assert fleet.holders() == set()
        assert (await asyncio.to_thread(ask, *own)).endswith("200")


def make_certificates(directory: Path) -> Path:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA")
    signed = ("-x509", "-CA", "ca.pem", "-CAkey", "ca.key")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        out = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
        openssl("req", *new, *signed, *names, *out)
    return directory
