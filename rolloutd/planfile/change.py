"""Models of what a plan runs on a node: its stages, the rollback and the guard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import ConfigDict, Field, WrapValidator, field_validator, model_validator

from machines.model.timefmt import format_duration
from rolloutd import plugin
from rolloutd.planfile.document import truncate
from rolloutd.planfile.prepare import OneKind, Variables
from rolloutd.planfile.steps import MAX_STEPS, VerifyStep, params_model, step_model, usable_adapters
from rolloutd.plugin.field_types import InvalidValue, Playbook, PositiveDuration, raise_invalid

DEFAULT_EXPECTED_S = 900

DEFAULT_GUARD = "ssh"

_RUN_ONCE_KEYS = ("in_service", "baseline", "repair")
"""Keys of checks that have no meaning in `confirm`: it runs once, on the isolated node."""

COMMON_STAGE_KEYS = frozenset({"name", "vars", "timeout", "expected", "on_unknown"})


def _require_kind(schema: dict[str, Any]) -> None:
    """Let the schema demand a kind of run."""
    kinds = [key for key in schema["properties"] if key not in COMMON_STAGE_KEYS]
    schema["anyOf"] = [{"required": [kind]} for kind in kinds]


class _Stage(OneKind):
    common_keys: ClassVar[frozenset[str]] = COMMON_STAGE_KEYS

    model_config = ConfigDict(json_schema_extra=_require_kind)

    name: plugin.field_types.Name = Field(
        default=plugin.ABSENT, description="Name of the stage: `configure`, of several `stage-N`."
    )
    playbook: Playbook = Field(default=plugin.ABSENT, description="Playbook, a path inside the source.")
    vars: Variables = Field(
        default={},
        description="Extra variables of a playbook; Ansible renders templates in them, rolloutd does not.",
    )
    timeout: PositiveDuration = plugin.duration_field("30m", "Limit of the run.")
    expected: PositiveDuration = plugin.duration_field(
        "15m", "How long the run usually takes; at most `timeout`."
    )
    on_unknown: Literal["verify", "rerun", "pause"] = Field(
        default="verify", description="What to do when the result of the run is unknown."
    )

    @property
    def expected_s(self) -> int:
        """How long the run usually takes, if not given no longer than its limit."""
        is_given = "expected" in self.model_fields_set
        return self.expected if is_given else min(DEFAULT_EXPECTED_S, self.timeout)

    @model_validator(mode="after")
    def _only_playbooks_have_variables(self) -> Self:
        if self.vars and "playbook" not in self.model_fields_set:
            message = f"a change of the kind {self.kind} takes no variables"
            raise InvalidValue(message, "no `vars`", at=("vars",), at_key=True)
        return self

    @model_validator(mode="after")
    def _expected_fits_timeout(self) -> Self:
        if "expected" in self.model_fields_set and self.expected > self.timeout:
            message = "the run is expected to take longer than its timeout"
            limit = f"at most {format_duration(self.timeout)}"
            raise InvalidValue(message, limit, at=("expected",), found=format_duration(self.expected))
        return self


def module_cycles(stages: Sequence[_Stage]) -> Iterator[InvalidValue]:
    """Yield an error if modules that the stages move wait for each other: none would ever be ready."""
    changes = [
        (index, stage.kind, stage.section)
        for index, stage in enumerate(stages)
        if isinstance(stage.section, plugin.ChangeParams)
    ]
    order: TopologicalSorter[str] = TopologicalSorter()
    for *_, change in changes:
        order.add(change.module, *change.waits_for)
    try:
        order.prepare()
    except CycleError as error:
        cycle = set(error.args[1])
        at = next((index, kind) for index, kind, change in changes if change.module in cycle)
        message = "the modules wait for each other, so none gets ready"
        allowed = "`depends_on` without a cycle"
        yield InvalidValue(message, allowed, at=at, at_key=True, found=", ".join(sorted(cycle)))


if TYPE_CHECKING:
    MaintainStage = _Stage
else:
    MaintainStage = step_model(
        "Stage", "One run on the isolated node: of a playbook, or a change.", plugin.CHANGES, base=_Stage
    )


class Rollback(plugin.Params):
    """The playbook that undoes the change, run when a person or `on_failure` says so."""

    playbook: Playbook = Field(description="Playbook, a path inside the source.")
    vars: Variables = Field(
        default={}, description="Extra variables of the run; they override those of `maintain`."
    )
    timeout: PositiveDuration = plugin.duration_field("30m", "Limit of the run.")
    verify: list[VerifyStep] = Field(
        default=plugin.ABSENT,
        min_length=1,
        max_length=MAX_STEPS,
        description="Checks after a rollback; without them the plan's `reachable` checks.",
    )


class _GuardKeys(plugin.Params):
    """The keys of every guard besides its adapter's own."""

    kind: str = DEFAULT_GUARD
    confirm: list[VerifyStep] = Field(
        default=plugin.ABSENT,
        min_length=1,
        max_length=MAX_STEPS,
        description="Checks that must pass within `after` once the playbook has ended; `reachable` if not "
        "given.",
    )

    @field_validator("confirm")
    @classmethod
    def _require_single_runs(cls, checks: list[VerifyStep]) -> list[VerifyStep]:
        raise_invalid(
            InvalidValue(
                f"`{key}` has no meaning in `confirm`",
                "no such key",
                at=(index, check.kind, key),
                at_key=True,
                found=key,
            )
            for index, check in enumerate(checks)
            for key in _RUN_ONCE_KEYS
            if key in check.section.model_fields_set
        )
        return checks


def _guard_model(kind: str, adapter: plugin.Registration) -> type[plugin.Params]:
    default = DEFAULT_GUARD if kind == DEFAULT_GUARD else ...
    field = Field(default=default, description="The installed guard, which has further keys of its own.")
    return params_model(adapter, _GuardKeys, kind=(Literal[kind], field))


def _validate_guard(value: Any, _: object) -> plugin.Params:
    """Validate a guard by the model of its kind."""
    kind = value.get("kind", DEFAULT_GUARD) if isinstance(value, dict) else DEFAULT_GUARD
    model = GUARD_MODELS.get(str(kind))
    if model is None:
        message = f"no guard `{truncate(str(kind))}` is installed; install the package that provides it"
        at = ("kind",) if "kind" in value else ()
        raise InvalidValue(message, f"one of: {', '.join(GUARD_MODELS) or 'none'}", at=at)
    return model.model_validate(value)


GUARD_MODELS = {kind: _guard_model(kind, adapter) for kind, adapter in usable_adapters(plugin.GUARDS).items()}

if TYPE_CHECKING:
    Guard = plugin.Params
else:
    # Not a tagged union of pydantic: it puts the kind into the path of each mistake.
    _models = tuple(GUARD_MODELS.values()) or (_GuardKeys,)
    Guard = Annotated[Union[_models], WrapValidator(_validate_guard)]  # noqa: UP007  # not known before
