"""Fuzz targets: one for each border at which the daemon reads what others wrote.

A target is seeds, a way to change them, and a consumer.  The consumer returns when the input was taken or
refused in words; everything else that it raises is a find.  To add one, write a consumer and a line in
TARGETS; a find becomes a file in corpus/NAME.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import random
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rolloutd import planfile
from rolloutd import settings as settings_files
from rolloutd.adapters.ansible.inventory import AnsibleInventory
from rolloutd.adapters.ansible.progress import Progress, evaluate_run, to_run_event
from rolloutd.adapters.ansible.run_directory import RunDirectory, RunStatus
from rolloutd.adapters.prometheus.query import QueryFailed, _read_number
from rolloutd.adapters.sources.upload import read_archive, write_entries
from rolloutd.adapters.ssh.check import find_mismatch
from rolloutd.adapters.ssh.connections_probe import UnreadableOutput, read_connections
from rolloutd.audit.audit_chain import canonical_json
from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.engine.background.inventory_merge import merge_inventories
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.files.source_archive import require_links_inside
from rolloutd.ports import ShellResult
from rolloutd.service.reload import SettingsReloader, TeamPlanCompiler
from rolloutd.settings.compile import compile_plan
from tests.fuzz.engine import Consumer, encoded, mutate_bytes, mutate_values, mutate_yaml
from tests.fuzz.host_key_sources import HOST_KEY_SOURCES, read_second_sources
from tests.fuzz.inventory_values import VALUES, inventory_values
from tests.fuzz.kubernetes_answers import KUBERNETES, kubernetes
from tests.fuzz.netbox_answers import (
    NETBOX_MESSAGES,
    NETBOX_PAGES,
    read_netbox_message,
    read_netbox_page,
)
from tests.fuzz.preparation_answers import (
    FACTS,
    SNAPSHOTS,
    read_fact,
    read_snapshot,
)
from tests.fuzz.web_answers import HAPROXY, HTTP, haproxy, http_check
from tests.rolloutd.control_environment import ACCOUNTS, PLAN, ControlEnvironment, control_environment

Mutate = Callable[[random.Random, Sequence[bytes]], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """One border; `open` prepares its consumer in a directory."""

    seeds: Sequence[bytes]
    open: Callable[[Path], AbstractAsyncContextManager[Consumer]]
    mutate: Mutate = mutate_bytes


def simple(consume: Callable[[bytes, Path], None]) -> Callable[[Path], AbstractAsyncContextManager[Consumer]]:
    """Return the `open` of a consumer that only needs a directory."""

    @asynccontextmanager
    async def opened(directory: Path) -> AsyncIterator[Consumer]:
        async def consumer(data: bytes) -> None:
            consume(data, directory)

        yield consumer

    return opened


# -- files --------------------------------------------------------------------

RICH_PLAN = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {name: sysctl, owner: infra, ticket: CHG-1, description: more}
spec:
  source: {git: "https://git.example/infra/playbooks.git", ref: v1.4.2}
  targets: "role=worker,site in (ams,fra),!old"
  enrol: ask
  max_parallel: 8
  canary: {select: "canary=true", max_parallel: 1}
  soak: 2h
  windows: [{days: mon-fri, from: "09:00", to: "16:00", zone: Europe/Amsterdam}]
  traffic:
    - ssh: {established: [443, "{{ node.labels.port }}"], max: 0}
  isolate:
    - kubernetes: {drain_timeout: 15m}
    - playbook: {file: isolate.yml, undo: deisolate.yml}
  maintain: {playbook: sysctl.yml, vars: {somaxconn: 65535}, timeout: 30m, expected: 10m, on_unknown: verify}
  rollback: {playbook: sysctl-undo.yml, timeout: 30m}
  verify:
    - reachable: {within: 5m}
    - ssh: {run: "sysctl -n {{ node.name }}", matches: "^6[0-9]+$", in_service: true}
  probation: 2m
  gates: {start: {owner: 1}, continue: {owner: 1, each_team: 1}, proceed: {owner: 1}}
"""

SETTINGS = b"""\
state_dir: /var/lib/rolloutd
socket: /run/rolloutd/control.sock
observe_only: true
inventory:
  - ansible: {path: hosts.yml, labels: [team, rack]}
pools:
  team: {max_unavailable: 25%}
  rack: {max_unavailable: 1, values: {r12: {max_unavailable: 2}}}
teams:
  infra: {members: [root, "@ops"], verify: [{ssh: {run: /bin/true}}], windows: [], canaries: [n1]}
admins: [root, "@wheel"]
ssh: {known_hosts: known_hosts, user: ops, key_file: id}
ansible: {parallel: 16, fence_dir: /var/lib/rolloutd-fence}
keep: {runs: 90d}
service_accounts: {jira: {key_file: jira.key, teams: [infra]}}
"""


