"""Content compiles to the same plan before and after it was stored."""

from __future__ import annotations

import json
from pathlib import Path

from machines.model.limits import Budget
from machines.model.node import NodeKind
from machines.model.plan import (
    Capability,
    EnrolPolicy,
    GateName,
    MaintainStage,
    OnUnknownPolicy,
    Plan,
    VoteRequirement,
)
from rolloutd.planfile import canonical_json, read
from rolloutd.plugin import MACHINES
from rolloutd.settings import TeamSettings, load
from rolloutd.settings.compile import compile_limits, compile_plan
from tests.rolloutd.planfile.plan_samples import DESIGN_PLAN, FULL_PLAN, SMALLEST_PLAN


def compiled(text: str, **teams: TeamSettings) -> Plan:
    return compile_plan(read(text.encode(), "plan.yaml").content, teams=teams)


def team(command: str) -> TeamSettings:
    return TeamSettings.model_validate({"verify": [{"ssh": {"run": command, "in_service": True}}]})


def test_the_plan_of_the_design() -> None:
    plan = compiled(DESIGN_PLAN)
    assert (plan.name, plan.owner) == ("somaxconn-2026-11", "infra")
    assert plan.selector.matches({"role": "worker", "site": "ams"})
    assert not plan.selector.matches({"role": "worker"})
    assert plan.stages == (
        MaintainStage("configure", "sysctl.yml", {"somaxconn": 65535}, 1800.0, OnUnknownPolicy.VERIFY),
    )
    assert plan.rollback == (MaintainStage("rollback", "sysctl-undo.yml", {"somaxconn": 65535}, 1800.0),)
    assert [step.name for step in plan.isolate] == ["isolate.0.playbook"]
    assert [step.name for step in plan.verify] == ["verify.0.reachable", "verify.1.ssh"]
    assert plan.gates[GateName.CONTINUE] == VoteRequirement(owner=1, each_team=1)
    assert (plan.expected_s, plan.probation_s, plan.max_parallel) == (600.0, 120.0, 8)
    assert [str(window) for window in plan.windows] == ["mon-fri 09:00-16:00 Europe/Amsterdam"]
    assert plan.enrol is EnrolPolicy.AUTO


def test_the_waves_are_the_canaries_the_declared_and_the_rest() -> None:
    canary, second, third, fleet = compiled(FULL_PLAN).waves
    assert (canary.name, canary.max_parallel, canary.soak_s, canary.gate) == (
        "canary",
        2,
        7200.0,
        GateName.CONTINUE,
    )
    assert canary.select is not None
    assert (second.name, second.max_parallel, second.soak_s, second.gate) == (
        "second",
        4,
        1800.0,
        GateName.CONTINUE,
    )
    assert (third.name, third.max_parallel, third.soak_s, third.gate) == ("third", None, 0.0, None)
    assert (fleet.name, fleet.select, fleet.gate) == ("fleet", None, None)


def test_a_plan_without_canaries_has_their_wave_all_the_same() -> None:
    canary, fleet = compiled(SMALLEST_PLAN).waves
    assert (canary.name, canary.select, canary.max_parallel) == ("canary", None, 1)
    assert canary.gate is GateName.CONTINUE
    assert fleet.name == "fleet"


def test_everything_a_plan_may_say_arrives() -> None:
    plan = compiled(FULL_PLAN)
    assert plan.enrol is EnrolPolicy.ASK
    assert plan.pool_keys == ("feed",)
    assert plan.isolate_timeout_s == 1200.0
    assert plan.vote_ttl_s == 7 * 86400.0
    assert plan.expected_s == 300.0 + 900.0
    assert [stage.name for stage in plan.stages] == ["stage", "configure"]
    assert plan.gates[GateName.START] == VoteRequirement(owner=2, four_eyes=True)
    assert plan.gates[GateName.CONTINUE] == VoteRequirement(owner=1, each_team=1, per_team=True)
    command, playbook = plan.isolate
    assert dict(command.params) == {"do": "drain", "undo": "undrain", "look": "is-drained", "timeout": 60}
    assert (command.timeout_s, playbook.timeout_s) == (60.0, 120.0)
    in_service = plan.verify[1]
    assert (in_service.in_service, in_service.timeout_s) == (True, 90.0)
    assert "in_service" not in in_service.params
    assert in_service.params["equals"] == "x"
    assert "matches" not in in_service.params


