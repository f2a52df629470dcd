"""Makes the core's values from a plan's content and from the settings.

Content comes from a file that was read without mistakes, or from the database
where it was stored at submit; both compile to the same plan, after any number
of restarts.  Nothing is checked here and nothing is looked up: what was
resolved at submit (commit, targets) is kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from zoneinfo import ZoneInfo

from machines.limits import Budget, Limits, PoolRule
from machines.plan import Enrol, GateName, Need, OnUnknown, Plan, Stage, StepSpec, WaveSpec
from machines.selector import parse
from machines.windows import DAYS, Window
from rolloutd.planfile.scalars import clock_minute
from rolloutd.settings import PoolKey, Settings

JSON = Any
StepContent = Mapping[str, Mapping[str, JSON]]

CANARY_WAVE = "canary"
FLEET_WAVE = "fleet"

LEAST_TIMEOUT_S = 1.0
"""The limit of a step that is asked once and names none: it keeps its adapter's own."""

HOLDS_AFTER_ROLLBACK = frozenset({"reachable", "kubernetes"})
"""Checks that say a node is well, whatever its configuration; the others describe the new state."""

_REACHABLE: StepContent = {"reachable": {"within": 300}}
"""Asked after a rollback where the plan has no check that could hold: nobody puts back what nobody judged."""


class TeamChecks(Protocol):
    """What is needed of a team's settings: its own checks, as content."""

    @property
    def checks(self) -> Sequence[StepContent]:
        """The team's checks, each `{kind: params}`."""
        ...


def compile_plan(content: Mapping[str, JSON], *, teams: Mapping[str, TeamChecks]) -> Plan:
    """Return the plan that a content means, with every team's own checks after the plan's.

    A team's checks carry its name and are for its nodes alone.
    """
    spec = content["spec"]
    verify = compile_steps(spec["verify"], "verify")
    stages = tuple(_stage(stage) for stage in spec["maintain"])
    return Plan(
        name=content["metadata"]["name"],
        owner=content["metadata"]["owner"],
        selector=parse(spec["targets"]),
        waves=_waves(spec),
        stages=stages,
        verify=verify + _team_steps(teams),
        # A plan that was stored by a version without probes does not have the key.
        traffic=compile_steps(spec.get("traffic", ()), "traffic"),
        isolate=compile_steps(spec["isolate"], "isolate"),
        rollback=_rollback(spec["rollback"]),
        rollback_verify=_rollback_verify(spec["rollback"], verify),
        gates={gate: _need(spec["gates"][gate.value]) for gate in GateName},
        windows=compile_windows(spec["windows"]),
        max_parallel=spec["max_parallel"],
        pool_keys=tuple(spec["pools"]["by"]),
        enrol=Enrol(spec["enrol"]),
        probation_s=float(spec["probation"]),
        isolate_timeout_s=_isolate_timeout_s(spec),
        expected_s=float(sum(stage["expected"] for stage in spec["maintain"])),
        vote_ttl_s=None if spec["limits"]["votes"] is None else float(spec["limits"]["votes"]),
    )


def compile_limits(settings: Settings) -> Limits:
    """Return the limits that the settings put on every plan."""
    return Limits(
        pools={key: _pool_rule(pool) for key, pool in settings.pools.items()},
        max_parallel=settings.max_parallel,
        observe_within_s=float(settings.observe_within_s),
        team_windows={
            name: compile_windows(team.window_content)
            for name, team in settings.teams.items()
            if team.windows
        },
        observe_only=settings.observe_only,
        teams=frozenset(settings.teams),
    )


def compile_windows(windows: Sequence[Mapping[str, JSON]]) -> tuple[Window, ...]:
    """Return the windows of a plan's or a team's content."""
    return tuple(
        Window(
            days=frozenset(DAYS.index(day) for day in window["days"]),
            start_minute=clock_minute(window["from"]),
            end_minute=clock_minute(window["to"]),
            zone=ZoneInfo(window["zone"]),
        )
        for window in windows
    )