def read_plan(data: bytes, _: Path) -> None:
    with contextlib.suppress(InvalidFile):
        plan = planfile.read(data, "plan.yaml")
        compile_plan(plan.content, teams={})


@asynccontextmanager
async def reloaded_settings(directory: Path) -> AsyncIterator[Consumer]:
    """Read a file as `--check` does, then reload it into a daemon."""
    path = directory / "config.yaml"
    async with control_environment(directory) as inside:
        state = inside.state
        reloader = SettingsReloader(state, TeamPlanCompiler(state.settings.teams), lambda: None)

        async def consumer(data: bytes) -> None:
            path.write_bytes(data)
            with contextlib.suppress(InvalidFile):
                settings_files.load(path)
            state.settings._files = (path,)
            await reloader.reload()

        log = logging.getLogger("rolloutd.service.reload")
        log.addFilter(has_traceback)
        try:
            yield consumer
        finally:
            log.removeFilter(has_traceback)


def has_traceback(record: logging.LogRecord) -> bool:
    """Return whether a log entry is a find: ten thousand inputs fill CI's log with expected mistakes."""
    return record.exc_info is not None


def read_upload(data: bytes, directory: Path) -> None:
    tree = Path(tempfile.mkdtemp(dir=directory))
    try:
        with contextlib.suppress(RolloutdError):
            write_entries(read_archive(data), tree)
            require_links_inside(tree)
    finally:
        shutil.rmtree(tree)


def archives() -> Iterator[bytes]:
    """Yield archives of each format, with files, directories and links."""
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        for mode in ("w", "w:gz"):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode=mode, format=form) as tar:  # type: ignore[call-overload]
                for name in ("site.yml", "roles/a/tasks/main.yml"):
                    member = tarfile.TarInfo(name)
                    member.size = 4
                    tar.addfile(member, io.BytesIO(b"---\n"))
                link = tarfile.TarInfo("roles/b")
                link.type, link.linkname = tarfile.SYMTYPE, "a"
                tar.addfile(link)
            yield packed.getvalue()


def mutate_archive(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Edit an archive's bytes, or its members, whose headers are then right."""
    if dice.random() < 0.5:
        return mutate_bytes(dice, seeds)
    names = (
        "a",
        "a/b",
        "../a",
        "/a",
        "a/../b",
        ".",
        "",
        "é" * 200,
        "x" * 300,
        "a\x00b",
        "\udcff",
        "a\nb",
        "x/" * 1500,
    )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=dice.randrange(3)) as tar:
        for _ in range(dice.randint(1, 5)):
            member = tarfile.TarInfo(dice.choice(names))
            member.type = dice.choice(
                (b"0", b"0", b"1", b"2", b"2", b"3", b"5", b"6", b"7", b"S", b"x", b"\x00")
            )
            member.linkname = dice.choice((*names, "/etc/passwd", "..", "./a", "x" * 5000))
            member.size = dice.choice((0, 4)) if member.type == b"0" else 0
            member.mode = dice.choice((0, 0o755, 0o7777))
            with contextlib.suppress(ValueError, UnicodeError):
                tar.addfile(member, io.BytesIO(b"---\n"))
    return packed.getvalue()


# -- answers of other systems ---------------------------------------------------

INVENTORY = encoded(
    {
        "_meta": {
            "hostvars": {
                "n1": {
                    "ansible_host": "10.0.0.1",
                    "ansible_port": 22,
                    "team": "infra",
                    "ansible_password": "x",
                },
                "n2": {
                    "team": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256"},
                    "rack": True,
                    "provider_id": "a/i-1",
                },
            }
        },
        "all": {"children": ["web", "ungrouped"]},
        "web": {"hosts": ["n1", "n2"], "children": ["db"]},
        "db": {"hosts": ["n2", "n3"]},
    },
)


def read_inventory(data: bytes, directory: Path) -> None:
    inventory = AnsibleInventory(directory / "hosts.yml", ["team", "rack"])
    with contextlib.suppress(RolloutdError):
        found = inventory.parse_nodes(data)
        merged = merge_inventories([*found, *found])
        for connection in merged.connections.values():
            canonical_json(storable_variables(connection)).encode()
        for node in merged.nodes.values():
            canonical_json(node.labels).encode()


def as_lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


