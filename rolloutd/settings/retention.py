"""Settings of how long what ended rollouts leave is kept."""

from __future__ import annotations

from pydantic import Field, model_validator

from machines.model.timefmt import format_duration
from rolloutd.plugin import Params, duration_field
from rolloutd.plugin.field_types import InvalidValue, PositiveDuration

CLEANING_GIVEN_UP_AFTER_S = 30 * 86_400.0  # then only a person can have a node cleaned


class Keep(Params):
    """How long what ended rollouts leave is kept on the daemon's disk and on nodes."""

    records_s: PositiveDuration | None = duration_field(
        "365d",
        "Records of a closed rollout (targets, steps, votes), after its end, unless some node has its latest"
        " change from it; `null` keeps them for ever. The audit stays in any case.",
        alias="records",
    )

    runs_s: PositiveDuration | None = duration_field(
        "90d",
        "Output of runs (`logs`), after their rollout has ended, and the configuration records of a node,"
        " after it left the inventory; `null` keeps them for ever.",
        alias="runs",
    )
    trees_s: PositiveDuration | None = duration_field(
        "30d",
        "Playbook trees, after the last rollout that used them has ended, or since they were uploaded;"
        " `null` keeps them for ever.",
        alias="trees",
    )
    on_nodes_s: PositiveDuration | None = duration_field(
        "30d",
        "Fences, guards, checkpoints and artifacts on a node, after its last rollout has ended; `null`: until"
        " `rolloutctl clean`.",
        alias="on_nodes",
    )

    audit_s: PositiveDuration | None = Field(
        default=None,
        description="Audit entries in the database. Older ones are moved to segments, files in the state"
        " directory that are kept for ever; `null` keeps all in the database.",
        alias="audit",
    )

    @model_validator(mode="after")
    def _require_records(self) -> Keep:
        if self.records_s and self.records_s < (
            needed_s := (self.on_nodes_s or 0) + CLEANING_GIVEN_UP_AFTER_S
        ):
            raise InvalidValue("cleaning needs them", f"{format_duration(needed_s)} or more", at=("records",))
        return self
