"""Five thousand random requests, made from the OpenAPI document: no fault, no change without its audit entry.

Where test_control_server.py throws garbage at the door, these mostly come in:
the document says what a call takes, and the values are those of this fleet, or
nearly so.  What the facts become is compared with what the audit says.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import pytest

from machines.facts.projection import Projection
from rolloutd.commands import tokens
from rolloutd.control.openapi import openapi_document
from rolloutd.control.route_table import ROUTES
from rolloutd.settings.compile import compile_limits
from rolloutd.store import open_store
from tests.rolloutd.control.test_routes import SECRET
from tests.rolloutd.control_environment import ACCOUNTS, NODES, PLAN, ControlEnvironment, control_environment

REQUESTS = 5_000
SEED = 20261120
PARTS = 4
"""Houses the requests are spread over, so that the facts stay small and workers can share them."""

FORECASTS = ("/v1/forecasts", "/v1/plans/forecast", "/v1/plans/preview", "/v1/rollouts/{r}/forecast")
"""Each starts a process, so they are asked a tenth as often as the others."""

WORDS = ("sysctl", "p1", "s2", "infra", "payments", "search", "canary", "fleet", "all", "team/search")
SCOPES = ("all", "team/payments", "node/s1", "rack/r1", "rack/r9", "team/nobody")
ODD_VALUES = (
    "",
    " ",
    "x" * 300,
    "\x00",
    "é🙂",
    "..",
    "null",
    "-1",
    "{{ node.name }}",
    "'; DROP TABLE audit; --",
)
TIMES = ("2026-01-01T00:00:00Z", "2030-01-01T00:00:00Z", "2030-01-01T00:00:00", "9999-12-31T23:59:59Z")


class RequestGenerator:
    """Makes requests out of the document, a die and what there is."""

    def __init__(self, dice: random.Random, inside: ControlEnvironment) -> None:
        self.dice = dice
        self.inside = inside
        self.document = openapi_document(ROUTES, "0.test")
        self.operations = [
            (method.upper(), path, operation)
            for path, methods in self.document["paths"].items()
            for method, operation in methods.items()
        ]

    def request(self) -> tuple[str, str, bytes | None, str]:
        """Return method, target, body and media type of the next request."""
        method, path, operation = self.dice.choice(self.operations)
        if path in FORECASTS and self.dice.random() < 0.9:
            return self.request()
        query = []
        for part in operation["parameters"]:
            if part["in"] == "path":
                place = "{" + part["name"] + "}"
                path = path.replace(place, quote(self.part(part["name"]), safe=""))
            elif part["name"] != "follow" and self.dice.random() < 0.4:
                query.append((part["name"], self.text(part["name"])))
        target = f"{path}?{urlencode(query)}" if query else path
        if "requestBody" not in operation:
            return method, target, None, "application/json"
        ((media, content),) = operation["requestBody"]["content"].items()
        if media != "application/json":
            return method, target, self.dice.randbytes(self.dice.randrange(64)), media
        return method, target, json.dumps(self.value(content["schema"], "body")).encode(), media

    def part(self, name: str) -> str:
        """Return a part of a path."""
        if self.dice.random() < 0.1:
            return self.dice.choice([word for word in ODD_VALUES if word.strip()])
        match name:
            case "r":
                return self.dice.choice([*self.inside.state.index.rollouts, "sysctl", "plan-1"])
            case "n":
                return self.dice.choice(NODES).name
            case _:
                return self.dice.choice(("infra", "payments", "search", "idle"))

    def text(self, name: str) -> str:
        """Return the text of a query parameter."""
        choices = {"all": ("true", "false", "maybe"), "head": ("0" * 64, "f" * 64, "x")}
        return self.dice.choice(choices.get(name, (*WORDS, *ODD_VALUES, "0", "1", "7")))

    def value(self, schema: dict[str, Any], name: str, depth: int = 0) -> Any:
        """Return a value of the schema, or now and then one that is none of it."""
        if self.dice.random() < 0.02:
            return self.dice.choice((None, True, -1, 2**70, 1e300, *ODD_VALUES, [], {}, [[]]))
        if "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
        if "anyOf" in schema:
            return self.value(self.dice.choice(schema["anyOf"]), name, depth)
        if "enum" in schema:
            return self.dice.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                wanted = schema.get("required", [])
                given = {
                    key: self.value(shape, key, depth + 1)
                    for key, shape in schema.get("properties", {}).items()
                    if (key in wanted and self.dice.random() < 0.98) or self.dice.random() < 0.25
                }
                return given | ({"extra": 1} if self.dice.random() < 0.02 else {})
            case "array":
                items = schema.get("items", {})
                return [self.value(items, name, depth + 1) for _ in range(self.dice.randrange(3))]
            case "boolean":
                return self.dice.random() < 0.6
            case "integer" | "number":
                return self.dice.choice((0, 1, 2, 1000, 1001, -1))
            case "null":
                return None
            case _:
                return self.named(name)

    def named(self, name: str) -> str:
        """Return a text that would suit a key of this name."""
        match name:
            case "text":
                plan = PLAN.replace("name: sysctl", f"name: plan-{self.dice.randrange(4)}")
                return plan.replace("soak: 10m", f"soak: {self.dice.randrange(3)}m")
            case "reason":
                return self.dice.choice(("because", "CHG-1", "é🙂", "   ", "x" * 2001, "\x1b[2J"))
            case "scope":
                return self.dice.choice(SCOPES)
            case "until":
                return self.dice.choice(TIMES)
            case "node" | "nodes" | "canaries":
                return self.dice.choice((*NODES, *NODES)).name if self.dice.random() < 0.9 else "n404"
            case "shown":
                return self.dice.choice(("p1#1", "s1#1", "p1#2"))
            case "digest":
                rollouts = list(self.inside.state.index.rollouts.values())
                return self.dice.choice(rollouts).digest.whole if rollouts else "0" * 64
            case "from" | "to":
                return self.dice.choice(("00:00", "09:00", "24:00", "25:00"))
            case "days":
                return self.dice.choice(("mon-fri", "mon-sun", "someday"))
            case "zone":
                return self.dice.choice(("UTC", "Europe/Amsterdam", "Moon/Sea"))
            case "token":
                return self.token()
            case _:
                return self.dice.choice((*WORDS, *ODD_VALUES))

    def token(self) -> str:
        """Return a signed token, mostly a good one."""
        rollouts = list(self.inside.state.index.rollouts.values())
        if not rollouts:
            return "x"
        rollout = self.dice.choice(rollouts)
        claims = {
            "service": "jira",
            "rollout": rollout.id,
            "digest": rollout.digest.whole,
            "reason": "CHG-1",
            "gate": self.dice.choice(("start", "continue", "proceed")),
            "answer": self.dice.choice(("yes", "no", "withdraw")),
            "outside": self.dice.choice(("zoe@x", "olga@x", "adam")),
            "expires": self.inside.clock.now() + self.dice.choice((-1.0, 60.0, 60.0, 60.0, 1e9)),
            "nonce": f"{self.dice.randrange(40):016d}",
        }
        return tokens.sign(claims, SECRET)


async def live_rollouts(maker: RequestGenerator) -> None:
    """Let the fleet move now and then, so that all calls find something to do."""
    inside, dice = maker.inside, maker.dice
    inside.clock.advance(dice.random() * 30)
    inside.observe_all_up()
    for target in [t for r in inside.state.index.rollouts for t in inside.state.index.targets(r)]:
        rollout = inside.state.index.rollout(target.rollout)
        if rollout.closed or target.phase != "pending" or dice.random() > 0.05:
            continue
        if not any(each.gate == "start" for each in rollout.opened):
            continue
        try:
            await (inside.fail if dice.random() < 0.5 else inside.finish)(target.rollout, target.node)
        except Exception:  # the invariants forbid most of these, and are right
            continue


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))]
)
async def test_random_requests_change_nothing_unseen(tmp_path: Path, part: int) -> None:
    key_file = tmp_path / "jira.key"
    key_file.touch(mode=0o600)
    key_file.write_bytes(SECRET)
    services = {"jira": {"key_file": str(key_file), "teams": ["infra"]}}
    kept: dict[str, Any] = {}

    async def sqlite(compiled: Any) -> Any:
        kept["compile"] = compiled
        return await open_store(tmp_path / "state", compile_plan=compiled)

    statuses: dict[int, int] = {}
    state_dir = str(tmp_path / "state")
    async with control_environment(
        tmp_path, store=sqlite, service_accounts=services, state_dir=state_dir
    ) as inside:
        maker = RequestGenerator(random.Random(SEED + part), inside)
        connector = aiohttp.UnixConnector(path=str(tmp_path / "run" / "control.sock"))
        async with aiohttp.ClientSession(connector=connector, base_url="http://x") as session:
            for number in range(REQUESTS // PARTS):
                if number % 50 == 0:
                    await live_rollouts(maker)
                inside.name_service.current = maker.dice.choice(list(ACCOUNTS.values()))
                before, seq = inside.state.index.snapshot(), inside.state.changes.latest_seq
                method, target, body, media = maker.request()
                headers = {"Content-Type": media} if body is not None else {}
                async with session.request(method, target, data=body, headers=headers) as answer:
                    said = await answer.read()
                statuses[answer.status] = statuses.get(answer.status, 0) + 1
                asked = (number, method, target, body)
                assert answer.status < 500, (asked, said)
                if inside.state.index.snapshot() != before:
                    assert answer.status in (200, 201), (asked, said)
                    assert inside.state.changes.latest_seq > seq, (asked, said)
        assert {200, 400, 403, 404, 409} <= set(statuses)
        assert statuses[200] + statuses.get(201, 0) > REQUESTS // PARTS // 5, "most of it was nonsense"
        verdict = await inside.state.store.verify_audit()
        assert verdict.ok
        assert verdict.chain.entries == inside.state.changes.latest_seq
        limits = compile_limits(inside.state.settings)
        index = Projection.build(await inside.state.store.load_snapshot(), limits, kept["compile"])
        remembered, known = index.snapshot(), inside.state.index.snapshot()
        assert (remembered.holds, remembered.team_rules) == (known.holds, known.team_rules)
        assert {each.id: each for each in remembered.freezes} == {each.id: each for each in known.freezes}
        there = {each.id: each for each in remembered.rollouts}
        assert there.items() <= {each.id: each for each in known.rollouts}.items()
        await asyncio.sleep(0)
