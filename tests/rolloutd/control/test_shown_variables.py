"""Values of variables that nobody allowed to show are in no answer, log or audit; the database seals them."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rolloutd import planfile
from rolloutd.configuration.shown_variables import DIGEST_PREFIX, shown_plan
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.plugin.templates import RenderFailed, render
from rolloutd.ports import DiscoveredNode
from rolloutd.store import open_store
from rolloutd.store.sqlite.database import FILE_NAME
from tests.rolloutd.control.test_configuration import run_cli
from tests.rolloutd.control.test_routes import ROUTES, assert_matches_schema, prepare_fleet
from tests.rolloutd.control_environment import NODES, PLAN, REBOOTS, ControlEnvironment, control_environment

NAMES = ("community", "psk", "dsn", "ntp_key", "snmp", "x")
"""Names that say nothing of a secret."""

OF_INVENTORY = {name: f"inventory-{name}-Zq7x" for name in NAMES}

OF_PLAN = {name: f"plan-{name}-Zq7x" for name in (*NAMES, "own")}

MARK = "Zq7x"
"""Part of each planted value."""


def variables(values: dict[str, str]) -> dict[str, Any]:
    """Return the values at the top, in a list and in a mapping."""
    given: dict[str, Any] = dict(values)
    given["snmp"] = [{"user": "ops", "key": values["snmp"]}, values["snmp"]]
    given["x"] = {"deep": {"deeper": [values["x"]]}}
    return given


def plan_with(values: dict[str, str], *, shows: Sequence[str] = ()) -> str:
    given = json.dumps(variables(values))
    shown = f"show_vars: {json.dumps(list(shows))}\n  " if shows else ""
    return (
        PLAN.replace("{playbook: site.yml}", f"{{playbook: site.yml, vars: {given}}}")
        .replace("{playbook: undo.yml}", f"{{playbook: undo.yml, vars: {given}}}")
        .replace("maintain:", f"{shown}maintain:")
    )


class Hosts:
    """An inventory with secrets under names that do not say so."""

    source = "hosts"

    async def refresh(self) -> Sequence[DiscoveredNode]:
        return [
            DiscoveredNode(node.name, "hosts", labels=node.labels, connection=variables(OF_INVENTORY))
            for node in NODES
        ]


@pytest.fixture
def on_disk(tmp_path: Path) -> Any:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compiled)

    return sqlite


def columns_with(mark: str, state_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield each table and column of the database with a planted value."""
    with closing(sqlite3.connect(state_dir / FILE_NAME)) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            for _, column, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
                sql = f"SELECT count(*) FROM {table} WHERE CAST({column} AS TEXT) LIKE ?"
                if database.execute(sql, (f"%{mark}%",)).fetchone()[0]:
                    yield table, column


async def answers(inside: ControlEnvironment, plan: str) -> dict[tuple[str, str], str]:
    """Return the answer of each route, as text."""
    asked = await prepare_fleet(inside, plan)
    routes = {(route.method, route.path): route for route in ROUTES}
    assert set(asked) == set(routes)
    return {
        key: json.dumps(
            await assert_matches_schema(inside, routes[key].streams, who, key[0].lower(), path, body)
        )
        for key, (who, path, body) in asked.items()
        if "token" not in key[1]  # needs a service account, and shows no plan
    }


async def test_hidden_value_is_nowhere(
    tmp_path: Path, on_disk: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "rolloutd")
    state_dir = str(tmp_path / "state")
    async with control_environment(tmp_path, store=on_disk, state_dir=state_dir, fleetlock=REBOOTS) as inside:
        await InventoryRefresher(inside.state, [Hosts()]).refresh()
        assert inside.state.host("p1").connection["psk"] == OF_INVENTORY["psk"]
        found = await answers(inside, plan_with(OF_PLAN))
        assert [key for key, text in found.items() if MARK in text] == []
        plan = json.loads(found["GET", "/v1/rollouts/{r}/plan"])["content"]
        places = (plan["spec"]["maintain"][0], plan["spec"]["rollback"])
        assert all(place["vars"]["psk"].startswith(DIGEST_PREFIX) for place in places)
        rollout = next(iter(inside.state.index.rollouts))
        lines = ("report {r}", "review {r}", "config p1 --record current", "status {r}", "audit -o json")
        for line in lines:
            await run_cli(inside, *line.replace("{r}", rollout).split())
            assert MARK not in "".join(capsys.readouterr()), line
        for entry in await inside.state.store.read_audit(limit=10_000):
            assert MARK not in repr(entry)
        # The plan's own values are kept for the runs of the rollout, in one place.
        assert set(columns_with(MARK, tmp_path / "state")) == {("rollout", "content")}
        assert set(columns_with("inventory-", tmp_path / "state")) == set()
    assert MARK not in caplog.text