def test_traffic_probes_compile_and_default_to_none() -> None:
    (probe,) = compiled(FULL_PLAN).traffic
    assert (probe.name, probe.kind, probe.timeout_s) == ("traffic.0.kubernetes", "kubernetes", 20.0)
    assert probe.params["pods"] == "app.kubernetes.io/component=job"
    assert probe.params["namespaces"] == ["batch"]
    content = read(FULL_PLAN.encode(), "plan.yaml").content
    del content["spec"]["traffic"]
    assert compile_plan(content, teams={}).traffic == ()


def test_after_a_rollback_its_own_checks_count_else_those_that_can_hold() -> None:
    assert [step.name for step in compiled(FULL_PLAN).rollback_verify] == ["rollback.verify.0.ssh"]
    assert [step.name for step in compiled(DESIGN_PLAN).rollback_verify] == ["verify.0.reachable"]
    only_ssh = compiled(SMALLEST_PLAN.replace("{reachable: {}}", "{ssh: {run: is-new}}"))
    assert only_ssh.rollback_verify == ()
    assert [step.name for step in only_ssh.fallback_verify] == ["rollback.verify.0.reachable"]


def test_a_teams_checks_follow_the_plans_and_carry_its_name() -> None:
    plan = compiled(SMALLEST_PLAN, payments=team("b"), infra=team("a"))
    assert [(step.name, step.team, step.in_service) for step in plan.verify] == [
        ("verify.0.reachable", None, False),
        ("team.infra.0.ssh", "infra", True),
        ("team.payments.0.ssh", "payments", True),
    ]


def test_stored_content_compiles_to_the_same_plan() -> None:
    for text in (DESIGN_PLAN, FULL_PLAN, SMALLEST_PLAN):
        content = read(text.encode(), "plan.yaml").content
        stored = json.loads(canonical_json(content))
        assert compile_plan(stored, teams={}) == compile_plan(content, teams={})


def test_limits_are_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "pools: {rack: {max_unavailable: 25%, values: {r12: {max_unavailable: 0}}}}\n"
        "teams: {infra: {windows: [{days: mon, from: '22:00', to: '04:00'}]}, other: {}}\n"
        "observe_only: true\nobserve_within: 30s\n"
    )
    limits = compile_limits(load(file))
    assert limits.pools["team"].budget_for("any") == Budget(1)
    assert limits.pools["rack"].budget_for("r1") == Budget(count=None, percent=25)
    assert limits.pools["rack"].budget_for("r12") == Budget(0)
    assert [str(window) for window in limits.team_windows["infra"]] == ["mon 22:00-04:00 UTC"]
    assert "other" not in limits.team_windows
    assert (limits.max_parallel, limits.observe_within_s, limits.observe_only) == (64, 30.0, True)


def test_where_and_kinds_of_nodes_reach_the_steps() -> None:
    isolate = "isolate: [{kubernetes: {}}, {command: {do: a, undo: b, where: role=web}}, {none: {}}]"
    plan = compiled(SMALLEST_PLAN.rstrip() + f"\n  {isolate}\n")
    drain, command, none = plan.isolate
    assert (drain.node_kinds, drain.where) == (frozenset({NodeKind.KUBERNETES}), None)
    assert (command.node_kinds, str(command.where)) == (MACHINES, "role=web")
    assert "where" not in command.params
    assert Capability.STAYS_IN_SERVICE in none.capabilities
