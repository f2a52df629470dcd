"""Every call in every role: real users over the real socket, against the table in docs/api.md.

The rows come from the routes that the daemon serves, the expectation from the
document: a route without a row fails, and so does a row that is not true.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import GateOpened, VerdictRecorded
from machines.model.node import Node, NodeHealth, Observation
from machines.model.plan import GateName
from machines.model.rollout import Verdict
from machines.states import Phase
from rolloutd.commands import tokens
from rolloutd.control.identity import CachedNameService
from rolloutd.control.route_table import ROUTES
from tests.docs.reference_tables import ROLES, ROLES_BEGIN, ROLES_END, render_roles
from tests.rolloutd.control.test_routes import BUILDING, archive, fail_build
from tests.rolloutd.control_environment import NODES, PLAN, REBOOTS, ControlEnvironment, control_environment
from tests.support.replayed_fleet import forecast_of
from tests.support.unix_users import UnixUser, can_create_users, temporary_users

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"
REASON = {"reason": "because"}
SECRET = b"0123456789abcdef0123456789abcdef"
Key = tuple[str, str]

pytestmark = pytest.mark.skipif(not can_create_users(), reason="needs root and useradd: real users are made")


def documented() -> dict[Key, dict[str, str]]:
    """Return what the document promises of each call, by role."""
    text = DOCUMENT.read_text().partition(ROLES_BEGIN)[2].partition(ROLES_END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    assert tuple(rows[0][1:]) == ROLES
    found = {}
    for call, *cells in rows[2:]:
        method, path = call.strip("`").split(" ")
        found[method, path] = dict(zip(ROLES, cells, strict=True))
    return found


@dataclass(slots=True)
class ApiCall:
    """A request; `status` is what refuses it where it is refused."""

    path: str
    body: Any = None
    status: int = 403


@dataclass(slots=True)
class RoleScenario:
    """A house with real people before it, and one rollout."""

    inside: ControlEnvironment
    path: Path
    cast: dict[str, UnixUser]
    rollout: str = ""

    async def ask(self, role: str, method: str, ask: ApiCall) -> tuple[int, Any]:
        """Ask as somebody."""
        return await asyncio.to_thread(self.cast[role].request, self.path, method, ask.path, ask.body)

    async def do(self, role: str, method: str, path: str, body: Any = None) -> Any:
        """Ask as somebody who is not refused."""
        status, told = await self.ask(role, method, ApiCall(path, body))
        assert status in (200, 201), told
        return told

    @property
    def at(self) -> str:
        """The rollout's path."""
        return f"/v1/rollouts/{self.rollout}"

    async def start(self) -> None:
        """Open the start gate."""
        body = {"gate": "start", "yes": True, **REASON}
        await self.do("owner", "POST", f"{self.at}/votes", body)
        await self.inside.commit(GateOpened(self.rollout, GateName.START, "", self.inside.clock.now()))

    async def fail(self) -> None:
        """Let a node fail while it is isolated."""
        await self.start()
        await self.inside.fail(self.rollout, "p1")


FLEET = (*NODES, Node("i1", sources=("hosts",), labels={"team": "infra", "rack": "r3"}))
MINE = {"team": ("payments", "p2"), "owner": ("infra", "i1"), "submitter": ("infra", "i1")}
"""Whose things are one's own, by role; admins and strangers ask for those of payments."""

OTHERS_REBOOTS = {"ids": {"machine-2": "s1"}, "owner": "search", "gate": {"owner": 1}}

Arrange = Callable[[RoleScenario, str, bool], Awaitable[ApiCall]]


def plain(path: str, body: Any = None) -> Arrange:
    """Ask for something that needs no more than a rollout."""

    async def arrange(scene: RoleScenario, role: str, own: bool) -> ApiCall:
        return ApiCall(path.replace("{r}", scene.rollout).replace("{n}", "p1").replace("{t}", "search"), body)

    return arrange


def after(prepare: Callable[[RoleScenario], Awaitable[Any]], path: str, body: Any = None) -> Arrange:
    """Ask for something once this was done."""

    async def arrange(scene: RoleScenario, role: str, own: bool) -> ApiCall:
        await prepare(scene)
        return await plain(path, body)(scene, role, own)

    return arrange


