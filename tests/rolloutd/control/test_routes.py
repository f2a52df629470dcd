"""Every route of the table answers, with the model that the OpenAPI document is made of."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from machines.facts.preparations import BUILD_NODE
from machines.model.events import PreparationRecorded, VerdictRecorded
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import Verdict
from machines.states import Trigger
from rolloutd.commands import tokens
from rolloutd.control import wire_errors
from rolloutd.control.client import ApiError
from rolloutd.control.openapi import openapi_document
from rolloutd.control.route_table import ROUTES
from rolloutd.store import open_store
from tests.rolloutd.control.test_trains import train_requests
from tests.rolloutd.control_environment import (
    PLAN,
    REBOOTS,
    ControlEnvironment,
    control_environment,
)
from tests.support.replayed_fleet import forecast_of

REASON = {"reason": "because"}
SETTLE = {**REASON, "subjects": ["all"], "keep": "audit"}
HOST_KEYS = {**REASON, "stored": [f"ssh-ed25519 SHA256:{'a' * 43}"]}
ACCEPTED = {**REASON, "source": "kubernetes/ams"}
SECRET = b"0123456789abcdef0123456789abcdef"
FILE = {"file": "plan.yaml", "text": PLAN}


def archive() -> bytes:
    """Return a tree of playbooks, packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("site.yml")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"---\n"))
    return packed.getvalue()


BUILDING = PLAN.replace("name: sysctl", "name: building").replace(
    "  soak:", "  prepare: [{build: {playbook: site.yml}}]\n  soak:"
)


async def fail_build(inside: ControlEnvironment, rollout: str) -> None:
    """Have the build of BUILDING fail."""
    at = inside.clock.now()
    row = Preparation(
        rollout, BUILD_NODE, "build", 1, PreparationState.FAILED, "", at, at, not_before=at + 60
    )
    await inside.commit(PreparationRecorded(row))


READING = {
    "nora": """
        /v1/health /v1/openapi.json /v1/whoami /v1/status /v1/rollouts /v1/locks /v1/settings /v1/audit/head
        /v1/changes /v1/forecasts/score /v1/nodes/{n}/configuration /v1/verdicts /v1/rollouts/{r}
        /v1/rollouts/{r}/nodes
        /v1/rollouts/{r}/plan /v1/inventory /v1/rollouts/{r}/nodes/{n} /v1/rollouts/{r}/nodes/{n}/why
        /v1/audit/verify /v1/events /v1/rollouts/{r}/nodes/{n}/log /v1/rollouts/{r}/review
        /v1/fleetlock /v1/audit /v1/rollouts/{r}/prepare /v1/rollouts/{r}/failures /v1/rollouts/{r}/comparison
    """,
    "paul": """
        /v1/nodes/{n}/shell /v1/nodes/{n}/checkpoints /v1/rollouts/{r}/checkpoints /v1/rollouts/{r}/artifacts
    """,
}
"""Who reads which route without a query."""


