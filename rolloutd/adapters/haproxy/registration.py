"""Registrations of the adapters of HAProxy."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import model_validator

from rolloutd import plugin
from rolloutd.plugin.field_types import MAX_ITEMS, InvalidValue, ShortName


class BalancerParams(plugin.Params):
    """One HAProxy, and how its Runtime API is reached."""

    socket: Annotated[str, plugin.Field(max_length=107, pattern="^/.")] = plugin.Field(
        default=plugin.ABSENT,
        description="Unix socket of the Runtime API (`stats socket PATH level admin`), an absolute path on"
        " this machine or on `node`.",
    )
    node: Annotated[str, plugin.Field(min_length=1, max_length=253)] = plugin.Field(
        default=plugin.ABSENT,
        description="Node of the inventory that has the socket; reached over ssh, and needs python3.",
    )
    tcp: Annotated[str, plugin.Field(min_length=3, max_length=260, pattern=r"^.+:[0-9]{1,5}$")] = (
        plugin.Field(
            default=plugin.ABSENT, description="Address and port of the Runtime API, such as 127.0.0.1:9999."
        )
    )

    @model_validator(mode="after")
    def _require_one_way(self) -> Self:
        if self.model_fields_set not in ({"socket"}, {"node", "socket"}, {"tcp"}):
            raise InvalidValue("a balancer is reached in one way", "{socket}, {node, socket}, or {tcp}")
        return self


class _ServerParams(plugin.Params):
    backend: plugin.TemplateText = plugin.Field(description="Backend of the server.")
    server: plugin.TemplateText = plugin.Field(
        description="The node's name as a server of that backend, such as `{{ node.name }}`."
    )
    balancers: list[ShortName] = plugin.Field(
        default=plugin.ABSENT,
        min_length=1,
        max_length=MAX_ITEMS,
        description="Balancers of the settings that have the server; all of them if not given.",
    )


class HaproxyIsolatorParams(_ServerParams):
    """Takes a server out of HAProxy's rotation: drains it, waits for its sessions, and sets it to maint."""

    drain_timeout: plugin.PositiveDuration = plugin.Field(
        default=plugin.ABSENT,
        description="Limit of the drain; after it the server is as it was before, and is tried later. "
        "`limits.isolate` if not given.",
    )


class HaproxyProbeParams(_ServerParams):
    """Sessions are traffic: more than `max` of the server, on all balancers together, make the node busy."""

    max: int = plugin.Field(
        default=0, ge=0, description="Sessions, running or queued, that still count as idle."
    )
    timeout: plugin.PositiveDuration = plugin.duration_field(
        "30s", "Limit of one probe; after it the result is unknown."
    )


ISOLATOR = plugin.Registration(
    "rolloutd.adapters.haproxy.isolator:HaproxyIsolator",
    HaproxyIsolatorParams,
    frozenset({plugin.Capability.CORDON_ONLY, plugin.Capability.DRY_RUN}),
    node_kinds=plugin.MACHINES,
)
PROBE = plugin.Registration(
    "rolloutd.adapters.haproxy.isolator:HaproxyTrafficProbe", HaproxyProbeParams, node_kinds=plugin.MACHINES
)
SETTINGS = plugin.SettingsSection(
    BalancerParams, "Balancers by name, which plans isolate nodes from and probe."
)
