"""Models of the daemon's settings.

The schema and docs/settings.md are made from these.  Durations are seconds
after reading.  Secrets are in files of their own; settings only name the files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PrivateAttr, create_model, field_validator, model_validator

from rolloutd import plugin
from rolloutd.planfile.model import WindowSpec
from rolloutd.planfile.steps import MAX_STEPS, Step, VerifyStep, step_model
from rolloutd.planfile.strategy import MAX_PARALLEL
from rolloutd.plugin import field_types
from rolloutd.settings.database import StoreSettings
from rolloutd.settings.listeners import FleetLockSettings, Metrics, NodeName
from rolloutd.settings.operator import Operator
from rolloutd.settings.retention import Keep
from rolloutd.settings.runners import Ansible, RunnerList
from rolloutd.settings.shared_files import SharedFiles

JSON = Any

log = logging.getLogger(__name__)

_MEMBER = re.compile(r"@?[A-Za-z0-9_][A-Za-z0-9_.@+\\-]{0,255}\$?")


def _parse_member(text: str) -> str:
    if not _MEMBER.fullmatch(text):
        raise field_types.InvalidValue("this is not a member", "a user name, or @group")
    return text


Member = Annotated[str, AfterValidator(_parse_member)]
SourceName = Annotated[str, Field(min_length=1, max_length=1000)]
LabelValue = Annotated[str, Field(max_length=253)]
ServiceName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9-]*$")]
ExternalUser = Annotated[str, Field(min_length=1, max_length=253)]
NotifyEvent = Literal[
    "gate-waits",
    "node-failed",
    "disturbed",
    "prepare-failed",
    "rollout-ended",
    "nothing-moved",
    "adapter-failing",
    "forecast-missed",
    "audit-head",
]


class _SourceKeys(plugin.Params):
    """The keys that every inventory source has besides its adapter's own."""

    refresh: field_types.PositiveDuration = Field(
        default=plugin.ABSENT, description="How often the source is read; `inventory_refresh` if not given."
    )
    stale_after: field_types.PositiveDuration = plugin.duration_field(
        "1h", "Age of its last answer from which no node of it starts."
    )
    max_removed: field_types.NodeBudget = Field(
        default="10%",
        description="How many of its nodes one answer may remove, as a number or a percentage; one that"
        " removes more is held for an admin.",
    )
    expect: dict[SourceName, plugin.SelectorText] = Field(
        default={},
        max_length=field_types.MAX_ITEMS,
        description="Sources that must report its nodes too, each with the label selector of the nodes"
        ' concerned (`""`: all).',
    )


if TYPE_CHECKING:
    InventorySource = Step
    ObserveStep = Step
    AnchorStep = Step
else:
    InventorySource = step_model("InventorySource", "One source of nodes.", plugin.INVENTORIES, _SourceKeys)
    ObserveStep = step_model("ObserveStep", "One way to see whether a node is up.", plugin.OBSERVERS)
    AnchorStep = step_model("AnchorStep", "One place outside this machine to keep lines.", plugin.ANCHORS)


class PoolValue(plugin.Params):
    """The budget of one pool."""

    max_unavailable: field_types.NodeBudget = Field(
        default=1,
        description='How many nodes may be down: a number, or a percentage such as "25%"; 0 closes the pool.',
    )


class PoolKey(PoolValue):
    """The budget of every pool that one label key makes."""

    values: dict[LabelValue, PoolValue] = Field(
        default={}, description="Values of the label whose pool has another budget."
    )


class TeamSettings(plugin.Params):
    """A team: its members, and the checks and windows of its nodes."""

    members: list[Member] = Field(
        default=[],
        max_length=1000,
        description="User names, and @groups, of this machine that vote for the team.",
    )
    verify: list[VerifyStep] = Field(
        default=[],
        max_length=MAX_STEPS,
        description="Checks that the team's nodes must pass after the plan's own.",
    )
    windows: list[WindowSpec] = Field(
        default=[],
        max_length=field_types.MAX_ITEMS,
        description="When the team's nodes may start, within the plan's windows.",
    )
    canaries: list[NodeName] = Field(
        default=[], max_length=1000, description="Nodes that go first if a plan names no canaries of its own."
    )
    reboot_within: field_types.PositiveDuration | None = Field(
        default=None,
        description="How long at most a node that reboots itself (`fleetlock`) keeps its slot; until it is"
        " back if not given.",
    )

    @property
    def checks(self) -> list[dict[str, JSON]]:
        """The team's checks as content, each `{kind: params}`."""
        return [step.content() for step in self.verify]


