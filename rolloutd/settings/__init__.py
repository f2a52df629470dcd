"""The daemon's settings: `config.yaml`, then `config.d/*.yaml` beside it.

Maps merge, lists and single values replace, later files win; every mistake of
every file is named at once, with its own file and line.  Paths in a file are
relative to that file.  Settings are read without the daemon, so nothing of the
core but selectors and windows is imported, and whether a path exists or a user
is known is not judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, PrivateAttr

from rolloutd.errors import InvalidFile, Mistake
from rolloutd.planfile import rules
from rolloutd.planfile.check import Breach, Format, check
from rolloutd.planfile.document import MAX_BYTES, Document, Value, read_document
from rolloutd.planfile.model import MAX_ITEMS, MAX_PARALLEL, MAX_STEPS, WindowSpec
from rolloutd.planfile.scalars import LabelKey, Limit, TeamName, Unreadable, schema_of
from rolloutd.planfile.schema import schema_of_model
from rolloutd.planfile.steps import (
    CHECKS,
    LATER,
    OBSERVERS,
    ObserveStep,
    Part,
    Step,
    VerifyStep,
    reserved_kinds,
    span,
    step_model,
)
from rolloutd.planfile.wording import ROOT
from rolloutd.settings.keeping import Keep
from rolloutd.settings.metering import PATHS as METRICS_PATHS
from rolloutd.settings.metering import Metrics
from rolloutd.settings.outside import PATHS as OUTSIDE_PATHS
from rolloutd.settings.outside import Notify, ServiceAccount, ServiceName
from rolloutd.settings.sources import INVENTORY_KINDS, FilePath, Word, clusters_differ, read_path
from rolloutd.settings.sources import PATHS as SOURCE_PATHS

JSON = Any

DEFAULT_CONFIG = Path("/etc/rolloutd/config.yaml")

MAX_FILES = 100
"""Files of config.d: a team each, and some; more are a mistake of some generator."""

TITLE = "rolloutd settings"

_MEMBER = re.compile(r"@?[A-Za-z0-9_][A-Za-z0-9_.@+\\-]{0,255}\$?")
_PERCENT = re.compile(r"(100|[0-9]{1,2})%")
_PATHS: tuple[tuple[str, ...], ...] = (
    ("state_dir",),
    ("socket",),
    ("ssh", "known_hosts"),
    ("ssh", "key_file"),
    ("ansible", "bin"),
    *SOURCE_PATHS,
    *OUTSIDE_PATHS,
    *METRICS_PATHS,
)
"""Where paths stand; `*` is any item of a list or value of a mapping."""


def _max_unavailable(value: object) -> int | str:
    """Read a number of nodes or a percentage of the pool."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_PARALLEL:
        return value
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        return value
    raise Unreadable("this is no budget", 'a number of nodes, 0 or more, or a percentage such as "25%"')


def _member(text: str) -> str:
    if not _MEMBER.fullmatch(text):
        raise Unreadable("this names nobody", "a user name, or @group")
    return text


def _path_or_none(value: object) -> Path | None:
    return None if value is None else read_path(value)


def _with_team(pools: dict[str, PoolKey]) -> dict[str, PoolKey]:
    """Keep the promise that a team loses one node at a time, whatever other pools are named."""
    return {"team": PoolKey(), **pools}


