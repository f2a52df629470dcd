"""Compilation of plan content and settings into the core's values.

Content comes from a validated file, or from the database where submit stored it;
both compile to the same plan.  It validates and resolves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from machines.model import plan
from machines.model.limits import Budget, Limits, PoolRule, RunnerRule
from machines.model.node import NodeKind
from machines.model.preparation import PrepareKind, PrepareStage, entry_of_record
from machines.model.selector import parse_selector
from machines.model.windows import Window
from rolloutd import plugin
from rolloutd.planfile.change import COMMON_STAGE_KEYS, DEFAULT_GUARD
from rolloutd.planfile.model import WindowSpec
from rolloutd.ports import SourceRules
from rolloutd.settings import PoolKey, Settings

JSON = Any
StepContent = Mapping[str, Mapping[str, JSON]]

ROLLBACK = "rollback"
"""Name of the stage that undoes the change; of several the prefix."""

CANARY_WAVE = "canary"
FLEET_WAVE = "fleet"

CORE_PARAMS = frozenset({"in_service", "where", "baseline", "repair", "inconclusive"})
"""Parameters for the core, which the adapter does not get."""

MIN_TIMEOUT_S = 1.0
"""Minimum limit of a step without `within` and `timeout`: its adapter has a limit of its own."""

GUARD_STEP = "guard"

GUARD_TIMEOUT_S = 120.0
"""Limit of one command of the guard on the node: a backup of some megabytes on a busy node."""

_DEFAULT_CONFIRMATION: StepContent = {"reachable": {"within": 300}}

_DEFAULT_ROLLBACK_CHECK: StepContent = {"reachable": {"within": 300}}
"""Check after a rollback if the plan has none that applies: no node returns to service unchecked."""


class TeamChecks(Protocol):
    """The part of a team's settings that has its own checks, each `{kind: params}`."""

    @property
    def checks(self) -> Sequence[StepContent]: ...


def compile_plan(content: Mapping[str, JSON], *, teams: Mapping[str, TeamChecks]) -> plan.Plan:
    """Return the plan of a content, with each team's own checks, which apply to its nodes only."""
    spec = content["spec"]
    verify = compile_steps(plugin.CHECKS, spec["verify"], "verify")
    rollback, cleanup = spec["rollback"], (spec.get("prepare") or {}).get("cleanup")
    stages = tuple(_compile_stage(stage["name"], stage) for stage in spec["maintain"])
    return plan.Plan(
        name=content["metadata"]["name"],
        owner=content["metadata"]["owner"],
        selector=parse_selector(spec["targets"]),
        waves=_compile_waves(spec),
        stages=stages,
        verify=verify + _compile_team_checks(teams),
        # A plan stored by a version without probes lacks the key.
        traffic=compile_steps(plugin.PROBES, spec.get("traffic", ()), "traffic"),
        idle_for_s=float(spec.get("idle_for") or 0.0),
        poll_s=float(spec.get("poll") or plan.DEFAULT_POLL_S),
        isolate=compile_steps(plugin.ISOLATORS, spec["isolate"], "isolate"),
        rollback=_rollback_of(stages) if rollback is None else (_compile_stage(ROLLBACK, rollback),),
        rollback_verify=_compile_rollback_checks(rollback, verify),
        on_failure=plan.OnFailure(spec.get("on_failure", plan.OnFailure.PAUSE)),
        at_most=spec.get("at_most"),
        start_timeout_s=spec["limits"].get("start"),
        fallback_verify=compile_steps(plugin.CHECKS, [_DEFAULT_ROLLBACK_CHECK], "rollback.verify"),
        gates={
            gate: _compile_vote_requirement(spec["gates"][gate.value])
            for gate in plan.GateName
            if gate.value in spec["gates"]
        },
        windows=compile_windows(spec["windows"]),
        max_parallel=spec["max_parallel"],
        max_unready=((spec.get("strategy") or {}).get("incremental") or {}).get("maxUnready"),
        pool_keys=tuple(spec["pools"]["by"]),
        enrol=plan.EnrolPolicy(spec["enrol"]),
        probation_s=float(spec["probation"]),
        isolate_timeout_s=float(spec["limits"]["isolate"]),
        expected_s=float(sum(stage["expected"] for stage in spec["maintain"])),
        pilot=_compile_pilot(spec.get("pilot")),
        guard=_compile_guard(spec.get("guard")),
        skip_compliant=bool(spec.get("skip_compliant", False)),
        keep=bool(spec.get("keep", False)),
        joins_train=bool(spec.get("train", False)),
        drift_every_s=_compile_drift_interval(spec),
        vote_ttl_s=_seconds(spec["limits"]["votes"]),
        prepare=_compile_prepare(spec.get("prepare")),
        prepare_windows=compile_windows((spec.get("prepare") or {}).get("windows", ())),
        prepare_cleanup=None if cleanup is None else _compile_stage("prepare-cleanup", cleanup),
        bootstrap=bool(spec.get("bootstrap", False)),
        values=spec.get("values", {}),
        shown_variables=tuple(spec.get("show_vars", ())),
    )


