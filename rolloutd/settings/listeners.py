"""Settings of the daemon's other listeners: metrics, and slots for machines that reboot themselves."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, PlainValidator, StringConstraints, ValidationInfo, model_validator

from rolloutd.plugin import Params, SelectorText
from rolloutd.plugin.addresses import ListenAddress, parse_loopback
from rolloutd.plugin.field_types import (
    MAX_ITEMS,
    MAX_NODES,
    MAX_VOTES,
    FilePath,
    InvalidValue,
    OptionalPath,
    ShortName,
    TeamName,
    with_json_schema,
)

GROUP_PATTERN = r"^[a-zA-Z0-9.-]+$"
"""Names of groups, by the FleetLock protocol."""

MAX_GROUP_CHARS, MAX_ID_CHARS = 64, 128
"""Characters of a group and of an id: together the id of a hold. Most ids are 32 hexadecimal digits."""


def _parse_metrics_listener(value: object) -> str | None:
    # Metrics have no authentication, so no other machine may read them.
    return None if value is None else parse_loopback(value, "metrics are served on this machine alone")


def _parse_group(text: str) -> str:
    if not re.fullmatch(GROUP_PATTERN.strip("^$"), text):
        raise InvalidValue("this is not a group", "letters, digits, '.' and '-'")
    return text


Loopback = Annotated[
    str | None,
    PlainValidator(_parse_metrics_listener),
    with_json_schema(type=["string", "null"], minLength=1),
]
NodeName = Annotated[str, Field(min_length=1, max_length=253)]
GroupName = Annotated[str, StringConstraints(max_length=MAX_GROUP_CHARS), AfterValidator(_parse_group)]
MachineName = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class Metrics(Params):
    """Where Prometheus may read metrics, on this machine alone; nowhere if both keys are absent."""

    listen: Loopback = Field(default=None, description="Loopback address and port, such as 127.0.0.1:9477.")
    path: OptionalPath = Field(default=None, description="Unix socket; its mode is 0660.")
    group: ShortName | None = Field(
        default=None,
        description="Group that may connect to `path`, besides the daemon's user; it gives no other right.",
    )

    @model_validator(mode="after")
    def _require_socket_for_group(self) -> Metrics:
        if self.group is not None and self.path is None:
            raise InvalidValue("there is no Unix socket for the group", "`path` too", at=("group",))
        return self


class FleetLockTls(Params):
    """The certificate that the listener shows, and whose certificates it accepts."""

    cert: FilePath = Field(description="Certificate with its chain, PEM; read at the start.")
    key: FilePath = Field(description="Its private key, PEM.")
    client_ca: OptionalPath = Field(
        default=None,
        description="Certificates of the authority that signs the machines' own; then each needs one.",
    )


class FleetLockGate(Params):
    """Who must approve before a machine of the group may reboot itself."""

    owner: int = Field(default=0, ge=0, le=MAX_VOTES, description="Votes of members of the group's owner.")
    each_team: int = Field(default=0, ge=0, le=MAX_VOTES, description="Votes of the team of the node.")

    @model_validator(mode="after")
    def _require_votes(self) -> FleetLockGate:
        if self.owner == self.each_team == 0:
            raise InvalidValue("the gate requires no vote", "owner or each_team of at least 1")
        return self


class FleetLockGroup(Params):
    """A group of machines, as they name it in their requests."""

    nodes: SelectorText = Field(default="", description="Label selector of its nodes; without one all.")
    ids: dict[MachineName, NodeName] = Field(
        default={},
        max_length=MAX_NODES,
        description="Nodes by the id that they send; other ids are made from the pinned machine ids.",
    )
    owner: TeamName | None = Field(default=None, description="Team whose members vote as `owner` at `gate`.")
    gate: FleetLockGate | None = Field(
        default=None,
        description="Votes for a time, without which no machine of the group may reboot; none if not given.",
    )

    @model_validator(mode="after")
    def _require_owner(self) -> FleetLockGroup:
        if self.gate is not None and self.gate.owner and self.owner is None:
            raise InvalidValue(
                "the gate asks the owner, and there is none", "`owner` too", at=("gate", "owner")
            )
        return self


class FleetLock(Params):
    """Slots for machines that reboot themselves, by the FleetLock protocol."""

    listen: ListenAddress = Field(
        description="Address and port, such as 127.0.0.1:9478; without `tls` a loopback address."
    )
    tls: FleetLockTls | None = Field(default=None, description="Encryption and proof, for other machines.")
    groups: dict[GroupName, FleetLockGroup] = Field(
        min_length=1,
        max_length=MAX_ITEMS,
        description="Groups by name; clients use `default` if none is set.",
    )

    @model_validator(mode="after")
    def _require_loopback_without_tls(self) -> FleetLock:
        if self.tls is None:
            try:
                parse_loopback(self.listen, "")
            except InvalidValue:
                raise InvalidValue(
                    "without `tls` only this machine may ask", "`tls`, or a loopback address", at=("listen",)
                ) from None
        return self


def _require_known_owners(fleetlock: FleetLock | None, info: ValidationInfo) -> FleetLock | None:
    teams = info.data.get("teams")
    for name, group in ({} if fleetlock is None else fleetlock.groups).items():
        # Without valid teams there is another error, which says more.
        if teams is not None and group.owner is not None and group.owner not in teams:
            path = ("groups", name, "owner")
            raise InvalidValue("there is no such team", "a team of `teams`", at=path, found=group.owner)
    return fleetlock


FleetLockSettings = Annotated[FleetLock | None, AfterValidator(_require_known_owners)]
"""The section `fleetlock`; it refers to `teams`."""
