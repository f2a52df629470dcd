"""The objects of the fake AWX, and its list filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

JSON = Any

ASK = (
    *("scm_branch", "variables", "limit", "tags", "skip_tags", "job_type", "verbosity", "diff_mode"),
    *("inventory", "credential", "execution_environment", "labels", "forks", "job_slice_count", "timeout"),
    "instance_groups",
)
"""What a template may let a launch decide."""

FIELD_OF = {"variables": "extra_vars", "tags": "job_tags", "credential": "credentials"}
"""Fields of a launch that have another name than their permission."""

RESERVED = frozenset(
    {"limit", "type", "search", "order", "order_by", "page", "page_size", "format", "host_filter"}
    | {"count_disabled", "no_truncate", "validate"}
)
"""Names that filter nothing."""

FORBIDDEN = frozenset({"extra_vars", "job_args", "job_env", "start_args", "survey_passwords"})

ACTIVE = ("new", "pending", "waiting", "running")


class BadFilter(Exception):
    """A filter that the server refuses, with the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


@dataclass
class Project:
    """A project; `checkout` returns the directory of a branch or commit, or raises KeyError."""

    id: int
    name: str
    scm_url: str
    checkout: Callable[[str], Path]
    organization: int = 1
    scm_revision: str = ""
    allow_override: bool = True
    status: str = "successful"
    scm_update_on_launch: bool = False

    def show(self) -> dict[str, JSON]:
        names = ("id", "name", "scm_url", "organization", "scm_revision", "allow_override", "status")
        return {name: getattr(self, name) for name in (*names, "scm_update_on_launch")} | {"scm_type": "git"}


@dataclass
class Template:
    """A job template."""

    id: int
    name: str
    project: Project
    playbook: str
    asks: set[str] = field(default_factory=lambda: set(ASK))
    allow_simultaneous: bool = True
    job_slice_count: int = 1
    survey: tuple[str, ...] = ()
    may_start: bool = True

    def show(self) -> dict[str, JSON]:
        return {
            "id": self.id,
            "name": self.name,
            "type": "job_template",
            "project": self.project.id,
            "organization": self.project.organization,
            "playbook": self.playbook,
            "allow_simultaneous": self.allow_simultaneous,
            "job_slice_count": self.job_slice_count,
            "survey_enabled": bool(self.survey),
            "summary_fields": {"user_capabilities": {"start": self.may_start}},
            **self.show_asks(),
        }

    def show_asks(self) -> dict[str, JSON]:
        return {f"ask_{name}_on_launch": name in self.asks for name in ASK}


@dataclass
class Host:
    """A host of an inventory."""

    id: int
    name: str
    variables: dict[str, JSON]
    enabled: bool = True

    def show(self, inventory: int) -> dict[str, JSON]:
        return {"id": self.id, "name": self.name, "enabled": self.enabled, "inventory": inventory}


@dataclass
class Inventory:
    """An inventory."""

    id: int
    name: str
    organization: int
    created: str
    description: str = ""
    variables: str = ""
    hosts: list[Host] = field(default_factory=list)
    groups: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    pending_deletion: bool = False

    def show(self) -> dict[str, JSON]:
        names = ("id", "name", "organization", "created", "description", "variables", "pending_deletion")
        return {name: getattr(self, name) for name in names} | {"kind": ""}

    def script(self) -> dict[str, JSON]:
        """Return what the inventory script of a job prints."""
        enabled = [host for host in self.hosts if host.enabled]
        extra = {"remote_tower_enabled": "true"}
        hostvars = {
            host.name: {**host.variables, **extra, "remote_tower_id": host.id, "remote_host_id": host.id}
            for host in enabled
        }
        names = {host.name for host in enabled}
        groups = {
            name: {"hosts": [each for each in hosts if each in names]} for name, hosts in self.groups.values()
        }
        return {"all": {"hosts": sorted(names)}, "_meta": {"hostvars": hostvars}, **groups}


@dataclass
class Job:
    """A job, with its events as stored, and what its process wrote that is not stored yet."""

    id: int
    template: Template
    inventory: Inventory | None
    fields: dict[str, JSON]
    created: str
    status: str = "pending"
    started: str | None = None
    finished: str | None = None
    explanation: str = ""
    scm_revision: str = ""
    begins: int = 0
    emitted: int = 0
    counter: int = 0
    events: list[dict[str, JSON]] = field(default_factory=list)
    unsaved: list[dict[str, JSON]] = field(default_factory=list)
    is_canceled: bool = False

    def show(self, *, detail: bool = False) -> dict[str, JSON]:
        inventory = self.inventory
        summary = {"inventory": None if inventory is None else {"id": inventory.id, "name": inventory.name}}
        shown = {
            "id": self.id,
            "type": "job",
            "job_template": self.template.id,
            "project": self.template.project.id,
            "playbook": self.template.playbook,
            "inventory": None if inventory is None else inventory.id,
            "status": self.status,
            "failed": self.status in ("failed", "error", "canceled"),
            "created": self.created,
            "started": self.started,
            "finished": self.finished,
            "job_explanation": self.explanation,
            "scm_revision": self.scm_revision,
            "summary_fields": summary,
            **self.fields,
        }
        if detail:
            done = self.status not in ACTIVE and self.emitted == len(self.events)
            shown["event_processing_finished"] = done
            stats = [each for each in self.events if each["event"] == "playbook_on_stats"]
            shown["host_status_counts"] = {} if stats else None
        return shown


def select(records: Iterable[JSON], query: Iterable[tuple[str, str]], resolve: JSON) -> list[JSON]:
    """Return the records that Django's lookups select; `resolve(record, path)` returns a field."""
    found = list(records)
    for key, text in query:
        if key in RESERVED:
            continue
        path = key.split("__")
        lookup = "exact"
        if path[-1] in ("exact", "in", "gt", "gte", "lt", "lte", "startswith", "icontains", "isnull"):
            lookup = path.pop()
        if path[0] in FORBIDDEN:
            raise BadFilter(403, f"Filtering on {path[0]} is not allowed.")
        found = [each for each in found if _matches(resolve(each, path), lookup, text)]
    return found


def _matches(value: JSON, lookup: str, text: str) -> bool:
    shown = str(value)
    match lookup:
        case "exact":
            return shown == text or (isinstance(value, bool) and shown.lower() == text.lower())
        case "in":
            return shown in text.split(",")
        case "startswith":
            return shown.startswith(text)
        case "icontains":
            return text.lower() in shown.lower()
        case "isnull":
            return (value is None) == (text.lower() == "true")
    left, right = (float(value), float(text)) if isinstance(value, int) else (shown, text)
    return {"gt": left > right, "gte": left >= right, "lt": left < right, "lte": left <= right}[lookup]  # type: ignore[operator]
