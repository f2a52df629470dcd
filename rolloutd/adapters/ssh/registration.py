"""Registrations of the adapters that reach nodes over ssh."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from rolloutd.plugin import (
    ABSENT,
    Capability,
    CheckParams,
    Duration,
    Field,
    Params,
    PositiveDuration,
    Registration,
    TemplateText,
    duration_field,
)
from rolloutd.plugin.field_types import ExpectedOutput, Pattern


class CommandIsolatorParams(Params):
    """Takes the node out of service by shell commands on the node itself."""

    do: TemplateText = Field(description="Command that takes the node out of service; safe to run again.")
    undo: TemplateText = Field(description="Command that puts it back as it was; safe to run again.")
    look: TemplateText = Field(
        default=ABSENT,
        description=(
            "Command that exits 0 if the node is already isolated; if it cannot run, nothing is done. "
            "Without it `do` just runs."
        ),
    )
    timeout: PositiveDuration = duration_field("5m", "Limit of each command.")


class ReachableCheckParams(CheckParams):
    """The node answers over SSH."""

    within: Duration = duration_field("5m", "How long the node may take to answer; 0s asks once.")


class SshCheckParams(CheckParams):
    """A command on the node exits, or prints, as it should."""

    exclusive = ("equals", "matches", "exit")

    run: TemplateText = Field(description="Shell command, run on the node.")
    equals: ExpectedOutput = Field(
        default=ABSENT,
        description="The command exits 0 and prints exactly this, except for blanks at both ends.",
    )
    matches: Pattern = Field(
        default=ABSENT,
        description="The command exits 0 and this RE2 regular expression matches 64 KiB of its output.",
    )
    exit: int = Field(
        default=ABSENT,
        ge=0,
        le=255,
        description="The command exits with this status; 0 if none of the three is given.",
    )
    within: Duration = duration_field(
        "0s", "How long the answer may take to become right; 0s runs the command once."
    )
    timeout: PositiveDuration = duration_field("1m", "Limit of one try.")

    @model_validator(mode="before")
    @classmethod
    def _default_to_exit_zero(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.keys().isdisjoint(cls.exclusive):
            return {**value, "exit": 0}
        return value


class ReachableObserverParams(Params):
    """Sees a node as up when it answers over SSH."""


COMMAND_ISOLATOR = Registration("rolloutd.adapters.ssh.command:make", CommandIsolatorParams)
REACHABLE_CHECK = Registration(
    "rolloutd.adapters.ssh.reachable:make_check",
    ReachableCheckParams,
    frozenset({Capability.JUDGES_LIVENESS}),
)
SSH_CHECK = Registration("rolloutd.adapters.ssh.check:make", SshCheckParams)
REACHABLE_OBSERVER = Registration("rolloutd.adapters.ssh.reachable:make_observer", ReachableObserverParams)