def compile_limits(settings: Settings) -> Limits:
    """Return the limits of the settings, which apply to every plan."""
    return Limits(
        pools={key: _compile_pool_rule(pool) for key, pool in settings.pools.items()},
        max_parallel=settings.max_parallel,
        observe_within_s=float(settings.observe_within_s),
        team_windows={
            name: tuple(each.window() for each in team.windows)
            for name, team in settings.teams.items()
            if team.windows
        },
        observe_only=settings.observe_only,
        teams=frozenset(settings.teams),
        runners=_compile_runners(settings),
        workers={
            f"{each.kind}/{each.params['name']}": each.params["workers"]
            for each in settings.inventory
            if "workers" in each.params
        },
    )


def _compile_runners(settings: Settings) -> tuple[RunnerRule, ...]:
    elsewhere = (
        RunnerRule(each.runner_name, parse_selector(each.match or ""), each.parallel)
        for each in settings.runners
    )
    return (*elsewhere, RunnerRule(plugin.LOCAL_RUNNER)) if settings.local_runner else tuple(elsewhere)


def compile_windows(windows: Sequence[Mapping[str, JSON]]) -> tuple[Window, ...]:
    return tuple(WindowSpec.model_validate(each).window() for each in windows)


def compile_steps(
    group: str, steps: Sequence[StepContent], prefix: str, *, team: str | None = None
) -> tuple[plan.StepDef, ...]:
    """Return the steps of one port's adapters, named `PREFIX.NUMBER.KIND`.

    `timeout_s` limits the whole step: `within`, in which the answer may become
    right, plus the `timeout` of one try (seconds).  A stored plan may name a kind
    that is not installed any more: it has no capabilities, and its step fails.
    """
    adapters = plugin.installed_adapters(group)
    return tuple(
        plan.StepDef(
            name=f"{prefix}.{number}.{kind}",
            kind=kind,
            params={key: value for key, value in params.items() if key not in CORE_PARAMS},
            timeout_s=max(float(params.get("within", 0) + params.get("timeout", 0)), MIN_TIMEOUT_S),
            in_service=bool(params.get("in_service", False)),
            baseline=bool(params.get("baseline", False)),
            repair=str(params.get("repair", "")),
            accepts_unknown=params.get("inconclusive") == "pass",
            drain_timeout_s=_seconds(params.get("drain_timeout")),
            team=team,
            capabilities=adapters[kind].capabilities if kind in adapters else frozenset(),
            where=None if params.get("where") is None else parse_selector(params["where"]),
            node_kinds=adapters[kind].node_kinds if kind in adapters else frozenset(),
            commands=_commands(group, kind),
        )
        for number, step in enumerate(steps)
        for kind, params in step.items()
    )


def _commands(group: str, kind: str) -> frozenset[str]:
    adapters = plugin.installed_adapters(group)
    return plugin.command_parameters(adapters[kind].params) if kind in adapters else frozenset()