class Ssh(plugin.Params):
    """How nodes are reached unless the inventory says otherwise."""

    known_hosts: field_types.OptionalPath = Field(
        default=None, description="Host keys; the daemon user's own file if not given."
    )
    user: field_types.ShortName | None = Field(
        default=None, description="User on the nodes; the daemon's user if not given."
    )
    key_file: field_types.OptionalPath = Field(
        default=None, description="Private key; ssh's own defaults if not given."
    )
    guard_dir: Annotated[str, Field(min_length=2, max_length=255, pattern="^/")] = Field(
        default="/var/lib/rolloutd/guard",
        description="Directory on the nodes for the backups of armed guards; made for root only.",
    )


class Git(plugin.Params):
    """Which git sources are accepted."""

    verify_signatures: bool = Field(
        default=False,
        description="Accept only sources whose tag or commit has a trusted signature; no uploads.",
    )
    allowed_signers: field_types.OptionalPath = Field(
        default=None, description="Trusted ssh keys, in the format of ssh-keygen's allowed signers."
    )
    gnupg_home: field_types.OptionalPath = Field(
        default=None, description="GnuPG directory; each OpenPGP key in its keyring is trusted."
    )

    @model_validator(mode="after")
    def _require_keys(self) -> Git:
        if self.verify_signatures and self.allowed_signers is None and self.gnupg_home is None:
            raise field_types.InvalidValue("no key is trusted", "`allowed_signers` or `gnupg_home`, or both")
        return self


Command = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(min_length=1, max_length=field_types.MAX_ITEMS),
]


class ShellCommands(plugin.Params):
    """Commands that open a person's shell on a node; `{node}`, `{address}` and `{port}` stand for its own."""

    host: Command | None = Field(
        default=None,
        description="For a plain host, word by word; `ssh` by the inventory's address, port, jump hosts and"
        " host key alias if not given. It runs as the person, so it names no user and no key.",
    )
    kubernetes: Command = Field(
        default=["kubectl", "debug", "node/{node}", "-it", "--image=busybox:stable"],
        description="For a node of a Kubernetes cluster, with the person's own kubeconfig.",
    )


class ServiceAccount(plugin.Params):
    """A ticket system or a chat whose signed tokens carry people's votes."""

    key_file: field_types.FilePath = Field(
        description="HMAC secret of at least 32 bytes, or Ed25519 public key (PEM); only the daemon reads it."
    )
    teams: list[field_types.TeamName] = Field(
        min_length=1, max_length=1000, description="Teams that the service may carry votes for."
    )
    people: dict[ExternalUser, ExternalUser] = Field(
        default={},
        max_length=10_000,
        description="Users of the service and their user names here; if any is given, only they may vote.",
    )


class Webhook(plugin.Params):
    """A service that is sent signed notifications."""

    url: field_types.HttpUrl = Field(description="Where they are posted.")
    key_file: field_types.FilePath = Field(
        description="Secret of the signatures, in base64; only the daemon reads it."
    )


class Notify(plugin.Params):
    """Who is notified, and of what."""

    urls_file: field_types.OptionalPath = Field(
        default=None, description="File with one apprise URL per line; only the daemon reads it."
    )
    webhooks: list[Webhook] = Field(
        default=[],
        max_length=field_types.MAX_ITEMS,
        description="Services that get each notification, signed.",
    )
    events: list[NotifyEvent] = Field(
        default=[event for event in get_args(NotifyEvent) if event != "audit-head"],
        max_length=field_types.MAX_ITEMS,
        description="Events that cause a notification.",
    )
    nothing_moved: field_types.PositiveDuration = plugin.duration_field(
        "1h", "Time without progress after which a rollout causes `nothing-moved`."
    )

    @model_validator(mode="after")
    def _require_channel(self) -> Notify:
        if self.urls_file is None and not self.webhooks:
            raise field_types.InvalidValue("no channel is named", "`urls_file` or `webhooks`, or both")
        return self