async def prepare_fleet(
    inside: ControlEnvironment, plan: str = PLAN
) -> dict[tuple[str, str], tuple[str, str, Any]]:
    """Return who asks what of each route, in an order in which all of them can be answered."""
    file = {"file": "plan.yaml", "text": plan}
    other = await inside.start(text=plan.replace("name: sysctl", "name: other"))
    await inside.finish(other, "p1")
    building = await inside.start(text=BUILDING)
    await fail_build(inside, building)
    r = await inside.start(text=plan)
    await inside.isolate(r, "s1")
    await inside.fail(r, "p1")
    await inside.fail(r, "s1")
    n = f"/v1/rollouts/{r}/nodes/p1"
    verdict = Verdict("v1", "change", "content", {}, r, "p1", "verify.0", "broken", inside.clock.now())
    await inside.commit(VerdictRecorded(r, "p1", verdict))
    inside.state.forecasts = {r: forecast_of(r)}
    freeze = {"reason": "party", "scope": "team/search"}
    reading = {
        path: (who, path.replace("{r}", r).replace("{n}", "p1"), None)
        for who, paths in READING.items()
        for path in paths.split()
    }
    claims = {
        "service": "jira",
        "rollout": r,
        "gate": "start",
        "answer": "yes",
        "outside": "zoe@example.com",
        "digest": inside.state.index.rollout(r).digest.whole,
        "expires": inside.clock.now() + 60.0,
        "nonce": "n" * 16,
        "reason": "CHG-1",
    }
    return {("GET", path): asked for path, asked in reading.items()} | {
        ("GET", "/v1/handover"): ("nora", "/v1/handover?since=2026-11-20T00:00:00Z", None),
        ("GET", "/v1/nodes/{n}/configuration/diff"): (
            *("nora", "/v1/nodes/p1/configuration/diff?before=current&after=invalid"),
            None,
        ),
        ("POST", "/v1/verdicts/{v}/clear"): ("adam", f"/v1/verdicts/{verdict.id}/clear", REASON),
        ("POST", "/v1/plans/diff"): ("paul", "/v1/plans/diff", file),
        ("GET", "/v1/teams/{t}"): ("nora", "/v1/teams/payments", None),
        ("PUT", "/v1/teams/{t}"): (
            *("paul", "/v1/teams/payments"),
            {**REASON, "canaries": ["p2"], "windows": [{"days": "mon-sun", "from": "00:00", "to": "24:00"}]},
        ),
        ("POST", "/v1/rollouts/{r}/votes/token"): (
            *("nora", f"/v1/rollouts/{r}/votes/token"),
            {"token": tokens.sign(claims, SECRET)},
        ),
        ("POST", "/v1/rollouts/{r}/nodes/{n}/advance"): (
            *("sara", f"/v1/rollouts/{r}/nodes/s2/advance"),
            REASON,
        ),
        ("POST", "/v1/plans/validate"): ("nora", "/v1/plans/validate", file),
        ("POST", "/v1/plans/preview"): ("paul", "/v1/plans/preview", file),
        ("POST", "/v1/plans/forecast"): ("paul", "/v1/plans/forecast", {**file, "draws": 3}),
        ("GET", "/v1/rollouts/{r}/forecast"): ("nora", f"/v1/rollouts/{r}/forecast", None),
        ("POST", "/v1/forecasts"): ("paul", "/v1/forecasts", {"draws": 3}),
        ("POST", "/v1/rollouts/{r}/forecast"): (
            *("paul", f"/v1/rollouts/{r}/forecast"),
            {"draws": 3, "sets": ["plan.soak=5m"], "publish": "calendar"},
        ),
        ("POST", "/v1/plans/impact"): ("olga", "/v1/plans/impact", file),
        ("POST", "/v1/plans/submit"): ("olga", "/v1/plans/submit", file),
        ("POST", "/v1/uploads"): ("paul", "/v1/uploads", archive()),
        ("POST", "/v1/rollouts/{r}/votes"): (
            *("olga", f"/v1/rollouts/{r}/votes"),
            {"gate": "proceed", "yes": False, **REASON},
        ),
        ("POST", "/v1/rollouts/{r}/withdraw"): (
            *("olga", f"/v1/rollouts/{r}/withdraw"),
            {"gate": "proceed", **REASON},
        ),
        ("POST", "/v1/rollouts/{r}/drift"): ("olga", f"/v1/rollouts/{other}/drift", {}),
        ("POST", "/v1/rollouts/{r}/pause"): ("oscar", f"/v1/rollouts/{r}/pause", REASON),
        ("POST", "/v1/rollouts/{r}/resume"): ("adam", f"/v1/rollouts/{r}/resume", REASON),
        ("POST", "/v1/rollouts/{r}/retry"): ("olga", f"/v1/rollouts/{building}/retry", REASON),
        ("POST", "/v1/rollouts/{r}/cancel"): ("olga", f"/v1/rollouts/{other}/cancel", REASON),
        ("DELETE", "/v1/rollouts/{r}"): ("olga", f"/v1/rollouts/{other}", None),
        ("POST", "/v1/clean/{s}"): ("paul", "/v1/clean/p1", REASON),
        ("PUT", "/v1/holds"): ("adam", "/v1/holds", {"node": "p1", **REASON}),
        ("DELETE", "/v1/holds"): ("adam", "/v1/holds", {"node": "p1"}),
        ("POST", "/v1/rollouts/{r}/nodes/{n}/retry"): ("olga", f"{n}/retry", REASON),
        ("POST", "/v1/rollouts/{r}/nodes/{n}/skip"): ("olga", f"{n}/skip", {**REASON, "put_back": "leave"}),
        ("POST", "/v1/nodes/{n}/shell"): ("paul", "/v1/nodes/p1/shell", REASON),
        ("POST", "/v1/nodes/{n}/return"): ("olga", "/v1/nodes/p1/return", {}),
        ("POST", "/v1/freezes"): ("sara", "/v1/freezes", freeze),
        **train_requests(r, building),
        ("GET", "/v1/fleetlock/{g}/nodes/{n}/why"): ("nora", "/v1/fleetlock/workers/nodes/p1/why", None),
        ("PUT", "/v1/fleetlock/{g}/approval"): (
            *("olga", "/v1/fleetlock/workers/approval"),
            {**REASON, "until": datetime.fromtimestamp(inside.clock.now() + 60.0, UTC).isoformat()},
        ),
        ("DELETE", "/v1/fleetlock/{g}/approval"): ("olga", "/v1/fleetlock/workers/approval", REASON),
        ("POST", "/v1/leader/step-down"): ("adam", "/v1/leader/step-down", REASON),
        ("POST", "/v1/audit/settle"): ("adam", "/v1/audit/settle", SETTLE),
        ("DELETE", "/v1/freezes"): ("sara", "/v1/freezes", {"scope": "team/search"}),
        ("POST", "/v1/inventory/refresh"): ("paul", "/v1/inventory/refresh", {}),
        ("GET", "/v1/inventory/{n}"): ("nora", "/v1/inventory/p1", None),
        ("POST", "/v1/inventory/accept"): ("adam", "/v1/inventory/accept", ACCEPTED),
        ("POST", "/v1/inventory/{n}/pin"): ("adam", "/v1/inventory/p1/pin", REASON),
        ("POST", "/v1/inventory/{n}/host-keys"): ("adam", "/v1/inventory/p1/host-keys", HOST_KEYS),
        ("POST", "/v1/rollouts/{r}/rollback"): (
            *("olga", f"/v1/rollouts/{r}/rollback"),
            {**REASON, "withdraw": True},
        ),
        ("POST", "/v1/rollouts/{r}/nodes/{n}/rollback"): (
            *("olga", f"/v1/rollouts/{r}/nodes/s1/rollback"),
            REASON,
        ),
    }


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_response_of_each_route_matches_its_model(tmp_path: Path, kind: str) -> None:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path, compile_plan=compiled)

    key_file = tmp_path / "jira.key"
    key_file.touch(mode=0o600)
    key_file.write_bytes(SECRET)
    services = {"jira": {"key_file": str(key_file), "teams": ["infra"]}}
    async with control_environment(
        tmp_path,
        store=sqlite if kind == "sqlite" else None,
        service_accounts=services,
        state_dir=str(tmp_path),
        fleetlock=REBOOTS,
    ) as inside:
        asked = await prepare_fleet(inside)
        assert set(asked) == {(route.method, route.path) for route in ROUTES}
        routes = {(route.method, route.path): route for route in ROUTES}
        for key, (who, path, body) in asked.items():
            seq = inside.state.changes.latest_seq
            answer = await assert_matches_schema(inside, routes[key].streams, who, key[0].lower(), path, body)
            lines = answer if routes[key].streams else [answer]
            assert lines
            model = TypeAdapter(routes[key].response_type)
            for line in lines:
                # A key that the model lacks would be missing in what it returns.
                assert model.validate_python(line, strict=True) == line, key
            # A command whose route has no operation would leave a cause without its first word.
            causes = [
                json.loads(entry.text)["cause"] for entry in await inside.state.store.read_audit(after=seq)
            ]
            assert not any(cause.startswith(":") for cause in causes), key