def _compile_pool_rule(pool: PoolKey) -> PoolRule:
    values = {value: _compile_budget(rule.max_unavailable) for value, rule in pool.values.items()}
    return PoolRule(_compile_budget(pool.max_unavailable), values)


def _compile_budget(max_unavailable: int | str) -> Budget:
    if isinstance(max_unavailable, int):
        return Budget(count=max_unavailable)
    return Budget(count=None, percent=int(max_unavailable.removesuffix("%")))


def _compile_team_checks(teams: Mapping[str, TeamChecks]) -> tuple[plan.StepDef, ...]:
    return tuple(
        step
        for team in sorted(teams)
        for step in compile_steps(plugin.CHECKS, teams[team].checks, f"team.{team}", team=team)
    )


def _compile_waves(spec: Mapping[str, JSON]) -> tuple[plan.WaveDef, ...]:
    """Return the canaries, the declared waves and the rest.

    Canaries without a selector are the teams' nominated or first nodes, which
    are chosen when targets are resolved.
    """
    canary = spec["canary"]
    first = plan.WaveDef(
        name=CANARY_WAVE,
        select=None if canary is None else parse_selector(canary["select"]),
        max_parallel=1 if canary is None else canary["max_parallel"],
        soak_s=float(spec["soak"]),
        gate=plan.GateName.CONTINUE,
    )
    declared = (
        plan.WaveDef(
            name=wave["name"],
            select=parse_selector(wave["select"]),
            max_parallel=wave["max_parallel"],
            soak_s=float(wave["soak"]),
            gate=None if wave["gate"] is None else plan.GateName(wave["gate"]),
        )
        for wave in spec["waves"]
    )
    waves = (first, *declared, plan.WaveDef(name=FLEET_WAVE))
    if (spec.get("pilot") or {}).get("node") is None:
        return waves
    return (plan.WaveDef(name=plan.PILOT_WAVE, max_parallel=1, gate=plan.GateName.START), *waves)


def _compile_drift_interval(spec: Mapping[str, JSON]) -> float | None:
    if spec.get("every") is not None:
        return float(spec["every"])
    return plan.DEFAULT_DRIFT_EVERY_S if spec.get("keep") else None


def _compile_pilot(pilot: Mapping[str, JSON] | None) -> plan.Pilot | None:
    return None if pilot is None else plan.Pilot(pilot["node"], pilot["waived"] or "")


def _compile_guard(guard: Mapping[str, JSON] | None) -> plan.Guard | None:
    """Return the guard; a check that confirms the change has no longer than the node waits."""
    if guard is None:
        return None
    after_s = float(guard["after"])
    confirm = compile_steps(plugin.CHECKS, guard["confirm"] or (_DEFAULT_CONFIRMATION,), "confirm")
    params = {key: value for key, value in guard.items() if key not in ("kind", "confirm")}
    kind, timeout_s = guard.get("kind", DEFAULT_GUARD), float(guard.get("timeout", GUARD_TIMEOUT_S))
    return plan.Guard(
        step=plan.StepDef(
            GUARD_STEP, kind, params, timeout_s=timeout_s, commands=_commands(plugin.GUARDS, kind)
        ),
        after_s=after_s,
        confirm=tuple(
            replace(
                check,
                timeout_s=min(check.timeout_s, max(after_s, MIN_TIMEOUT_S)),
                params={**check.params, "within": min(float(check.params.get("within", 0)), after_s)},
            )
            for check in confirm
        ),
    )


def _seconds(duration: JSON) -> float | None:
    return None if duration is None else float(duration)


def _compile_stage(name: str, content: Mapping[str, JSON]) -> plan.MaintainStage:
    stage = plan.MaintainStage(
        name=name,
        playbook=content.get(plugin.PLAYBOOK, ""),
        variables=dict(content.get("vars", {})),
        timeout_s=float(content["timeout"]),
        on_unknown=plan.OnUnknownPolicy(content.get("on_unknown", plan.OnUnknownPolicy.VERIFY)),
    )
    if plugin.PLAYBOOK in content:
        return stage
    kind = next(key for key in content if key not in COMMON_STAGE_KEYS)
    change = plugin.installed_adapters(plugin.CHANGES).get(kind)
    node_kinds = frozenset[NodeKind]() if change is None else change.node_kinds
    return replace(stage, kind=kind, params=content[kind], node_kinds=node_kinds)


