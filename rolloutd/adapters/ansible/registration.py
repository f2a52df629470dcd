"""Registrations of the adapters that run Ansible."""

from __future__ import annotations

from rolloutd.plugin import (
    Capability,
    CheckParams,
    Field,
    FilePath,
    LabelKey,
    Params,
    Playbook,
    PositiveDuration,
    Registration,
    duration_field,
)
from rolloutd.plugin.field_types import MAX_ITEMS


class PlaybookIsolatorParams(Params):
    """Takes the node out of service by a playbook of the source."""

    file: Playbook = Field(description="Playbook that takes the node out of service; idempotent.")
    undo: Playbook = Field(description="Playbook that puts it back as it was; idempotent.")
    timeout: PositiveDuration = duration_field("15m", "Limit of each playbook.")


class PlaybookCheckParams(CheckParams):
    """A playbook of the source runs on the node without a failed task."""

    file: Playbook = Field(description="Playbook that verifies the node and changes nothing.")
    timeout: PositiveDuration = duration_field("15m", "Limit of the run.")


class AnsibleInventoryParams(Params):
    """Nodes from an Ansible inventory: a static file, a directory or a dynamic one."""

    path: FilePath = Field(description="Inventory, as `ansible-inventory -i` takes it.")
    labels: list[LabelKey] = Field(
        default=["team", "rack", "canary"],
        max_length=MAX_ITEMS,
        description="Host variables that become labels.",
    )


PLAYBOOK_ISOLATOR = Registration(
    "rolloutd.adapters.playbook_steps:PlaybookIsolator",
    PlaybookIsolatorParams,
    frozenset({Capability.STARTS_RUN}),
)
PLAYBOOK_CHECK = Registration(
    "rolloutd.adapters.playbook_steps:PlaybookCheck",
    PlaybookCheckParams,
    frozenset({Capability.STARTS_RUN}),
)
INVENTORY = Registration("rolloutd.adapters.ansible.inventory:make", AnsibleInventoryParams)
LOCAL_RUNNER = Registration("rolloutd.adapters.ansible.local:make_runner")
