"""Sentences of the reasons that are about runners and what they run."""

from __future__ import annotations

from typing import Any

from rolloutd.texts.formats import pluralize

Params = Any


def describe_full(node: str, params: Params) -> str:
    """Return that a runner has no room; without `match` it is this machine, by its queue."""
    if "detail" in params:
        return f"{node} waits for {_runner(params)}, which is full: {params['detail']}"
    verb = "is" if params["active"] == 1 else "are"
    if "match" not in params:
        runs = f"{pluralize(params['active'], 'run')} {verb} active"
        most = params["parallel"]
        return f"{node} waits for this machine, not for a pool: {runs}, and ansible.parallel allows {most}"
    nodes = (
        f"{pluralize(params['active'], 'node')} {verb} in flight, and its `parallel` is {params['parallel']}"
    )
    return f"{node} waits for {_runner(params)}, not for a pool: {nodes}"


def describe_down(node: str, params: Params) -> str:
    return f"{node} waits for {_runner(params)}, which begins no runs: {params['detail']}"


def describe_none(node: str, _: Params) -> str:
    return f"no runner of the settings is for {node}, and local_runner is false"


def describe_runner(match: str, active: int, parallel: int, waiting: int, problem: str | None) -> str:
    """Return a runner's nodes, its room, and what to do if it begins no runs."""
    nodes = match or "all other nodes"
    room = f"{active} of at most {pluralize(parallel, 'run')} active, {pluralize(waiting, 'node')} waiting"
    if problem is None:
        return f"{nodes}: {room}"
    return f"{nodes}: {room}; begins no runs: {problem}; rolloutctl doctor checks it"


def _runner(params: Params) -> str:
    """Return the runner's name, and the selector that chose it."""
    return f"runner {params['runner']}{' (' + params['match'] + ')' if params.get('match') else ''}"


def describe_changed_values(node: str, params: Params) -> str:
    now, more = params["now"] or "missing", f", and {params['more']} more" if params["more"] else ""
    return (
        f"the value {params['name']} of {node} has changed since the vote: {params['before']} → {now}{more}"
    )