EVENTS = (
    as_lines(
        {"at": 1.5, "kind": "playbook", "text": "site.yml"},
        {"at": 2, "kind": "task", "task": "begin", "done": 1, "todo": 4},
        {"at": 3, "kind": "changed", "host": "n1", "task": "begin", "text": "ok", "seconds": 0.1},
        {"at": 4, "kind": "failed", "host": "n1", "task": "end", "text": "non-zero return code", "on": "n2"},
        {"at": 5, "kind": "stats", "stats": {"n1": {"ok": 1, "changed": 1, "failures": 1, "unreachable": 0}}},
    ),
)


def mutate_lines(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Edit the values of some lines of JSON, or the bytes."""
    if dice.random() < 0.3:
        return mutate_bytes(dice, seeds)
    lines = dice.choice(seeds).splitlines()
    edited = [mutate_values(dice, [line]) if dice.random() < 0.4 else line for line in lines]
    return b"\n".join(edited) + b"\n"


def read_events(data: bytes, directory: Path) -> None:
    run = RunDirectory(directory)
    run.events_file.write_bytes(data)
    progress, offset = Progress("n1"), 0
    while lines := run.read_events(offset):
        for line in lines:
            progress = progress.apply_event(line.event)
            to_run_event(line)
        offset = lines[-1].offset
    for code in (0, 2, -9):
        evaluate_run(progress, RunStatus("exit", code, 1.0, 1.0, 0), "site.yml", 60.0, run.read_output_tail())


SSH_OUTPUT = (
    b"own 10.0.0.9 5000 10.0.0.1 22\n0 0 10.0.0.1:443 10.0.0.7:51\n0 0 [::1]:443 [fe80::1%eth0]:51\nend 0\n",
    b"65535\n",
    b"clear 4711 4712\n",
    b"unseen 12 13\nroot 12 1 sleep\n",
)


def read_ssh_output(data: bytes, _: Path) -> None:
    text = data.decode(errors="replace")
    with contextlib.suppress(UnreadableOutput):
        read_connections(text)
    for status in (0, 1, 127):
        result = ShellResult(status, text, text)
        for params in ({"equals": 65535}, {"matches": "^6[0-9]+$"}, {"exit": 0}, {}):
            find_mismatch(result, params)


PROMETHEUS = encoded(
    {
        "status": "success",
        "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1.5, "0.25"]}]},
    },
    {"status": "success", "data": {"resultType": "scalar", "result": [1.5, "NaN"]}},
    {"status": "error", "errorType": "bad_data", "error": "parse error"},
)


def read_prometheus(data: bytes, _: Path) -> None:
    with contextlib.suppress(QueryFailed, RecursionError, ValueError):
        _read_number(data)


# -- the socket -----------------------------------------------------------------

BODY = json.dumps({"gate": "start", "yes": True, "reason": "because"}).encode()


def raw(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join((f"{line} HTTP/1.1", "Host: x", *headers, "", "")).encode() + body


RAW_REQUESTS = (
    raw("GET /v1/status"),
    raw("GET /v1/rollouts/R/nodes?limit=1", "Connection: close"),
    raw(
        "POST /v1/rollouts/R/votes",
        "Content-Type: application/json",
        f"Content-Length: {len(BODY)}",
        body=BODY,
    ),
    raw("POST /v1/plans/validate", "Transfer-Encoding: chunked", body=b"5\r\nabcde\r\n0\r\n\r\n"),
    raw(
        "POST /v1/uploads",
        "Content-Type: application/x-tar",
        "Content-Encoding: gzip",
        "Content-Length: 3",
        "Expect: 100-continue",
        body=b"abc",
    ),
    raw("GET /v1/audit", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: x"),
)


def asked(method: str, path: str, body: Any = None) -> Any:
    return {"method": method, "path": path, "body": body}


REASON = {"reason": "because"}

REQUESTS = encoded(
    *(
        asked("GET", f"/v1/{path}")
        for path in ("status", "rollouts", "locks", "inventory", "audit", "teams/infra")
    ),
    *(
        asked("GET", f"/v1/rollouts/R{path}")
        for path in ("", "/nodes", "/nodes/p1", "/nodes/p1/why", "/plan")
    ),
    asked("GET", "/v1/audit?after=0&limit=5&rollout=R&kind=VoteCast"),
    asked("GET", "/v1/audit?before=9&limit=5&kind=PhaseMoved"),
    asked(
        "POST", "/v1/rollouts/R/votes", {"gate": "start", "yes": True, **REASON, "more": 1, "nodes": ["p1"]}
    ),
    asked("POST", "/v1/rollouts/R/withdraw", {"gate": "start", **REASON}),
    asked("POST", "/v1/rollouts/R/votes/token", {"token": "aaa.bbb.ccc"}),
    *(asked("POST", f"/v1/rollouts/R/{order}", REASON) for order in ("pause", "resume", "retry")),
    *(
        asked("POST", f"/v1/rollouts/R/nodes/p1/{order}", REASON)
        for order in ("advance", "retry", "rollback")
    ),
    asked("POST", "/v1/rollouts/R/nodes/p1/skip", {**REASON, "put_back": "leave"}),
    asked("POST", "/v1/nodes/p1/return", REASON),
    asked("POST", "/v1/rollouts/R/drift", {}),
    asked("PUT", "/v1/holds", {"node": "p1", "id": "x", "until": "2030-01-01T00:00:00Z", **REASON}),
    asked("DELETE", "/v1/holds", {"node": "p1"}),
    asked("POST", "/v1/freezes", {"scope": "team/infra", **REASON}),
    asked("DELETE", "/v1/freezes", {"scope": "team/infra"}),
    asked(
        "PUT",
        "/v1/teams/infra",
        {"canaries": ["p1"], "windows": [{"days": "mon-fri", "zone": "UTC"}], **REASON},
    ),
    asked("POST", "/v1/plans/validate", {"file": "plan.yaml", "text": PLAN}),
    asked("POST", "/v1/plans/preview", {"file": "plan.yaml", "text": PLAN}),
    asked("POST", "/v1/plans/impact", {"file": "plan.yaml", "text": PLAN}),
    asked("POST", "/v1/plans/submit", {"file": "plan.yaml", "text": PLAN}),
)


def choose_user(inside: ControlEnvironment, data: bytes) -> None:
    inside.name_service.current = list(ACCOUNTS.values())[zlib.crc32(data) % len(ACCOUNTS)]


@asynccontextmanager
async def http(directory: Path) -> AsyncIterator[Consumer]:
    """Serve the API, with one rollout that R stands for."""
    async with control_environment(directory) as inside:
        rollout = await inside.start()
        connector = aiohttp.UnixConnector(path=str(directory / "run" / "control.sock"))
        async with aiohttp.ClientSession(connector=connector) as session:

            async def consumer(data: bytes) -> None:
                choose_user(inside, data)
                try:
                    found = json.loads(data)
                    method, path = str(found["method"]), str(found["path"])
                    body = json.dumps(found.get("body")).encode()
                    path = "/" + path.replace("/R", f"/{rollout}", 1).lstrip("/").replace("follow=true", "")
                    request = session.request(method, f"http://x{path}", data=body)
                    async with request as response:
                        said = await response.read()
                except (ValueError, RecursionError, KeyError, TypeError, AttributeError, aiohttp.ClientError):
                    return  # aiohttp's client does not send what is not HTTP: the target `socket` does
                assert response.status < 500, said

            yield consumer


@asynccontextmanager
async def raw_socket(directory: Path) -> AsyncIterator[Consumer]:
    async with control_environment(directory) as inside:
        await inside.start()

        async def consumer(data: bytes) -> None:
            choose_user(inside, data)
            reader, writer = await asyncio.open_unix_connection(directory / "run" / "control.sock")
            try:
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    writer.write_eof()
                    async with asyncio.timeout(60):
                        said = await reader.read()
                        for line in said.split(b"\r\n"):
                            assert not line.startswith(b"HTTP/1.1 5"), said
            finally:
                writer.close()

        yield consumer


TARGETS: dict[str, Target] = {
    "plan": Target((PLAN.encode(), RICH_PLAN.encode()), simple(read_plan), mutate_yaml),
    "settings": Target((SETTINGS,), reloaded_settings, mutate_yaml),
    "inventory": Target(INVENTORY, simple(read_inventory), mutate_values),
    "inventory-values": Target(VALUES, inventory_values, mutate_values),
    "http": Target(REQUESTS, http, mutate_values),
    "socket": Target(RAW_REQUESTS, raw_socket),
    "upload": Target(tuple(archives()), simple(read_upload), mutate_archive),
    "events": Target(EVENTS, simple(read_events), mutate_lines),
    "ssh": Target(SSH_OUTPUT, simple(read_ssh_output)),
    "kubernetes": Target(KUBERNETES, kubernetes, mutate_values),
    "haproxy": Target(HAPROXY, haproxy),
    "http-check": Target(HTTP, http_check),
    "prometheus": Target(PROMETHEUS, simple(read_prometheus), mutate_values),
    "netbox": Target(NETBOX_PAGES, simple(read_netbox_page), mutate_values),
    "netbox-webhook": Target(NETBOX_MESSAGES, simple(read_netbox_message), mutate_values),
    "fact": Target(FACTS, simple(read_fact), mutate_values),
    "snapshot": Target(SNAPSHOTS, simple(read_snapshot)),
    "host-keys": Target(HOST_KEY_SOURCES, simple(read_second_sources)),
}