MaxUnavailable = Annotated[
    int | str,
    PlainValidator(_max_unavailable),
    schema_of(
        anyOf=[{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^(100|[0-9]{1,2})%$"}]
    ),
]
Member = Annotated[str, AfterValidator(_member)]
OptionalPath = Annotated[
    Path | None, PlainValidator(_path_or_none), schema_of(type=["string", "null"], minLength=1)
]
NodeName = Annotated[str, Field(min_length=1, max_length=253)]
LabelValue = Annotated[str, Field(max_length=253)]


if TYPE_CHECKING:
    InventorySource = Step
else:
    InventorySource = step_model("InventorySource", "One source of nodes.", INVENTORY_KINDS)


class PoolValue(Part):
    """The budget of one pool."""

    max_unavailable: MaxUnavailable = Field(
        default=1,
        description='How many nodes may be down: a number, or a percentage such as "25%"; 0 closes the pool.',
    )


class PoolKey(PoolValue):
    """The budget of every pool that one label key makes."""

    values: dict[LabelValue, PoolValue] = Field(
        default={}, description="Values of the label whose pool has another budget."
    )


class TeamSettings(Part):
    """A team: who may speak for it, and what its nodes ask for."""

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
        max_length=MAX_ITEMS,
        description="When the team's nodes may start, within the plan's windows.",
    )
    canaries: list[NodeName] = Field(
        default=[],
        max_length=1000,
        description="Nodes that go first where a plan names no canaries of its own.",
    )

    @property
    def checks(self) -> list[dict[str, JSON]]:
        """The team's checks as content, each `{kind: params}`."""
        return [step.content() for step in self.verify]

    @property
    def window_content(self) -> list[dict[str, JSON]]:
        """The team's windows as content, as compile_windows takes them."""
        return [window.model_dump(mode="json", by_alias=True) for window in self.windows]


class Ssh(Part):
    """How nodes are reached of which the inventory does not say it."""

    known_hosts: OptionalPath = Field(
        default=None, description="Host keys; the daemon user's own file if not given."
    )
    user: Word | None = Field(default=None, description="User on the nodes; the daemon's user if not given.")
    key_file: OptionalPath = Field(default=None, description="Private key; ssh's own defaults if not given.")


class Ansible(Part):
    """How playbooks are run."""

    parallel: int = Field(default=16, ge=1, le=1000, description="Runs at once on this machine.")
    bin: OptionalPath = Field(
        default=None, description="The ansible-playbook command; the one beside our interpreter if not given."
    )
    fence_dir: Annotated[str, Field(min_length=2, max_length=255, pattern="^/")] = Field(
        default="/var/lib/rolloutd-fence",
        description="Directory on the nodes that remembers the newest run there; in the home of the"
        " user on the node where it cannot be written.",
    )


class Settings(Part):
    """Everything the daemon is told by its administrator."""

    state_dir: FilePath = Field(
        default=Path("/var/lib/rolloutd"), description="Directory of the database, the sources and the runs."
    )
    socket: FilePath = Field(
        default=Path("/run/rolloutd/control.sock"), description="Unix socket of the HTTP API."
    )
    socket_group: Word | None = Field(
        default=None,
        description="Group that may connect besides the daemon's user; everybody's vote is still checked.",
    )
    observe_only: bool = Field(default=False, description="Decide and explain everything, do nothing.")
    inventory: list[InventorySource] = Field(
        default=[],
        max_length=MAX_ITEMS,
        description="Sources of nodes; a node is the union of what they say.",
    )
    inventory_refresh_s: Limit = span("5m", "How often the sources are read.", alias="inventory_refresh")
    observe: list[ObserveStep] = Field(
        default=[ObserveStep.model_validate({"reachable": {}})],
        max_length=MAX_ITEMS,
        description="How nodes are seen up or down; with an empty list only sources that watch say it.",
        json_schema_extra={"default": [{"reachable": {}}]},
    )
    observe_within_s: Limit = span(
        "60s", "Age from which an observation no longer counts.", alias="observe_within"
    )
    pools: Annotated[dict[LabelKey, PoolKey], AfterValidator(_with_team)] = Field(
        default={"team": PoolKey()},
        max_length=20,
        description="Label keys that make pools; `team` always does, with one node if nothing else is said.",
    )
    max_parallel: int = Field(
        default=64, ge=1, le=MAX_PARALLEL, description="Nodes at once, all rollouts together."
    )
    teams: dict[TeamName, TeamSettings] = Field(
        default={}, max_length=1000, description="Teams by name; the label `team` names a node's team."
    )
    admins: list[Member] = Field(
        default=["root"], max_length=1000, description="Who may hold, freeze, pause and cancel everything."
    )
    ssh: Ssh = Field(default=Ssh(), description="How nodes are reached where the inventory does not say it.")
    ansible: Ansible = Field(default=Ansible(), description="How playbooks are run.")
    keep: Keep = Field(
        default=Keep(), description="How long files of ended rollouts stay on the daemon's disk."
    )
    service_accounts: dict[ServiceName, ServiceAccount] = Field(
        default={}, max_length=100, description="Services whose signed tokens are votes, by name."
    )
    notify: Notify | None = Field(default=None, description="Whom to tell of what happens.")
    metrics: Metrics = Field(default=Metrics(), description="Where Prometheus may read metrics.")

    _files: tuple[Path, ...] = PrivateAttr(default=())

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that were read, in order; empty when all is default."""
        return self._files


FORMAT = Format(
    title=TITLE,
    rules=(
        lambda root: rules.step_rules(root, ("inventory",), tuple(INVENTORY_KINDS)),
        lambda root: rules.step_rules(root, ("observe",), tuple(OBSERVERS)),
        clusters_differ,
        lambda root: _team_rules(root),
    ),
    reserved={
        **reserved_kinds("inventory", LATER["inventory"]),
        **reserved_kinds("observe", LATER["observe"]),
        **reserved_kinds("teams.*.verify", LATER["verify"]),
    },
)


def load(path: Path | None) -> Settings:
    """Read the settings file and what stands in `config.d` beside it; None means all defaults.

    Raises InvalidFile with every mistake of every file, also when a file
    cannot be read, and when there are files and all of them are empty.
    """
    if path is None:
        return Settings()
    files = _files_of(path)
    documents = [_read(file) for file in files[:MAX_FILES]]
    mistakes = [mistake for document in documents for mistake in document.mistakes]
    if len(files) > MAX_FILES:
        mistakes.append(_unreadable(files[MAX_FILES], f"{len(files)} files", f"at most {MAX_FILES} files"))
    roots = [document.root for document in documents if document.root is not None]
    if not roots:
        raise InvalidFile(tuple(mistakes))
    root = roots[0]
    for other in roots[1:]:
        root = _merged(root, other)
    if not root.children and not mistakes:
        # A file that was cut off by a full disk or a slip would take teams, pools and inventory away.
        raise InvalidFile((_unreadable(path, "nothing", "at least one key, here or in config.d"),))
    _resolve_paths(root)
    settings = check(Settings, Document(str(path), root, tuple(mistakes)), FORMAT)
    settings._files = tuple(files)
    return settings


def schema() -> dict[str, JSON]:
    """Return the JSON Schema of settings files, made from the types that read them."""
    return schema_of_model(Settings, TITLE)


def _files_of(path: Path) -> list[Path]:
    beside = path.parent / "config.d"
    return [path, *sorted(file for file in beside.glob("*.yaml") if not file.name.startswith("."))]


def _read(path: Path) -> Document:
    try:
        with path.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except OSError as error:
        mistake = _unreadable(path, error.strerror or str(error), "a file the daemon can read")
        return Document(str(path), None, (mistake,))
    document = read_document(text, str(path), empty_is_mapping=True)
    if document.root is not None and not isinstance(document.root.children, dict):
        place = document.root.place
        mistake = Mistake(
            place.file,
            place.line,
            place.column,
            ROOT,
            "no mapping",
            "a mapping (key: value)",
            "settings are a mapping",
        )
        return Document(str(path), None, (*document.mistakes, mistake))
    return document


def _unreadable(path: Path, found: str, allowed: str) -> Mistake:
    return Mistake(str(path), 1, 1, ROOT, found, allowed, "the settings cannot be read")


def _merged(base: Value, over: Value) -> Value:
    """Merge a later file into an earlier one: mappings by key, all else replaced."""
    if not isinstance(base.children, dict) or not isinstance(over.children, dict):
        return over
    children = dict(base.children)
    for key, value in over.children.items():
        children[key] = _merged(children[key], value) if key in children else value
    plain = {key: value.plain for key, value in children.items()}
    return Value(plain, base.place, children, {**base.keys, **over.keys})


def _resolve_paths(root: Value) -> None:
    """Make relative paths absolute, each from the file it stands in."""
    for pattern in _PATHS:
        for parent, key in _places(root, pattern):
            value = parent.child(key)
            written = None if value is None else value.plain
            is_command = pattern == ("ansible", "bin") and isinstance(written, str) and "/" not in written
            if value is None or not isinstance(written, str) or not written.strip() or is_command:
                continue
            beside = Path(value.place.file).absolute().parent
            value.plain = parent.plain[key] = str(beside / Path(written).expanduser())


def _places(root: Value, pattern: Sequence[str]) -> Iterator[tuple[Value, str]]:
    """Yield the mappings, and their key, that a pattern names."""
    parents = [root]
    for part in pattern[:-1]:
        step = [_children(parent) if part == "*" else parent.child(part) for parent in parents]
        parents = [
            child
            for found in step
            for child in (found if isinstance(found, list) else [found])
            if isinstance(child, Value)
        ]
    for parent in parents:
        if isinstance(parent.children, dict):
            yield parent, pattern[-1]


def _children(parent: Value) -> list[Value] | None:
    found = parent.children
    return list(found.values()) if isinstance(found, dict) else found


def _team_rules(root: Value) -> Iterator[Breach]:
    teams = root.child("teams")
    if teams is None or not isinstance(teams.children, dict):
        return
    for name in teams.children:
        yield from rules.step_rules(root, ("teams", name, "verify"), tuple(CHECKS))
        yield from rules.windows_are_open(root, ("teams", name, "windows"))