async def assert_matches_schema(
    inside: ControlEnvironment, streams: bool, who: str, method: str, path: str, body: Any
) -> Any:
    """Return what a route answers."""
    if streams:
        return await inside.stream_lines(path, who=who, method=method.upper(), body=body)
    if isinstance(body, bytes):
        return await inside.request(who, "upload", path, body)
    return await inside.request(who, method, path, *(() if body is None else (body,)))


async def test_errors_have_one_shape(tmp_path: Path) -> None:
    wrong: list[tuple[str, str, Any, int]] = [
        ("get", "/v1/nothing", None, 404),
        ("get", "/", None, 404),
        ("post", "/v1/health", {}, 405),
        ("put", "/v1/status", {}, 405),
        ("get", "/v1/status?al=true", None, 400),
        ("get", "/v1/status?all=perhaps", None, 400),
        ("get", "/v1/status?all=true&all=true", None, 400),
        ("get", "/v1/audit?limit=0", None, 400),
        ("get", "/v1/audit/verify?head=xyz", None, 400),
        ("get", "/v1/rollouts/nobody", None, 404),
        ("get", "/v1/rollouts/..%2f..%2fetc%2fpasswd/plan", None, 404),
        ("post", "/v1/plans/validate", {"file": "p"}, 400),
        ("post", "/v1/plans/validate", {"file": "p", "text": 3}, 400),
        ("post", "/v1/plans/validate", {"file": "p", "text": "", "more": 1}, 400),
        ("post", "/v1/plans/submit", {"file": "p", "text": "kind: nothing"}, 422),
        ("put", "/v1/holds", {"node": "x", "reason": "because"}, 404),
        ("put", "/v1/holds", {"node": "p1", "reason": "esc \u001b[2J"}, 400),
        ("put", "/v1/holds", {"node": "p1", "reason": "x" * 3000}, 400),
        ("put", "/v1/holds", {"node": "p1", "reason": "  "}, 400),
    ]
    error = TypeAdapter(wire_errors.Error)
    async with control_environment(tmp_path) as inside:
        for method, path, body, status in wrong:
            with pytest.raises(ApiError) as refused:
                await inside.request("olga", method, path, *(() if body is None else (body,)))
            assert refused.value.status == status, (method, path, refused.value.body)
            assert error.validate_python(refused.value.body, strict=True) == refused.value.body