class Audit(plugin.Params):
    """Where the audit's latest hash is kept, so that a rewritten audit is noticed."""

    anchors: list[AnchorStep] = Field(
        default=[],
        max_length=field_types.MAX_ITEMS,
        description="Places that a user who can write the database cannot change.",
    )
    anchor_every_s: field_types.PositiveDuration = plugin.duration_field(
        "1h",
        "How often the hash is written there, besides at every start and stop, and sent as `audit-head`.",
        alias="anchor_every",
    )


class CoreSettings(plugin.Params):
    """The settings of the daemon, without the sections that adapters own."""

    state_dir: field_types.FilePath = Field(
        default=Path("/var/lib/rolloutd"), description="Directory of the database, the sources and the runs."
    )
    socket: field_types.FilePath = Field(
        default=Path("/run/rolloutd/control.sock"), description="Unix socket of the HTTP API."
    )
    socket_group: field_types.ShortName | None = Field(
        default=None,
        description="Group that may connect, besides the daemon's user; each vote is checked all the same.",
    )
    shared_files: SharedFiles = Field(
        default=SharedFiles(),
        alias="files",
        description="Where uploaded trees, built artifacts and the output of ended runs are.",
    )
    name: field_types.ShortName | None = Field(
        default=None,
        description="Name of this daemon among those of one PostgreSQL database; by default the machine's.",
    )
    redaction_key_file: field_types.OptionalPath = Field(
        default=None,
        description="File with the key of sealed variables and of digests, 32 random bytes or more; by"
        " default `redaction.key` in `state_dir`. Daemons of one PostgreSQL database need the same key.",
    )
    observe_only: bool = Field(default=False, description="Decide and explain everything, do nothing.")
    inventory: list[InventorySource] = Field(
        default=[],
        max_length=field_types.MAX_ITEMS,
        description="Sources of nodes; a node is the union of what they say.",
    )
    inventory_refresh_s: field_types.PositiveDuration = plugin.duration_field(
        "5m", "How often the sources are read.", alias="inventory_refresh"
    )
    observe: list[ObserveStep] = Field(
        default=[ObserveStep.model_validate({"reachable": {}})],
        max_length=field_types.MAX_ITEMS,
        description="How nodes are seen up or down; with an empty list only sources that watch say it.",
        json_schema_extra={"default": [{"reachable": {}}]},
    )
    observe_within_s: field_types.PositiveDuration = plugin.duration_field(
        "60s", "Age from which an observation no longer counts.", alias="observe_within"
    )
    pools: Annotated[
        dict[field_types.LabelKey, PoolKey],
        # A team loses one node at a time, whatever other pools are named.
        AfterValidator(lambda pools: {"team": PoolKey(), **pools}),
    ] = Field(
        default={"team": PoolKey()},
        max_length=20,
        description="Label keys that make pools; `team` always does, with one node unless set otherwise.",
    )
    max_parallel: int = Field(
        default=64, ge=1, le=MAX_PARALLEL, description="Nodes at once, all rollouts together."
    )
    teams: dict[field_types.TeamName, TeamSettings] = Field(
        default={}, max_length=1000, description="Teams by name; the label `team` names a node's team."
    )
    admins: list[Member] = Field(
        default=["root"], max_length=1000, description="Who may hold, freeze, pause and cancel everything."
    )
    host_class: list[field_types.LabelKey] = Field(
        default=[],
        max_length=20,
        description="Label keys that make classes of hosts: content that failed on one node of a class is not"
        " submitted to that class again. Without keys all nodes are one class.",
    )
    show_vars: list[field_types.VariableGlob] = Field(
        default=[],
        max_length=field_types.MAX_ITEMS,
        description="Names of variables, as globs, whose values every user of the socket may see; the others"
        " are shown as keyed digests. A plan can show its own (`spec.show_vars`).",
    )
    ssh: Ssh = Field(default=Ssh(), description="How nodes are reached unless the inventory says otherwise.")
    shell: ShellCommands = Field(default=ShellCommands(), description="How people get a shell on a node.")
    ansible: Ansible = Field(default=Ansible(), description="How playbooks are run.")
    runners: RunnerList = Field(
        default=[],
        description="Systems that run the playbooks of some nodes; the first one that matches a node counts.",
    )
    local_runner: bool = Field(
        default=True,
        description="Run the playbooks of nodes that no other runner matches on the daemon's machine; if"
        " `false`, such a node waits (`no-runner`).",
    )
    git: Git = Field(default=Git(), description="Which git sources are accepted.")
    keep: Keep = Field(
        default=Keep(), description="How long files of ended rollouts stay on the daemon's disk."
    )
    service_accounts: dict[ServiceName, ServiceAccount] = Field(
        default={}, max_length=100, description="Services whose signed tokens are votes, by name."
    )
    notify: Notify | None = Field(default=None, description="Who is notified, and of what.")
    audit: Audit = Field(
        default=Audit(), description="Where the audit's latest hash is kept outside this machine."
    )
    metrics: Metrics = Field(default=Metrics(), description="Where Prometheus may read metrics.")
    fleetlock: FleetLockSettings = Field(
        default=None, description="Where machines that reboot themselves ask for a slot (FleetLock)."
    )
    operator: Operator | None = Field(
        default=None, description="Rollouts as objects of a Kubernetes cluster."
    )
    store: StoreSettings = Field(
        default=StoreSettings(), description="Where the database is; by default a file in `state_dir`."
    )

    @model_validator(mode="after")
    def _require_whole_audit(self) -> CoreSettings:
        if self.store.postgresql is not None and self.keep.audit_s is not None:
            raise field_types.InvalidValue(
                "in PostgreSQL the daemon's role removes no entries", "`null`", at=("keep", "audit")
            )
        return self

    _files: tuple[Path, ...] = PrivateAttr(default=())

    @field_validator("inventory")
    @classmethod
    def _require_own_source_names(cls, sources: list[InventorySource]) -> list[InventorySource]:
        """A node finds its source by the kind and the name."""
        errors, taken = [], set()
        for index, source in enumerate(sources):
            name = getattr(source.section, "name", None)
            if name is not None and (source.kind, name) in taken:
                path = (index, source.kind, *(("name",) if "name" in source.section.model_fields_set else ()))
                message = f"another {source.kind} source has this name"
                errors.append(field_types.InvalidValue(message, "a unique name", at=path, found=name))
            taken.add((source.kind, name))
        field_types.raise_invalid(errors)
        return sources

    @property
    def files_dir(self) -> Path:
        """The directory of trees, artifacts and output: that of all machines, else the state directory."""
        return self.shared_files.directory or self.state_dir

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that were read, in order; empty if all is default."""
        return self._files

    def section(self, key: str) -> Mapping[str, plugin.Params]:
        """Return the outside systems of a section that an adapter owns, by name."""
        return getattr(self, f"{_SECTION}{key}", {})


_SECTION = "section_"
"""Prefix of the fields of adapters' sections: no field of ours begins like this."""


def _with_sections(sections: Mapping[str, plugin.SettingsSection]) -> type[CoreSettings]:
    """Return the model of a settings file; a section cannot take the place of a key of ours."""
    taken = {field.alias or name for name, field in CoreSettings.model_fields.items()}
    fields: dict[str, Any] = {}
    for key, section in sections.items():
        if key in taken:
            log.error("settings section %s: rolloutd has this key; rename the section", key)
            continue
        fields[_SECTION + key] = (
            dict[field_types.ShortName, section.params],  # type: ignore[name-defined]
            Field(default={}, alias=key, max_length=field_types.MAX_ITEMS, description=section.description),
        )
    doc = "The settings of the daemon."
    return create_model("Settings", __base__=CoreSettings, __doc__=doc, **fields)


if TYPE_CHECKING:
    Settings = CoreSettings
else:
    Settings = _with_sections(plugin.installed_sections())