async def paused(scene: RoleScenario) -> None:
    await scene.do("admin", "POST", f"{scene.at}/pause", REASON)


async def cancelled(scene: RoleScenario) -> None:
    await scene.do("admin", "POST", f"{scene.at}/cancel", REASON)


async def finished(scene: RoleScenario) -> None:
    if scene.inside.phase(scene.rollout, "p1") is Phase.PENDING:
        await scene.start()
        await scene.inside.finish(scene.rollout, "p1")


async def judged(scene: RoleScenario) -> None:
    if await scene.inside.state.store.load_verdicts():
        return
    at = scene.inside.clock.now()
    verdict = Verdict("v1", "change", "content", {}, scene.rollout, "p1", "verify.0", "broken", at)
    await scene.inside.commit(VerdictRecorded(scene.rollout, "p1", verdict))


async def skipped(scene: RoleScenario) -> None:
    await scene.fail()
    await scene.do("owner", "POST", f"{scene.at}/nodes/p1/skip", {**REASON, "put_back": "leave"})


async def submitting(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    mine, _ = MINE.get(role, ("infra", ""))
    owner = mine if own else "search"
    text = PLAN.replace("name: sysctl, owner: infra", f"name: other, owner: {owner}")
    return ApiCall("/v1/plans/submit", {"file": "p", "text": text})


async def retrying_build(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    answer = await scene.do("submitter", "POST", "/v1/plans/submit", {"file": "p", "text": BUILDING})
    await fail_build(scene.inside, answer["rollout"])
    return ApiCall(f"/v1/rollouts/{answer['rollout']}/retry", REASON)


async def impact(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    return replace(await submitting(scene, role, own), path="/v1/plans/impact")


async def voting(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    if role != "team" or not own:
        return ApiCall(f"{scene.at}/votes", {"gate": "start", "yes": True, **REASON})
    await scene.start()
    for node in ("i1", "p1", "s1"):
        await scene.inside.finish(scene.rollout, node)
    return ApiCall(f"{scene.at}/votes", {"gate": "continue", "yes": True, **REASON})


async def withdrawing(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    if role != "team":
        # One vote does not open this one's start gate, so it can be taken back.
        text = PLAN.replace("start: {owner: 1}", "start: {owner: 2}").replace("name: sysctl", "name: two")
        answer = await scene.do("submitter", "POST", "/v1/plans/submit", {"file": "p", "text": text})
        scene.rollout = answer["rollout"]
    ask = await voting(scene, role, own)
    gate = ask.body["gate"]
    if own and role in MINE:
        await scene.do(role, "POST", ask.path, ask.body)
        return ApiCall(f"{scene.at}/withdraw", {"gate": gate, **REASON})
    other = "owner" if role == "submitter" else "submitter"
    await scene.do(other, "POST", ask.path, ask.body)
    # An owner has a say there, and is told that there is no vote of theirs.
    return ApiCall(
        f"{scene.at}/withdraw",
        {"gate": gate, **REASON},
        status=409 if role in ("owner", "submitter") else 403,
    )


async def carrying(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    rollout = scene.inside.state.index.rollout(scene.rollout)
    claims = {
        "service": "jira",
        "rollout": rollout.id,
        "gate": "start",
        "digest": rollout.digest.whole,
        "answer": "yes",
        "outside": "alice@example.com",
        "expires": scene.inside.clock.now() + 60,
        "nonce": "n" * 16,
        "reason": "CHG-4711",
    }
    token = tokens.sign(claims, SECRET if own else SECRET[::-1])
    return ApiCall(f"{scene.at}/votes/token", {"token": token})


async def ruling(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    team, node = MINE.get(role, ("payments", "p2"))
    body = {"canaries": [node if own else "s2"], **REASON}
    return ApiCall(f"/v1/teams/{team if own else 'search'}", body)


async def approving_reboots(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    until = datetime.fromtimestamp(scene.inside.clock.now() + 60.0, UTC).isoformat()
    group = "workers" if own else "others"
    return ApiCall(f"/v1/fleetlock/{group}/approval", {**REASON, "until": until})


async def withdrawing_reboots(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    ask = await approving_reboots(scene, role, own=True)
    voter = role if own and role in MINE else "owner" if role == "submitter" else "submitter"
    await scene.do(voter, "PUT", ask.path, ask.body)
    # Who may vote at gates is told that there is no approval of theirs.
    return ApiCall(ask.path, REASON, status=409 if role in (*MINE, "admin") else 403)


async def advancing(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    return ApiCall(f"{scene.at}/nodes/{'p2' if own else 's2'}/advance", REASON)


async def holding(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    _, node = MINE.get(role, ("payments", "p2"))
    return ApiCall("/v1/holds", {"node": node if own else "s2", "id": "maint-1", **REASON})


def shelling(method: str) -> Arrange:
    """Ask for a shell on a node."""

    async def arrange(scene: RoleScenario, role: str, own: bool) -> ApiCall:
        ask = await holding(scene, role, own)
        return ApiCall(f"/v1/nodes/{ask.body['node']}/shell", REASON if method == "POST" else None)

    return arrange


async def cleaning(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    ask = await holding(scene, role, own)
    return ApiCall(f"/v1/clean/{ask.body['node']}", REASON)


async def releasing(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    ask = await holding(scene, role, own)
    await scene.do(role if own and role in MINE else "admin", "PUT", ask.path, ask.body)
    return ApiCall("/v1/holds", {"node": ask.body["node"], "id": "maint-1"})


def in_train(method: str, path: str) -> Arrange:
    """Ask about a train of a rollout of one's own team, or of another's."""

    async def arrange(scene: RoleScenario, role: str, own: bool) -> ApiCall:
        team = "payments" if (role == "team") is own and role in MINE else "infra"
        rollouts = []
        for minutes in (11, 12):
            text = FILE["text"].replace("owner: infra", f"owner: {team}").replace("10m", f"{minutes}m")
            text = text.replace("name: ", f"name: {team}-{minutes}-", 1)
            answer = await scene.do("admin", "POST", "/v1/plans/submit", {**FILE, "text": text})
            rollouts.append(answer["rollout"])
        body = {**REASON, "rollouts": rollouts}
        calls = {"PUT": body, "GET": None, "POST": {**body, "wait_s": 3600.0}, "DELETE": REASON}
        name = f"of-{rollouts[0]}"
        if method != "PUT":
            await scene.do("admin", "PUT", f"/v1/trains/{name}", body)
        return ApiCall(path.replace("{t}", name), calls[method])

    return arrange


async def freezing(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    team, _ = MINE.get(role, ("payments", ""))
    return ApiCall("/v1/freezes", {"scope": f"team/{team if own else 'search'}", **REASON})


async def thawing(scene: RoleScenario, role: str, own: bool) -> ApiCall:
    ask = await freezing(scene, role, own)
    await scene.do("admin", "POST", ask.path, ask.body)
    return ApiCall("/v1/freezes", {"scope": ask.body["scope"]})


_R, _N = "/v1/rollouts/{r}", "/v1/rollouts/{r}/nodes/{n}"
FILE = {"file": "p", "text": PLAN}
READING = (
    *(
        "/v1/health",
        "/v1/openapi.json",
        "/v1/whoami",
        "/v1/status",
        "/v1/rollouts",
        "/v1/locks",
        "/v1/changes",
        "/v1/events",
    ),
    *(
        "/v1/settings",
        "/v1/inventory",
        "/v1/inventory/{n}",
        "/v1/audit",
        "/v1/audit/verify",
        "/v1/fleetlock",
        _R,
        f"{_R}/nodes",
        f"{_R}/plan",
        f"{_R}/failures",
        f"{_R}/review",
        f"{_R}/comparison",
        "/v1/handover?since=2026-11-20T00:00:00Z",
    ),
    *(_N, f"{_N}/why", f"{_N}/log", "/v1/audit/head", "/v1/teams/{t}", "/v1/verdicts"),
    *("/v1/nodes/{n}/configuration", "/v1/nodes/{n}/checkpoints", f"{_R}/checkpoints", f"{_R}/artifacts"),
    *(f"{_R}/prepare", f"{_R}/forecast", "/v1/forecasts/score"),
)

ASKS: dict[Key, Arrange] = {
    **{("GET", path.partition("?")[0]): plain(path) for path in READING},
    ("GET", "/v1/nodes/{n}/configuration/diff"): after(
        finished, "/v1/nodes/{n}/configuration/diff?before=current&after=current"
    ),
    ("POST", "/v1/verdicts/{v}/clear"): after(judged, "/v1/verdicts/v1/clear", REASON),
    ("POST", "/v1/plans/diff"): plain("/v1/plans/diff", FILE),
    ("POST", "/v1/plans/validate"): plain("/v1/plans/validate", FILE),
    ("POST", "/v1/plans/preview"): plain("/v1/plans/preview", FILE),
    ("POST", "/v1/plans/forecast"): plain("/v1/plans/forecast", {**FILE, "draws": 2}),
    ("POST", "/v1/forecasts"): plain("/v1/forecasts", {"draws": 2}),
    ("POST", f"{_R}/forecast"): plain(f"{_R}/forecast", {"draws": 2}),
    ("POST", "/v1/plans/impact"): impact,
    ("POST", "/v1/plans/submit"): submitting,
    ("POST", "/v1/uploads"): plain("/v1/uploads", archive()),
    ("POST", "/v1/inventory/refresh"): plain("/v1/inventory/refresh", {}),
    ("POST", "/v1/inventory/accept"): plain("/v1/inventory/accept", {**REASON, "source": "hosts"}),
    ("POST", "/v1/inventory/{n}/pin"): plain("/v1/inventory/{n}/pin", REASON),
    ("POST", "/v1/inventory/{n}/host-keys"): plain(
        "/v1/inventory/{n}/host-keys", {**REASON, "stored": [f"ssh-ed25519 SHA256:{'a' * 43}"]}
    ),
    ("POST", f"{_R}/votes"): voting,
    ("POST", f"{_R}/votes/token"): carrying,
    ("POST", f"{_R}/withdraw"): withdrawing,
    ("POST", f"{_R}/pause"): plain(f"{_R}/pause", REASON),
    ("POST", f"{_R}/resume"): after(paused, f"{_R}/resume", REASON),
    ("POST", f"{_R}/drift"): plain(f"{_R}/drift", {}),
    ("GET", "/v1/nodes/{n}/shell"): shelling("GET"),
    ("POST", "/v1/nodes/{n}/shell"): shelling("POST"),
    ("POST", "/v1/clean/{s}"): cleaning,
    ("POST", f"{_R}/retry"): retrying_build,
    ("POST", f"{_R}/cancel"): plain(f"{_R}/cancel", REASON),
    ("DELETE", _R): after(cancelled, _R),
    ("POST", f"{_N}/advance"): advancing,
    ("POST", f"{_N}/retry"): after(RoleScenario.fail, f"{_N}/retry", REASON),
    ("POST", f"{_N}/rollback"): after(RoleScenario.fail, f"{_N}/rollback", REASON),
    ("POST", f"{_R}/rollback"): after(RoleScenario.fail, f"{_R}/rollback", {**REASON, "all": True}),
    ("POST", f"{_N}/skip"): after(RoleScenario.fail, f"{_N}/skip", {**REASON, "put_back": "leave"}),
    ("POST", "/v1/nodes/{n}/return"): after(skipped, "/v1/nodes/{n}/return", {}),
    ("PUT", "/v1/teams/{t}"): ruling,
    ("PUT", "/v1/holds"): holding,
    ("DELETE", "/v1/holds"): releasing,
    **{
        (method, path): in_train(method, path)
        for method, path in (
            ("GET", "/v1/trains"),
            ("GET", "/v1/trains/{t}"),
            ("PUT", "/v1/trains/{t}"),
            ("POST", "/v1/trains/{t}/approve"),
            ("DELETE", "/v1/trains/{t}"),
        )
    },
    ("GET", "/v1/fleetlock/{g}/nodes/{n}/why"): plain("/v1/fleetlock/workers/nodes/{n}/why"),
    ("PUT", "/v1/fleetlock/{g}/approval"): approving_reboots,
    ("DELETE", "/v1/fleetlock/{g}/approval"): withdrawing_reboots,
    ("POST", "/v1/leader/step-down"): plain("/v1/leader/step-down", REASON),
    ("POST", "/v1/freezes"): freezing,
    ("DELETE", "/v1/freezes"): thawing,
    ("POST", "/v1/audit/settle"): plain("/v1/audit/settle", {**REASON, "subjects": ["all"], "keep": "audit"}),
}


@pytest.fixture(scope="module")
def cast() -> Iterator[tuple[dict[str, UnixUser], dict[str, str]]]:
    """Make one user per role; all but `nobody` are in the socket's group."""
    groups: dict[str, list[str]] = {role: ["socket"] for role in ROLES}
    groups["outsider"] = []
    groups["team"].append("pay")
    groups["admin"].append("wheel")
    with temporary_users(groups) as made:
        yield made


@asynccontextmanager
async def scene(cast: tuple[dict[str, UnixUser], dict[str, str]]) -> Any:
    """Open a house whose teams are made of real users and groups."""
    persons, groups = cast
    place = Path(tempfile.mkdtemp(prefix="roles-"))
    place.chmod(0o755)  # the socket alone guards itself
    settings = {
        "teams": {
            "infra": {"members": [persons["owner"].name, persons["submitter"].name]},
            "payments": {"members": ["@" + groups["pay"]]},
            "search": {"members": ["nobody-of-these"]},
        },
        "admins": ["@" + groups["wheel"]],
        "fleetlock": {**REBOOTS, "groups": {**REBOOTS["groups"], "others": OTHERS_REBOOTS}},
        "service_accounts": {"jira": {"key_file": str(place / "jira.key"), "teams": ["infra"]}},
    }
    (place / "jira.key").touch(mode=0o600)
    (place / "jira.key").write_bytes(SECRET)
    try:
        async with control_environment(
            place, nodes=FLEET, names=CachedNameService(lambda: 0.0), group=groups["socket"], **settings
        ) as inside:
            now = inside.clock.now()
            inside.state.index.record_observations(
                [Observation(node.name, NodeHealth.UP, now) for node in FLEET], now
            )
            made = RoleScenario(inside, inside.server._path, persons)
            answer = await made.do("submitter", "POST", "/v1/plans/submit", FILE)
            made.rollout = answer["rollout"]
            inside.state.forecasts = {made.rollout: forecast_of(made.rollout)}
            yield made
    finally:
        shutil.rmtree(place)


def test_every_route_is_asked() -> None:
    assert set(ASKS) == {(route.method, route.path) for route in ROUTES}
    assert set(documented()) == set(ASKS)


def test_document_has_the_table_of_the_routes() -> None:
    """If this fails, run `make docs`."""
    assert render_roles(ROUTES) in DOCUMENT.read_text()


@pytest.mark.parametrize("key", [pytest.param(key, id=" ".join(key)) for key in ASKS])
async def test_a_call_in_every_role(key: Key, cast: tuple[dict[str, UnixUser], dict[str, str]]) -> None:
    """Allowed or refused as documented; a refusal changes nothing and is audited."""
    row = documented()[key]
    reading = key[0] == "GET"
    if reading:
        async with scene(cast) as made:
            for role in ROLES:
                await judge(made, key, role, row[role], own=True)
        return
    for role in ROLES:
        for own in (True, False) if row[role] in ("own", "token") else (True,):
            async with scene(cast) as made:
                await judge(made, key, role, row[role] if own else "no", own=own)


async def judge(made: RoleScenario, key: Key, role: str, cell: str, *, own: bool) -> None:
    """Ask once, and compare with the table."""
    ask = await ASKS[key](made, role, own)
    before = made.inside.state.index.snapshot()
    seq = made.inside.state.changes.latest_seq
    status, told = await made.ask(role, key[0], ask)
    if cell != "no":
        assert status in (200, 201), (role, told)
        return
    assert made.inside.state.index.snapshot() == before, "a refusal changes nothing"
    entries = [json.loads(entry.text) for entry in await made.inside.state.store.read_audit(after=seq)]
    if role == "outsider":
        assert (status, told) == (0, "PermissionError")
        assert entries == []
        return
    assert status == ask.status, (role, own, told)
    if status == 403:
        person = made.cast[role]
        assert told["code"] == "not-allowed"
        assert person.name in told["error"] or "token" in told["error"]
        (entry,) = entries
        assert entry["event"] == "RequestDenied"
        assert entry["actor"] == {"kind": "person", "name": person.name, "uid": person.uid}
        assert entry["fields"]["call"] == f"{key[0]} {ask.path}"


def test_the_names_of_roles_are_explained() -> None:
    text = DOCUMENT.read_text()
    for role in ROLES:
        assert re.search(rf"^- \*\*{role}\*\*", text, re.MULTILINE), role
