"""JSON shapes of runners."""

from __future__ import annotations

from typing_extensions import TypedDict


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
