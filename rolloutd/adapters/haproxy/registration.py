"""Registrations of the adapters of HAProxy."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import model_validator

from rolloutd.plugin import ABSENT, Field, Params, SettingsSection
from rolloutd.plugin.field_types import InvalidValue


class BalancerParams(Params):
    """One HAProxy, and how its Runtime API is reached."""

    socket: Annotated[str, Field(max_length=107, pattern="^/.")] = Field(
        default=ABSENT,
        description="Unix socket of the Runtime API (`stats socket PATH level admin`), an absolute path on"
        " this machine or on `node`.",
    )
    node: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default=ABSENT,
        description="Node of the inventory that has the socket; reached over ssh, and needs python3.",
    )
    tcp: Annotated[str, Field(min_length=3, max_length=260, pattern=r"^.+:[0-9]{1,5}$")] = Field(
        default=ABSENT, description="Address and port of the Runtime API, such as 127.0.0.1:9999."
    )

    @model_validator(mode="after")
    def _require_one_way(self) -> Self:
        if self.model_fields_set not in ({"socket"}, {"node", "socket"}, {"tcp"}):
            raise InvalidValue("a balancer is reached in one way", "{socket}, {node, socket}, or {tcp}")
        return self


SETTINGS = SettingsSection(BalancerParams, "Balancers by name, which plans isolate nodes from and probe.")
