"""The shipped alert rules and dashboard, by promtool and by a real Prometheus that reads real metrics."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.service.metrics import MetricsCollector
from tests.rolloutd.control_environment import control_environment
from tests.support.prometheus import LIMIT_S, Prometheus

MONITORING = Path(__file__).parents[3] / "deploy/monitoring"
RULES = MONITORING / "rolloutd.rules.yml"
DOCUMENT = MONITORING.parents[1] / "docs/metrics.md"

WITHOUT_DATA = {"rolloutd_adapter_failures", "rolloutd_source_held", "rolloutd_source_age_seconds"}
"""Series that exist only while something fails, or with a source, which the environment has not."""


@pytest.mark.servers("prometheus")
def test_promtool_accepts_rules_and_their_tests() -> None:
    for words in (("check", "rules", RULES), ("test", "rules", MONITORING / "rolloutd.test.yml")):
        done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_rule_is_tested_and_documented() -> None:
    alerts = {rule["alert"] for rule in rules()}
    tested = {
        case["alertname"]
        for test in yaml.safe_load((MONITORING / "rolloutd.test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert tested == alerts
    assert set(re.findall(r"(?m)^\| `(Rollout\w+)`", DOCUMENT.read_text())) == alerts


def test_rules_and_dashboard_name_documented_metrics() -> None:
    documented = set(re.findall(r"`(rolloutd_\w+)`", DOCUMENT.read_text()))
    expressions = [*(rule["expr"] for rule in rules()), *queries()]
    used = {
        name.removesuffix("_bucket") for each in expressions for name in re.findall(r"rolloutd_\w+", each)
    }
    assert used <= documented


@pytest.mark.servers("prometheus")
async def test_real_prometheus_evaluates_all_queries(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        page = await MetricsCollector(inside.state, "0").render()
    server = Prometheus(page, rules=[RULES], job="rolloutd").start(tmp_path / "prometheus")
    try:
        async with asyncio.timeout(LIMIT_S):
            while not server.query("rolloutd_info") or {"unknown"} & set(health(server)):
                await asyncio.sleep(0.05)
        assert set(health(server)) == {"ok"}
        for query in queries():
            result = server.query(query)
            is_optional = any(name in query for name in WITHOUT_DATA)
            assert result or is_optional or "rate(" in query or "increase(" in query, query
    finally:
        server.stop()


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    """Return the dashboard's queries as Grafana sends them when all instances and rollouts are chosen."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    return [expression.replace("$instance", ".*").replace("$rollout", ".*") for expression in expressions]


def health(server: Prometheus) -> list[str]:
    """Return the health of each rule, as Prometheus evaluated it."""
    return [rule["health"] for group in server.get("rules")["groups"] for rule in group["rules"]]
