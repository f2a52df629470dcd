"""What Flux, Argo CD and kube-state-metrics read of a rollout, by the rules that they document.

Argo CD runs its rule by a Lua 5.1; the rule of Flux is kstatus's, written here after its document.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rolloutd.control.rollouts import wire
from tests.rolloutd.operator.test_controller import DEPLOY, Fleet, fleet

HEALTH = "resource.customizations.health.rolloutd.io_MaintenanceRollout"


def kstatus(obj: Any) -> str:
    """Judge an object as Flux does: the generic rules of kstatus."""
    status = obj.get("status") or {}
    if obj["metadata"].get("deletionTimestamp"):
        return "Terminating"
    if "observedGeneration" in status and status["observedGeneration"] != obj["metadata"]["generation"]:
        return "InProgress"
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"


def argocd(obj: Any) -> str:
    """Judge an object by the shipped Lua, as Argo CD does."""
    script = yaml.safe_load((DEPLOY / "argocd.yaml").read_text())["data"][HEALTH]
    program = f"obj = {lua(obj)}\nlocal function health()\n{script}\nend\nio.write(health().status)"
    interpreter = shutil.which("lua5.1") or "lua5.1"
    done = subprocess.run([interpreter, "-"], input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lua(value: Any) -> str:
    """Return a value of JSON as a literal of Lua."""
    match value:
        case None:
            return "nil"
        case dict():
            return "{" + ", ".join(f"[{lua(key)}] = {lua(item)}" for key, item in value.items()) + "}"
        case list():
            return "{" + ", ".join(map(lua, value)) + "}"
        case _:
            return json.dumps(value)


async def health(seen: Fleet) -> tuple[str, str]:
    obj = seen.kubernetes.objects.get("maintenancerollouts", "ops", "kernel")
    return kstatus(obj), argocd(obj)


@pytest.mark.servers("lua5.1")
async def test_health_follows_rollout(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply()
        assert await health(seen) == ("InProgress", "Progressing")
        await seen.act()
        assert await health(seen) == ("InProgress", "Suspended")
        rollout = await seen.open_start()
        await seen.act()
        assert await health(seen) == ("InProgress", "Progressing")
        await seen.inside.fail(rollout, "p1")
        await seen.act()
        assert await health(seen) == ("Failed", "Degraded")


@pytest.mark.servers("lua5.1")
async def test_health_of_refused_plan_is_failed(tmp_path: Path) -> None:
    async with fleet(tmp_path) as seen:
        seen.apply(plan="kind: nothing")
        await seen.act()
        assert await health(seen) == ("Failed", "Degraded")


def test_unread_object_is_not_current() -> None:
    [definition, *_] = yaml.safe_load_all((DEPLOY / "crd.yaml").read_text())
    status = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    obj = {"metadata": {"generation": 1}, "status": status["default"]}
    assert kstatus(obj) == "InProgress"


def test_metrics_read_fields_that_exist() -> None:
    [definition, *_] = yaml.safe_load_all((DEPLOY / "crd.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    [resource] = yaml.safe_load((DEPLOY / "kube-state-metrics.yaml").read_text())["spec"]["resources"]
    kinds = {"integer": "Gauge", "string": "StateSet", "array": "Gauge"}
    for metric in resource["metrics"]:
        kind = metric["each"]["type"]
        source = metric["each"][kind[0].lower() + kind[1:]]
        shape = schema
        for key in source["path"]:
            shape = shape["properties"][key]
        assert kinds[shape["type"]] == kind, metric["name"]
        fields = shape.get("items", {}).get("properties", {})
        assert set(source.get("valueFrom", ())) <= set(fields)
    sets = [each["each"]["stateSet"] for each in resource["metrics"] if "stateSet" in each["each"]]
    assert tuple(sets[0]["list"]) == get_args(wire.RolloutState)