async def test_plan_and_settings_show_names_that_they_allow(tmp_path: Path) -> None:
    async with control_environment(tmp_path, show_vars=["ntp_*"]) as inside:
        await InventoryRefresher(inside.state, [Hosts()]).refresh()
        rollout = await inside.start(text=plan_with(OF_PLAN, shows=["own", "psk"]))
        await inside.finish(rollout, "p1")
        found = await inside.request("nora", "get", "/v1/nodes/p1/configuration")
        given = found["current"]["values"]["variables"]
        shown = {name for name in OF_PLAN if given[name] == OF_PLAN[name]}
        assert shown == {"own", "psk", "ntp_key"}
        review = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/review")
        plan = {each["path"]: each["value"] for each in review["plan"]}
        assert plan["maintain[0].vars.own"] == OF_PLAN["own"]
        assert plan["maintain[0].vars.dsn"].startswith(DIGEST_PREFIX)
        # Of the inventory the settings alone decide.
        other = PLAN.replace("name: sysctl", "name: other")
        inventory_only = await inside.start(text=other.replace("maintain:", "show_vars: [psk]\n  maintain:"))
        await inside.finish(inventory_only, "s1")
        found = await inside.request("nora", "get", "/v1/nodes/s1/configuration")
        given = found["current"]["values"]["variables"]
        assert (given["ntp_key"], given["psk"][:7]) == (OF_INVENTORY["ntp_key"], DIGEST_PREFIX)


async def test_review_names_changed_variables_without_values(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        first = await inside.start(text=plan_with(OF_PLAN))
        await inside.finish(first, "p1")
        await inside.request("olga", "post", f"/v1/rollouts/{first}/cancel", {"reason": "next"})
        second = await inside.submit(text=plan_with({**OF_PLAN, "psk": "plan-other-Zq7x"}))
        review = await inside.request("nora", "get", f"/v1/rollouts/{second}/review")
        differences = {each["path"]: each for each in review["plan_differences"]}
        assert set(differences) == {"maintain[0].vars.psk", "rollback.vars.psk"}
        changed = differences["maintain[0].vars.psk"]
        assert changed["before"] != changed["after"]
        assert MARK not in json.dumps(review)


def test_each_variables_field_of_the_plan_is_hidden() -> None:
    schema = planfile.schema()
    free = [
        (title, name)
        for title, section in {**schema["$defs"], "plan": schema}.items()
        for name, field in section.get("properties", {}).items()
        if "vars" in name and name != "show_vars" and field.get("format") != "variables"
    ]
    assert free == []
    prepare = {"install": {"playbook": "a.yml", "vars": {"psk": "plan-a-Zq7x"}}}
    cleanup = {"playbook": "b.yml", "vars": {"psk": "plan-b-Zq7x"}}
    section = json.dumps({"stages": [prepare], "cleanup": cleanup})
    plan = planfile.read(PLAN.replace("maintain:", f"prepare: {section}\n  maintain:").encode(), "plan.yaml")
    assert MARK in json.dumps(plan.content)
    assert MARK not in json.dumps(shown_plan(plan.content, b"key", ()))


def test_plan_without_the_key_keeps_its_digest() -> None:
    def digest_of(text: str) -> str:
        content = planfile.read(text.encode(), "plan.yaml").content
        return planfile.digest(content, {"kind": "git", "pin": "a"}, ["n1"])["whole"]

    plain = plan_with(OF_PLAN)
    assert "show_vars" not in planfile.read(plain.encode(), "plan.yaml").content["spec"]
    assert digest_of(plain) == digest_of(plain.replace("maintain:", "show_vars: []\n  maintain:"))
    assert digest_of(plain) != digest_of(plan_with(OF_PLAN, shows=["own"]))


def test_command_that_cannot_take_a_value_does_not_show_it() -> None:
    with pytest.raises(RenderFailed) as refused:
        render(
            {"run": "sh -c '{{ vars.psk }}'"},
            node="n1",
            address="n1",
            labels={},
            variables={"psk": f"a'b {MARK}"},
            commands=["run"],
        )
    assert MARK not in str(refused.value)