def compile_steps(
    steps: Sequence[StepContent], prefix: str, *, team: str | None = None
) -> tuple[StepSpec, ...]:
    """Return isolators or checks, named `PREFIX.NUMBER.KIND`.

    `params` keep `within` and `timeout` (seconds, of one try); `timeout_s` is
    the limit of the whole step: all the time in which the answer may become
    right, and one try.
    """
    return tuple(
        _step(f"{prefix}.{number}.{kind}", kind, params, team)
        for number, step in enumerate(steps)
        for kind, params in step.items()
    )


def _pool_rule(pool: PoolKey) -> PoolRule:
    values = {value: _budget(rule.max_unavailable) for value, rule in pool.values.items()}
    return PoolRule(_budget(pool.max_unavailable), values)


def _budget(max_unavailable: int | str) -> Budget:
    if isinstance(max_unavailable, int):
        return Budget(count=max_unavailable)
    return Budget(count=None, percent=int(max_unavailable.removesuffix("%")))


def _step(name: str, kind: str, params: Mapping[str, JSON], team: str | None) -> StepSpec:
    return StepSpec(
        name=name,
        kind=kind,
        params={key: value for key, value in params.items() if key != "in_service"},
        timeout_s=max(float(params.get("within", 0) + params.get("timeout", 0)), LEAST_TIMEOUT_S),
        in_service=bool(params.get("in_service", False)),
        team=team,
    )


def _team_steps(teams: Mapping[str, TeamChecks]) -> tuple[StepSpec, ...]:
    return tuple(
        step
        for team in sorted(teams)
        for step in compile_steps(teams[team].checks, f"team.{team}", team=team)
    )


def _waves(spec: Mapping[str, JSON]) -> tuple[WaveSpec, ...]:
    """Return the canaries, the declared waves and the rest.

    Canaries without a selector are the teams' nominated or first nodes, which
    are chosen when targets are resolved.
    """
    canary = spec["canary"]
    first = WaveSpec(
        name=CANARY_WAVE,
        select=None if canary is None else parse(canary["select"]),
        max_parallel=1 if canary is None else canary["max_parallel"],
        soak_s=float(spec["soak"]),
        gate=GateName.CONTINUE,
    )
    declared = (
        WaveSpec(
            name=wave["name"],
            select=parse(wave["select"]),
            max_parallel=wave["max_parallel"],
            soak_s=float(wave["soak"]),
            gate=None if wave["gate"] is None else GateName(wave["gate"]),
        )
        for wave in spec["waves"]
    )
    return (first, *declared, WaveSpec(name=FLEET_WAVE))


def _isolate_timeout_s(spec: Mapping[str, JSON]) -> float:
    """Return the limit of isolating: that of the drain where the plan names one, however long it is."""
    drains = [
        params["drain_timeout"]
        for step in spec["isolate"]
        for params in step.values()
        if params.get("drain_timeout") is not None
    ]
    return float(max(drains, default=spec["limits"]["isolate"]))


def _stage(stage: Mapping[str, JSON]) -> Stage:
    return Stage(
        name=stage["name"],
        playbook=stage["playbook"],
        variables=dict(stage["vars"]),
        timeout_s=float(stage["timeout"]),
        on_unknown=OnUnknown(stage["on_unknown"]),
    )


def _rollback(rollback: Mapping[str, JSON] | None) -> Stage | None:
    if rollback is None:
        return None
    return Stage(
        name="rollback",
        playbook=rollback["playbook"],
        variables=dict(rollback["vars"]),
        timeout_s=float(rollback["timeout"]),
    )


def _rollback_verify(rollback: Mapping[str, JSON] | None, verify: Sequence[StepSpec]) -> tuple[StepSpec, ...]:
    if rollback is not None and rollback["verify"] is not None:
        return compile_steps(rollback["verify"], "rollback.verify")
    holding = tuple(step for step in verify if step.kind in HOLDS_AFTER_ROLLBACK)
    return holding or compile_steps([_REACHABLE], "rollback.verify")


def _need(need: Mapping[str, JSON]) -> Need:
    return Need(
        owner=need["owner"],
        each_team=need["each_team"],
        four_eyes=need["four_eyes"],
        per_team=need["per_team"],
    )
