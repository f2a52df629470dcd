"""Models of the API's responses about the daemons of one store, and their settings."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class WhoAmI(TypedDict):
    """The caller, as the socket and the settings identify them."""

    user: str
    uid: int
    groups: list[str]
    teams: list[str]
    owner_of: list[str]
    admin: bool


class TeamSummary(TypedDict):
    """A team of the settings; `members` are user names and @groups, `checks` and `windows` are counts."""

    team: str
    members: list[str]
    checks: int
    windows: int
    canaries: list[str]


class PoolKeySummary(TypedDict):
    """A label key that makes pools, and their default budget."""

    key: str
    max_unavailable: str


class SettingsSummary(TypedDict):
    """The settings' limits, admins and teams."""

    observe_only: bool
    max_parallel: int
    admins: list[str]
    teams: list[TeamSummary]
    pools: list[PoolKeySummary]


class Health(TypedDict):
    """The daemon's version, start, trouble and runs."""

    version: str
    epoch: int
    pid: int
    since: str
    observe_only: bool
    trouble: str | None
    runs: Runs


class OpenApi(TypedDict):
    """The OpenAPI document of this API."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, dict[str, Any]]
    components: dict[str, dict[str, Any]]


class Leader(TypedDict):
    """The daemon that acts, and the term that it has begun."""

    name: str
    epoch: int
    since: str


class Standby(TypedDict):
    """A daemon that waits; `behind_entries`: audit entries that it had not followed at `seen_at`."""

    name: str
    behind_entries: int
    seen_at: str


class Daemons(TypedDict):
    """The daemons of one store.

    `role` is that of the daemon that answers: leader or standby.  `synchronous`: an acknowledged commit is on
    a second database server too, null for a store that is a file.
    """

    role: str
    leader: Leader
    standbys: list[Standby]
    synchronous: bool | None


class StepDownResponse(TypedDict):
    """The daemon ends, and these may lead next."""

    standbys: list[str]


class ChosenRunner(TypedDict):
    """A node's runner, and the selector that chose it; null for that of all other nodes."""

    name: str
    match: str | None


class Runner(TypedDict):
    """A runner, its nodes, its runs, and since when it begins none; `text` says all of it."""

    name: str
    match: str | None
    parallel: int
    active: int
    waiting: int
    problem: str | None
    since: str | None
    text: str


class Runs(TypedDict):
    """Playbook runs on the daemon's machine, the memory of its fork servers, and all runners.

    `plain_because` says why no run is forked, or null.
    """

    parallel: int
    active: int
    waiting: int
    forks: int
    new_processes: int
    fork_servers: int
    fork_servers_bytes: int
    plain_because: str | None
    runners: list[Runner]
