"""Models of what a plan runs on a node: its stages, the rollback and the guard."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from machines.model.timefmt import format_duration
from rolloutd.planfile.steps import MAX_STEPS, VerifyStep
from rolloutd.plugin import ABSENT, Params, duration_field, field_types
from rolloutd.plugin.field_types import InvalidValue, Playbook, PositiveDuration, raise_invalid

DEFAULT_EXPECTED_S = 900
_RUN_ONCE_KEYS = ("in_service", "baseline", "repair")
"""Keys of checks that have no meaning in `confirm`: it runs once, on the isolated node."""


class Stage(Params):
    """One playbook run on the isolated node."""

    name: field_types.Name = Field(
        default=ABSENT, description="Name of the stage: `configure`, of several `stage-N`."
    )
    playbook: Playbook = Field(description="Playbook, a path inside the source.")
    vars: dict[field_types.VariableName, Any] = Field(
        default={},
        description="Extra variables of the run; Ansible renders templates in them, rolloutd does not.",
    )
    timeout: PositiveDuration = duration_field("30m", "Limit of the run.")
    expected: PositiveDuration = duration_field("15m", "How long the run usually takes; at most `timeout`.")
    on_unknown: Literal["verify", "rerun", "pause"] = Field(
        default="verify", description="What to do when the result of the run is unknown."
    )

    @property
    def expected_s(self) -> int:
        """How long the run usually takes, if not given no longer than its limit."""
        is_given = "expected" in self.model_fields_set
        return self.expected if is_given else min(DEFAULT_EXPECTED_S, self.timeout)

    @model_validator(mode="after")
    def _expected_fits_timeout(self) -> Self:
        if "expected" in self.model_fields_set and self.expected > self.timeout:
            message = "the run is expected to take longer than its timeout"
            limit = f"at most {format_duration(self.timeout)}"
            raise InvalidValue(message, limit, at=("expected",), found=format_duration(self.expected))
        return self


class Rollback(Params):
    """The playbook that undoes the change, run when a person or `on_failure` says so."""

    playbook: Playbook = Field(description="Playbook, a path inside the source.")
    vars: dict[field_types.VariableName, Any] = Field(
        default={}, description="Extra variables of the run; they override those of `maintain`."
    )
    timeout: PositiveDuration = duration_field("30m", "Limit of the run.")
    verify: list[VerifyStep] = Field(
        default=ABSENT,
        min_length=1,
        max_length=MAX_STEPS,
        description="Checks after a rollback; without them the plan's `reachable` checks.",
    )


class Guard(Params):
    """What a node undoes by itself unless the daemon confirms the change."""

    paths: list[field_types.NodePath] = Field(
        min_length=1,
        max_length=MAX_STEPS,
        description="Files and directories that the change touches; backed up on the node, with those that "
        "do not exist.",
    )
    commands: list[field_types.OneLineCommand] = Field(
        default=[],
        max_length=MAX_STEPS,
        description="Shell commands that the node runs as root after it has restored the paths.",
    )
    after: PositiveDuration = duration_field(
        "2m", "Silence of the daemon after which the node restores itself, counted on the node."
    )
    across_reboot: bool = Field(
        default=False,
        description="Wait for the daemon again after a reboot, by an enabled systemd unit, and then restore.",
    )
    confirm: list[VerifyStep] = Field(
        default=ABSENT,
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