def _rollback_of(stages: Sequence[plan.MaintainStage]) -> tuple[plan.MaintainStage, ...]:
    """Return the stages that restore what these recorded before them, none if one of them records nothing."""
    if not plugin.are_reversible(stage.kind for stage in stages):
        return ()
    names = [ROLLBACK] if len(stages) == 1 else [f"{ROLLBACK}.{stage.name}" for stage in stages]
    undoing = (
        replace(stage, name=name, undoes=stage.step) for name, stage in zip(names, stages, strict=True)
    )
    return tuple(reversed(tuple(undoing)))


def _compile_rollback_checks(
    rollback: Mapping[str, JSON] | None, verify: Sequence[plan.StepDef]
) -> tuple[plan.StepDef, ...]:
    if rollback is not None and rollback["verify"] is not None:
        return compile_steps(plugin.CHECKS, rollback["verify"], "rollback.verify")
    return tuple(step for step in verify if plan.Capability.JUDGES_LIVENESS in step.capabilities)


def _compile_prepare(prepare: Mapping[str, JSON] | None) -> tuple[PrepareStage, ...]:
    """Return the prepare stages, with what submit resolved in the source: manifests and playbook digests."""
    if prepare is None:
        return ()
    stages: list[PrepareStage] = []
    for kind, item in ((kind, item) for each in prepare["stages"] for kind, item in each.items()):
        built_by = next(
            (s.name for s in stages if s.manifest_file and s.manifest_file == item.get("manifest")), ""
        )
        stage = _compile_prepare_stage(PrepareKind(kind), item, prepare, built_by)
        if stage.kind is PrepareKind.INSTALL:
            stage = replace(stage, reads=tuple(s for s in stages if s.kind is PrepareKind.COPY))
        stages.append(stage)
    return tuple(stages)


def _compile_prepare_stage(
    kind: PrepareKind, item: Mapping[str, JSON], prepare: Mapping[str, JSON], built_by: str
) -> PrepareStage:
    resolved = prepare.get("resolved", {}).get(item["name"], {})
    tolerate = prepare["tolerate"] if item.get("tolerate") is None else item["tolerate"]
    where = item.get("where")
    return PrepareStage(
        name=item["name"],
        kind=kind,
        playbook=item["playbook"] or "",
        playbook_digest=resolved.get("playbook", ""),
        host=item.get("host") or "",
        variables=dict(item["vars"]),
        timeout_s=float(item["timeout"]),
        manifest_file=item.get("manifest", ""),
        manifest=tuple(entry_of_record(each) for each in resolved.get("artifacts", ())),
        built_by="" if "artifacts" in resolved else built_by,
        to=item.get("to", ""),
        method=item.get("method", ""),
        url=item.get("url") or "",
        rate_bps=item.get("rate"),
        rate_by=item.get("rate_by") or "",
        max_parallel=item.get("max_parallel", 1),
        tolerate=_compile_budget(tolerate),
        may_change=tuple(item.get("may_change", ())),
        select=None if where is None else parse_selector(where),
        force=item["name"] in prepare.get("force", ()),
        force_nodes=tuple(prepare.get("force_nodes", ())),
    )


def _compile_vote_requirement(requirement: Mapping[str, JSON]) -> plan.VoteRequirement:
    return plan.VoteRequirement(
        owner=requirement["owner"],
        each_team=requirement["each_team"],
        four_eyes=requirement["four_eyes"],
        per_team=requirement["per_team"],
    )


def compile_source_rules(params: Mapping[str, Any]) -> SourceRules:
    """Return the rules of one inventory source from the keys that every source has."""
    return SourceRules(
        refresh_s=params.get("refresh"),
        stale_after_s=params["stale_after"],
        max_removed=_compile_budget(params["max_removed"]),
        expect={source: parse_selector(text) for source, text in params["expect"].items()},
    )
