"""Registrations of the adapters that reach nodes over ssh."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from rolloutd.plugin import (
    ABSENT,
    MACHINES,
    Capability,
    CheckParams,
    Command,
    Duration,
    Field,
    FilePath,
    GuardParams,
    Params,
    PositiveDuration,
    Registration,
    TemplateText,
    duration_field,
)
from rolloutd.plugin.field_types import (
    MAX_ITEMS,
    MAX_TEXT_CHARS,
    ExpectedOutput,
    InvalidValue,
    NodePath,
    OneLineCommand,
    Pattern,
    check_template,
    with_json_schema,
)

MAX_PORT = 65_535

MAX_GUARDED = 50
"""Paths or commands of a guard; each takes time of the node while it cannot be reached."""


class CommandIsolatorParams(Params):
    """Takes the node out of service by shell commands on the node itself."""

    do: Command = Field(description="Command that takes the node out of service; safe to run again.")
    undo: Command = Field(description="Command that puts it back as it was; safe to run again.")
    look: Command = Field(
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

    run: Command = Field(description="Shell command, run on the node.")
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


class NodeCheckParams(CheckParams):
    """The node itself reaches an address, or resolves a name."""

    exclusive = ("tcp", "icmp", "dns")

    tcp: TemplateText = Field(default=ABSENT, description="HOST:PORT that accepts a TCP connection.")
    icmp: TemplateText = Field(default=ABSENT, description="Address or name that answers a ping.")
    dns: TemplateText = Field(default=ABSENT, description="Name that the node resolves.")
    within: Duration = duration_field("30s", "How long the probe may take to pass; 0s probes once.")
    timeout: PositiveDuration = duration_field("10s", "Limit of one try.")

    @model_validator(mode="after")
    def _require_target(self) -> Self:
        if self.model_fields_set.isdisjoint(self.exclusive):
            raise InvalidValue("the check probes nothing", "one of tcp, icmp, dns")
        return self


class SelfUpdatesCheckParams(CheckParams):
    """No service of the node installs updates by itself, which would be an unmanaged change."""

    allow: list[Literal["unattended-upgrades", "dnf-automatic", "zincati"]] = Field(
        default=[], max_length=MAX_ITEMS, description="Updaters that may be active."
    )
    timeout: PositiveDuration = duration_field("1m", "Limit of one try.")


def _parse_network(value: object) -> str:
    try:
        return str(ipaddress.ip_network(value if isinstance(value, str) else ""))
    except ValueError:
        raise InvalidValue("this is not a range of addresses", "a CIDR, such as 10.0.0.0/8") from None


def _parse_port(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and ("{{" in text or (text.isdecimal() and 0 < int(text) <= MAX_PORT)):
        return check_template(text)
    raise InvalidValue("this is not a port", f"1 to {MAX_PORT}, or a template of a label")


Network = Annotated[str, BeforeValidator(_parse_network), with_json_schema(type="string", minLength=1)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
Port = Annotated[
    str,
    BeforeValidator(_parse_port),
    Field(max_length=MAX_TEXT_CHARS),
    with_json_schema(anyOf=[{"type": "integer", "minimum": 1, "maximum": MAX_PORT}, {"type": "string"}]),
]


class ConnectionsProbeParams(Params):
    """TCP connections are traffic: more than `max` established ones of the ports make the node busy."""

    established: list[Port] = Field(
        min_length=1, max_length=MAX_ITEMS, description="Ports of the node; templates may read its labels."
    )
    ignore: list[Network] = Field(
        default=[],
        max_length=MAX_ITEMS,
        description="Remote ranges (CIDR) whose connections do not count.",
    )
    max: int = Field(default=0, ge=0, description="Connections that still count as idle.")
    timeout: PositiveDuration = duration_field("30s", "Limit of one probe; after it the result is unknown.")


class CommandProbeParams(Params):
    """A command says whether there is traffic: it exits 0 if the node is idle, and 1 if it is busy."""

    run: Command = Field(
        description="Shell command; the first line that it prints is shown. Any other exit status is unknown."
    )
    on: Literal["node", "daemon"] = Field(
        default="node", description="Where it runs: on the node over ssh, or on the daemon's machine."
    )
    timeout: PositiveDuration = duration_field("30s", "Limit of one probe; after it the result is unknown.")


class ReachableObserverParams(Params):
    """Sees a node as up when it answers over SSH."""


class GuardedPathsParams(GuardParams):
    """The node backs up paths and restores them by a timer of its own."""

    paths: list[NodePath] = Field(
        min_length=1,
        max_length=MAX_GUARDED,
        description="Files and directories that the change touches; backed up on the node, with those that "
        "do not exist.",
    )
    commands: list[OneLineCommand] = Field(
        default=[],
        max_length=MAX_GUARDED,
        description="Shell commands that the node runs as root after it has restored the paths.",
    )
    across_reboot: bool = Field(
        default=False,
        description="Wait for the daemon again after a reboot, by an enabled systemd unit, and then restore.",
    )


class AnchorParams(Params):
    """A file on another machine, to which lines are appended over SSH."""

    host: Text = Field(description="Name or address of the machine.")
    port: int = Field(default=22, ge=1, le=MAX_PORT, description="Port of its sshd.")
    user: Text = Field(default=ABSENT, description="User there; `ssh.user` of the settings if not given.")
    key_file: FilePath = Field(
        default=ABSENT, description="Private key; `ssh.key_file` of the settings if not given."
    )
    file: Text = Field(description="File there; its directory must exist.")


ANCHOR = Registration("rolloutd.adapters.ssh.anchor:SshAnchor", AnchorParams)
GUARD = Registration("rolloutd.adapters.ssh.node_guard:SshNodeGuard.make", GuardedPathsParams)
COMMAND_ISOLATOR = Registration(
    "rolloutd.adapters.ssh.command:CommandIsolator.make", CommandIsolatorParams, node_kinds=MACHINES
)
REACHABLE_CHECK = Registration(
    "rolloutd.adapters.ssh.reachable:ReachableCheck.make",
    ReachableCheckParams,
    frozenset({Capability.JUDGES_LIVENESS}),
    node_kinds=MACHINES,
)
SSH_CHECK = Registration("rolloutd.adapters.ssh.check:SshCheck.make", SshCheckParams, node_kinds=MACHINES)
NODE_CHECK = Registration(
    "rolloutd.adapters.ssh.node_probe:NodeProbe.make", NodeCheckParams, node_kinds=MACHINES
)
SELF_UPDATES_CHECK = Registration(
    "rolloutd.adapters.ssh.self_updates:SelfUpdatesCheck.make", SelfUpdatesCheckParams, node_kinds=MACHINES
)
CONNECTIONS_PROBE = Registration(
    "rolloutd.adapters.ssh.connections_probe:ConnectionsProbe.make",
    ConnectionsProbeParams,
    node_kinds=MACHINES,
    cannot_see="connections of pods and containers with a network namespace of their own",
)
COMMAND_PROBE = Registration(
    "rolloutd.adapters.ssh.command:CommandProbe.make", CommandProbeParams, node_kinds=MACHINES
)
REACHABLE_OBSERVER = Registration("rolloutd.adapters.ssh.reachable:make_observer", ReachableObserverParams)