def test_operations_in_the_audit_never_change() -> None:
    operations = {(route.method, route.path): route.operation for route in ROUTES if route.operation}
    rollout, node = "/v1/rollouts/{r}", "/v1/rollouts/{r}/nodes/{n}"
    assert operations == {
        ("POST", f"{rollout}/votes"): "vote",
        ("POST", f"{rollout}/withdraw"): "withdraw",
        ("POST", f"{rollout}/pause"): "pause",
        ("POST", f"{rollout}/resume"): "resume",
        ("POST", f"{rollout}/retry"): "retry_build",
        ("POST", f"{rollout}/cancel"): "cancel",
        ("POST", f"{rollout}/rollback"): "roll_back",
        ("POST", f"{node}/advance"): "advance",
        ("POST", f"{node}/retry"): "retry",
        ("POST", f"{node}/rollback"): "rollback",
        ("POST", f"{node}/skip"): "skip",
        ("POST", "/v1/audit/settle"): "settle",
    }


def test_the_document_is_whole() -> None:
    promised = openapi_document(ROUTES, "0.test")
    text = json.dumps(promised)
    schemas = promised["components"]["schemas"]
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.split('"')[0] in schemas
    assert promised["openapi"].startswith("3.1")
    operations = [each["operationId"] for methods in promised["paths"].values() for each in methods.values()]
    assert len(operations) == len(set(operations)) == len(ROUTES)


