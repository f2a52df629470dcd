"""Registrations of the adapters that run Ansible."""

from __future__ import annotations

from rolloutd import plugin
from rolloutd.plugin.field_types import MAX_ITEMS


class PlaybookIsolatorParams(plugin.Params):
    """Takes the node out of service by a playbook of the source."""

    file: plugin.Playbook = plugin.Field(
        description="Playbook that takes the node out of service; idempotent."
    )
    undo: plugin.Playbook = plugin.Field(description="Playbook that puts it back as it was; idempotent.")
    timeout: plugin.PositiveDuration = plugin.duration_field("15m", "Limit of each playbook.")


class PlaybookCheckParams(plugin.CheckParams):
    """A playbook of the source runs on the node without a failed task."""

    file: plugin.Playbook = plugin.Field(description="Playbook that verifies the node and changes nothing.")
    timeout: plugin.PositiveDuration = plugin.duration_field("15m", "Limit of the run.")


class AnsibleInventoryParams(plugin.Params):
    """Nodes from an Ansible inventory: a static file, a directory or a dynamic one."""

    path: plugin.FilePath = plugin.Field(description="Inventory, as `ansible-inventory -i` takes it.")
    labels: list[plugin.LabelKey] = plugin.Field(
        default=["team", "rack", "canary"],
        max_length=MAX_ITEMS,
        description="Host variables that become labels.",
    )


PLAYBOOK_ISOLATOR = plugin.Registration(
    "rolloutd.adapters.playbook_steps:PlaybookIsolator",
    PlaybookIsolatorParams,
    frozenset({plugin.Capability.STARTS_RUN}),
)
PLAYBOOK_CHECK = plugin.Registration(
    "rolloutd.adapters.playbook_steps:PlaybookCheck",
    PlaybookCheckParams,
    frozenset({plugin.Capability.STARTS_RUN}),
)
INVENTORY = plugin.Registration("rolloutd.adapters.ansible.inventory:make", AnsibleInventoryParams)
LOCAL_RUNNER = plugin.Registration("rolloutd.adapters.ansible.local:make_runner")