async def test_a_rollout_is_found_by_its_name_and_the_beginning_of_its_id(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        other = await inside.submit(text=PLAN.replace("name: sysctl", "name: sysctl-b"))
        for named in (rollout, "sysctl", rollout[:-1]):
            assert (await inside.request("nora", "get", f"/v1/rollouts/{named}"))["rollout"] == rollout
        with pytest.raises(ApiError) as ambiguous:
            await inside.request("nora", "get", "/v1/rollouts/sysc")
        assert (ambiguous.value.status, ambiguous.value.code) == (409, "ambiguous")
        assert other in str(ambiguous.value)


async def test_a_closed_rollout_is_still_shown(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", REASON)
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        await inside.restart()
        assert await inside.request("nora", "get", f"/v1/rollouts/{rollout}") == shown
        assert shown["state"] == "cancelled"
        assert (await inside.request("nora", "get", "/v1/status"))["rollouts"] == []
        assert (await inside.request("nora", "get", "/v1/status?all=true"))["rollouts"] == [shown]
        assert len((await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes"))["nodes"]) == 4
        listed = (await inside.request("nora", "get", "/v1/rollouts"))["rollouts"]
        assert [(each["rollout"], each["state"]) for each in listed] == [(rollout, "cancelled")]
        await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        assert (await inside.request("nora", "get", "/v1/rollouts"))["rollouts"] == []


async def test_irreversible_command_requires_unique_name(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        first = await inside.submit()
        await inside.request("olga", "post", f"/v1/rollouts/{first}/cancel", REASON)
        second = await inside.submit()
        await inside.request("olga", "post", f"/v1/rollouts/{second}/cancel", REASON)
        for _ in range(2):
            with pytest.raises(ApiError) as ambiguous:
                await inside.request("olga", "delete", "/v1/rollouts/sysctl")
            assert (ambiguous.value.status, ambiguous.value.code) == (409, "ambiguous")
            assert first in str(ambiguous.value)
            await inside.restart()
        assert await inside.request("olga", "delete", f"/v1/rollouts/{second}") == {"rollout": second}
        assert await inside.request("olga", "delete", "/v1/rollouts/sysctl") == {"rollout": first}


async def test_reading_by_plan_name_shows_the_latest(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        for _ in range(2):
            latest = await inside.submit()
            await inside.request("olga", "post", f"/v1/rollouts/{latest}/cancel", REASON)
        await inside.restart()
        assert (await inside.request("nora", "get", "/v1/rollouts/sysctl"))["rollout"] == latest
        # `why PLAN` and `why PLAN NODE` ask these.
        assert await inside.request("nora", "get", "/v1/rollouts/sysctl/nodes")
        assert (await inside.request("nora", "get", "/v1/rollouts/sysctl/nodes/p1/why"))["node"] == "p1"
        with pytest.raises(ApiError, match="did you mean sysctl"):
            await inside.request("nora", "get", "/v1/rollouts/sysclt")


async def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        for user, method, path, suggestion in (
            ("nora", "get", "/v1/rollouts/sysctk", "did you mean sysctl?"),
            ("nora", "get", f"/v1/rollouts/{rollout}/nodes/p11/why", "did you mean p1?"),
            ("nora", "get", "/v1/rollouts/p1", "it is a node: name its rollout first"),
            ("nora", "get", "/v1/teams/paymants", "did you mean payments?"),
            ("nora", "get", "/v1/rollouts/zebra", "list them with rolloutctl rollouts"),
            ("adam", "post", "/v1/freezes team/paymants", "did you mean team/payments?"),
            ("adam", "post", "/v1/freezes rack/r11", "did you mean rack/r1?"),
        ):
            path, _, scope = path.partition(" ")
            body = [{**REASON, "scope": scope}] if scope else []
            with pytest.raises(ApiError) as unknown:
                await inside.request(user, method, path, *body)
            assert (unknown.value.status, suggestion in str(unknown.value)) == (404, True)


async def test_deleted_rollout_keeps_audit_and_unknown_is_404(
    tmp_path: Path,
) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", REASON)
        await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        page = await inside.request("nora", "get", f"/v1/audit?rollout={rollout}")
        told = [each["entry"]["event"] for each in page["entries"]]
        assert told == ["RolloutOpened", "RolloutCancelled", "RolloutDeleted"]
        assert len(await inside.stream_lines("/v1/events", rollout=rollout, after=0)) == len(told)
        for path in ("/v1/audit?rollout=moon", "/v1/events?rollout=moon"):
            with pytest.raises(ApiError) as unknown:
                await inside.request("nora", "get", path)
            assert (unknown.value.status, unknown.value.code) == (404, "not-found")
            assert "moon" in str(unknown.value)


async def test_audit_pages_backwards_with_before(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await inside.submit()
        all_entries = (await inside.request("nora", "get", "/v1/audit"))["entries"]
        paged: list[Any] = []
        before = all_entries[-1]["seq"] + 1
        while before is not None:
            page = await inside.request("nora", "get", f"/v1/audit?limit=2&before={before}")
            paged, before = [*page["entries"], *paged], page["next"]
        assert paged == all_entries
        page = await inside.request(
            "nora", "get", "/v1/audit?limit=1&before=9000&kind=RolloutOpened&actor=nora"
        )
        assert page["entries"] == []


async def test_nodes_are_paged_in_their_order(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        path = f"/v1/rollouts/{await inside.start()}/nodes"
        await inside.request("olga", "post", f"{path}/s2/advance", REASON)
        for asked in (path, "/v1/inventory"):
            whole = await inside.request("nora", "get", asked)
            paged, after = [], ""
            while after is not None:
                page = await inside.request("nora", "get", f"{asked}?limit=1{after and '&after=' + after}")
                paged += page["nodes"]
                after = page["next"]
            assert (paged, whole["next"]) == (whole["nodes"], None)
        assert [each["node"] for each in whole["nodes"]] == ["p1", "p2", "s1", "s2"]
        assert (await inside.request("nora", "get", "/v1/inventory?after=p10"))["nodes"] == whole["nodes"][2:]
        with pytest.raises(ApiError, match="did you mean"):
            await inside.request("nora", "get", f"{path}?after=p11")


async def test_absent_is_null_and_never_an_empty_string(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        await inside.request("sara", "put", "/v1/holds", {"node": "s1", "reason": "disk"})
        of_it = [f"/v1/rollouts/{rollout}{rest}" for rest in ("", "/nodes", "/nodes/p1", "/nodes/p2/why")]
        for path in (*of_it, "/v1/status", "/v1/rollouts", "/v1/locks", "/v1/inventory", "/v1/whoami"):
            answer = await inside.request("nora", "get", path)
            assert [*_empty_strings(answer, path)] == []
        gates = (await inside.request("nora", "get", of_it[0]))["gates"]
        assert [gate["wave"] for gate in gates] == [None, "canary", None]


def _empty_strings(value: Any, where: str) -> Iterator[str]:
    """Yield where in an answer there is an empty string."""
    if value == "":
        yield where
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from _empty_strings(inner, f"{where}.{key}")
