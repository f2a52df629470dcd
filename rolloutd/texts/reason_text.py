"""Sentences and commands for the core's reasons, all in one place.

The core says why something waits by a code with params, and what ends it by a remedy; only this file and
vote_text.py turn them into English.  No other part parses these sentences: programs compare codes, params and
kinds.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from machines.model.node import ConflictKind
from machines.model.reasons import Reason, ReasonCode, Remedy, RemedyKind, UnavailabilityCause
from machines.model.rows import MismatchKind
from machines.model.timefmt import format_duration, format_rfc3339
from rolloutd.texts import runner_text
from rolloutd.texts.formats import format_size, pluralize
from rolloutd.texts.vote_text import (
    describe_failure,
    describe_missing_votes,
    describe_not_asked,
    describe_unknown_team,
)

Params = Mapping[str, Any]


def describe(reason: Reason) -> str:
    """Return the reason as one sentence without a full stop."""
    return SENTENCES[reason.code](reason.subject, reason.params)


def lifted_by(reason: Reason) -> str:
    """Return who or what ends the wait; empty when unknown."""
    return "" if reason.remedy is None else describe_remedy(reason.remedy)


def describe_remedy(remedy: Remedy) -> str:
    """Return who or what ends the wait, as a noun phrase or a command; all commands, if it needs several."""
    phrase = REMEDIES.get(remedy.kind)
    who, how = describe_who(remedy), command(remedy) or ""
    text = phrase(remedy) if phrase is not None else f"{who}: {how}" if who else how
    if (also := remedy.also) is None:
        return text
    subject = f"{also.args['node']} itself" if "node" in also.args else f"{also.args['rollout']} to continue"
    return f"{text}, and for {subject} {describe_remedy(also)}"


def command(remedy: Remedy) -> str | None:
    """Return the command line that ends the wait, None when no command does."""
    words = COMMANDS.get(remedy.kind)
    if words is None:
        return None
    return f"rolloutctl {words({key: _quote(key, value) for key, value in remedy.args.items()})}"


def _quote(key: str, value: str | bool) -> str | bool:
    """Return an argument that is safe to paste into a shell: any user may choose the name of a hold."""
    if isinstance(value, bool) or not value:
        return value
    return " ".join(map(shlex.quote, value.split() if key == "nodes" else [value]))


def describe_who(remedy: Remedy) -> str | None:
    """Return who can give the command, None for every user with the right."""
    match remedy:
        case Remedy(
            kind=RemedyKind.ADD_TEAM
            | RemedyKind.SETTLE
            | RemedyKind.ACCEPT_INVENTORY
            | RemedyKind.PIN_IDENTITY
        ):
            return "an admin"
        case Remedy(kind=RemedyKind.APPROVE, args={"team": team}):
            return f"a member of team {team}"
        case _:
            return remedy.who


def describe_unavailability(params: Params, name: str = "") -> str:
    """Return why a node counts as down as one sentence about it, under its own or another `name`."""
    name = name or params["node"]
    match params:
        case {"health": None}:
            return f"{name} has not been observed yet"
        case {"health": "up", "since": since}:
            return f"{name} was last observed at {format_rfc3339(since)} (it was up then)"
        case {"stale": True, "since": since}:
            return f"{name} {describe_state(params)} (observed at {format_rfc3339(since)})"
        case _:
            return f"{name} {describe_state(params)}"


def describe_state(params: Params) -> str:
    """Return the same without the node's name and the age of observations, so that equal states group."""
    match params["cause"]:
        case UnavailabilityCause.IN_FLIGHT | UnavailabilityCause.ISOLATED as cause:
            still = " and still isolated" if cause == UnavailabilityCause.ISOLATED else ""
            return f"is {params['phase']} in {params['rollout']}{_since(params)}{still}"
        case UnavailabilityCause.FAILED:
            return f"is failed in {params['rollout']}{_since(params)}{_detail(params['message'])}"
        case UnavailabilityCause.HELD:
            return f"is held by {params['by']}{_since(params)}{_until(params)}: {params['reason']}"
        case _ if params["health"] == "up":
            return _HEALTH["up"]  # how it answered differs from node to node, and says nothing
        case _:
            return _HEALTH[params["health"]] + _detail(params["detail"])


def describe_mismatch(subject: str, kind: str, columns: Sequence[str]) -> str:
    """Return what is wrong with a row that the audit does not account for."""
    match kind:
        case MismatchKind.NOT_COMPARED:
            return f"{subject}: not compared with the database yet"
        case MismatchKind.EXTRA:
            return f"{subject}: the database has it, but no audit entry made it"
        case MismatchKind.MISSING:
            return f"{subject}: an audit entry made it, but the database lacks it"
        case _:
            verb = "differs" if len(columns) == 1 else "differ"
            return f"{subject}: {', '.join(columns)} {verb} from what the audit's entries make of it"


def describe_differences(rows: int, unreadable: int, *, is_complete: bool) -> str:
    """Return the result of a comparison of the database with an intact audit."""
    parts = []
    if rows:
        count = pluralize(rows, "row") if is_complete else f"more than {pluralize(rows, 'row')}"
        parts.append(f"{count} of the database {'differs' if rows == 1 else 'differ'} from the audit")
    if unreadable:
        parts.append(f"this version cannot read {pluralize(unreadable, 'audit entry', 'audit entries')}")
    return "; ".join(parts)


def describe_conflict(kind: str, about: str, values: Mapping[str, str]) -> str:
    """Return what the inventory sources contradict each other in about a node, as a clause."""
    reported = ", ".join(f"{source}: {value}" if value else source for source, value in values.items())
    text = _CONFLICTS[ConflictKind(kind)]
    about = about.replace("_", " ") if kind == ConflictKind.IDENTITY_CHANGED else about
    return text.format(about=about, reported=reported, sources=", ".join(values))


_CONFLICTS: Final[Mapping[ConflictKind, str]] = {
    ConflictKind.NOT_REPORTED: "{sources} has it and {about} does not",
    ConflictKind.OWNERS_DIFFER: "its owner differs ({reported})",
    ConflictKind.POOLS_DIFFER: "its pool by {about} differs ({reported})",
    ConflictKind.IDENTITY_CHANGED: "its {about} is not the pinned one ({reported})",
    ConflictKind.ADDRESS_SHARED: "its address {about} is also that of {reported}",
    ConflictKind.OUT_OF_SERVICE: "its {about} says that it is not in service ({reported})",
    ConflictKind.PROVIDER_ID_SHARED: "its provider_id {about} is also that of {reported}",
    ConflictKind.MACHINE_ID_SHARED: "its machine id is also that of {reported}",
    ConflictKind.MOVE_DEFERRED: "its {about} changes at the end of its attempt ({reported})",
    ConflictKind.RENAMED: "it has another name now ({reported})",
    ConflictKind.NAME_SHARED: "several objects have its name ({reported})",
    ConflictKind.INVALID: "its record is not valid ({reported})",
    ConflictKind.REMOVED_IN_FLIGHT: "{reported} reports it no longer, since it was in flight",
}


def _quarantined(node: str, params: Params) -> str:
    found = (describe_conflict(each["kind"], each["about"], each["values"]) for each in params["conflicts"])
    return f"{node} is quarantined: {'; '.join(found)}"


def _stale(source: str, params: Params) -> str:
    limit = f"stale_after is {format_duration(params['stale_after_s'])}"
    if params["refreshed_at"] is None:
        return f"inventory source {source} has never answered"
    return f"inventory source {source} last answered at {format_rfc3339(params['refreshed_at'])}; {limit}"


_HEALTH: Final[Mapping[str | None, str]] = {
    None: "not observed yet",
    "up": "last seen up",
    "down": "does not answer",
    "unknown": "could not be observed",
    "cordoned-by-other": "was taken out of service by another tool or user",
    "locked-by-other": "is locked by another tool or user",
}


def _gate(name: str, params: Params) -> str:
    return f"the {name} waits: {describe_missing_votes(params) or 'its votes are complete'}"


def _needs_vote(node: str, params: Params) -> str:
    team, unknown = params["team"], "" if params["known_team"] else describe_unknown_team(params["team"])
    if params["joined"]:
        detail = unknown or f"team {team} has not voted for it"
        free = params.get("free_joiners")
        may = "no node may" if not free else f"only {pluralize(free, 'node')} may"
        rule = "" if free is None else f" ({may} without a vote)"
        return f"{node} joined after the start was approved{rule}; {detail}"
    return f"team {team} has not voted at {params['gate']}; its nodes wait{_detail(unknown)}"


def _windows(params: Params) -> str:
    by_owner = {"plan": "the plan's", "prepare": "the plan's prepare", "team": f"team {params['team']}'s"}
    return by_owner.get(params["windows"], f"team {params['team']}'s own")


def _outside_window(_: str, params: Params) -> str:
    opens_at = params["opens_at"]
    when = "they do not open within two weeks" if opens_at is None else f"next at {format_rfc3339(opens_at)}"
    return f"{_windows(params)} windows are closed; {when}"


def _max_parallel(rollout: str, params: Params) -> str:
    named = {"fleet": "the fleet", "rollout": rollout}
    scope = named.get(params["scope"], f"wave {params['wave']} of {rollout}")
    number, most = params["in_flight"], params["max_parallel"]
    if params["scope"] == "unready":
        who = ", ".join(params["nodes"]) or "in flight"
        return f"{pluralize(number, 'target')} of {rollout} unready ({who}); maxUnready is {most}"
    nodes = f"{pluralize(number, 'node')} of {scope} {'is' if number == 1 else 'are'} in flight"
    return f"{nodes}, and max_parallel is {most}"


def _pool_full(state: str, pool: str, params: Params) -> str:
    peers = "; ".join(describe_unavailability(each) for each in params["peers"])
    more = f" and {params['more']} more" if params["more"] else ""
    text = f"pool {pool} is {state}: {peers or 'another node of it is starting'}{more}"
    return text + _dry_run(params)


def _dry_run(params: Params) -> str:
    if "dry_run_at" not in params:
        return ""
    at, problem = format_rfc3339(params["dry_run_at"]), params["dry_run_problem"]
    return f"; this node could not be isolated at {at} (dry run), so others go first: {problem}"


def _peer(node: str, params: Params) -> str:
    return describe_unavailability(params, f"peer {node} of {params['pool']}")


def _availability(_: str, params: Params) -> str:
    return describe_unavailability(params)


def _more(params: Params) -> str:
    return f", and {params['more']} more" if params["more"] else ""


def _cause(params: Params) -> str:
    """Return the failure that a plan answers with rollbacks, as a part of a sentence."""
    return f": {describe_failure(params['node'], params)}" if "node" in params else ""


def _exceptions(params: Params) -> str:
    """Return how many nodes have the change, and by outcome which have not and why."""
    parts = [f"{params['changed']} changed"]
    named = params["nodes"]
    for outcome in dict.fromkeys(each["outcome"] for each in named):
        nodes = [
            ", ".join(filter(None, (each["node"], each["detail"])))
            for each in named
            if each["outcome"] == outcome
        ]
        parts.append(f"{len(nodes)} {outcome} ({'; '.join(nodes)})")
    if (unnamed := params["skipped"] - len(named)) > 0:
        parts.append(f"and {unnamed} more")
    return ", ".join(parts)


def _detail(text: str | None) -> str:
    return f": {text}" if text else ""


def _tries(params: Params) -> str:
    return f" ({params['tries']} tries)" if params["tries"] > 1 else ""


def _since(params: Params) -> str:
    return f" since {format_rfc3339(params['since'])}"


def _until(params: Params) -> str:
    return "" if params["until"] is None else f" until {format_rfc3339(params['until'])}"


def _about(until: float | None) -> str:
    return "" if until is None else f"; the next probe is at about {format_rfc3339(until)}"


SENTENCES: Final[Mapping[ReasonCode, Callable[[str, Params], str]]] = {
    # The whole rollout.
    ReasonCode.CANCELLED: lambda _, p: f"cancelled by {p['by']}: {p['reason']}",
    ReasonCode.ENDED: lambda rollout, _: f"{rollout} has ended",
    ReasonCode.PAUSED: lambda _, p: f"paused by {p['by']}: {p['reason']}",
    ReasonCode.REJECTED: lambda _, p: (
        f"{p['by']} said no at {p['gate']}{' after ' + p['wave'] if p['wave'] else ''}: {p['reason']}"
    ),
    ReasonCode.GATE_PILOT: lambda _, p: _gate("pilot gate", p),
    ReasonCode.GATE_START: lambda _, p: _gate("start gate", p),
    ReasonCode.GATE_CONTINUE: lambda _, p: _gate(f"continue gate after wave {p['wave']}", p),
    ReasonCode.NODE_FAILED: lambda node, p: describe_failure(node, p) + _more(p),
    ReasonCode.DISTURBED: lambda node, p: (
        f"{p['step']} disturbed {node}, which was in service: {p['message']}{_more(p)}"
    ),
    ReasonCode.ROLLING_BACK: lambda _, p: f"rolling back {pluralize(p['left'], 'node')}{_cause(p)}",
    ReasonCode.ROLLBACK_LIMIT: lambda _, p: (
        f"{pluralize(p['left'], 'node')} not rolled back, because at_most is {p['at_most']}{_cause(p)}"
    ),
    ReasonCode.ROLLBACK_FAILED: lambda node, p: (
        f"the rollback of {node} failed in {p['step']}, so no other begins: {p['message']}"
    ),
    ReasonCode.SOAKING: lambda _, p: f"wave {p['wave']} soaks until {format_rfc3339(p['until'])}",
    ReasonCode.OBSERVE_ONLY: lambda *_: "observe_only is set: rolloutd decides everything and does nothing",
    ReasonCode.AUDIT_MISMATCH: lambda subject, p: describe_mismatch(subject, p["kind"], p["columns"]),
    ReasonCode.DECISION_REFUSED: lambda rollout, p: f"a decision for {rollout} was refused: {p['problem']}",
    # A gate at which no user can vote now.
    ReasonCode.CLOSED: lambda rollout, p: (
        f"{rollout}: {'cancelled' if p['cancelled'] else 'ended'}; its gates take no more votes"
    ),
    ReasonCode.NOT_ASKED: describe_not_asked,
    ReasonCode.GATE_CLOSED: lambda group, p: _gate(f"gate of {group}", p),
    ReasonCode.ROLLOUT_STOPPED: lambda node, p: (
        f"{p['rollout']} is stopped, and {node} is not done in it; see rolloutctl why {p['rollout']}"
    ),
    # A pending node.
    ReasonCode.EARLIER_WAVE: lambda wave, _: f"wave {wave} is not over",
    ReasonCode.NODE_GONE: lambda node, _: f"the inventory no longer has {node}",
    ReasonCode.QUARANTINED: _quarantined,
    ReasonCode.INVENTORY_STALE: _stale,
    ReasonCode.NO_ISOLATOR: lambda node, _: (
        f"no isolator of the plan applies to {node}, and the plan does not say that it stays in service"
    ),
    ReasonCode.NO_CHECK: lambda node, _: f"no check of the plan applies to {node}",
    ReasonCode.NO_CHANGE: lambda node, _: f"the plan's change does not apply to {node}",
    ReasonCode.VALUES_CHANGED: runner_text.describe_changed_values,
    ReasonCode.BACKOFF: lambda node, p: (
        f"{node} is tried again at {format_rfc3339(p['until'])}{_detail(p['detail'])}"
    ),
    ReasonCode.NEEDS_VOTE: _needs_vote,
    ReasonCode.FREEZE: lambda scope, p: f"{scope} is frozen by {p['by']}{_until(p)}: {p['reason']}",
    ReasonCode.OUTSIDE_WINDOW: _outside_window,
    ReasonCode.WINDOW_TOO_SHORT: lambda _, p: (
        f"a node takes {format_duration(p['needed_s'])} and {_windows(p)} window closes at "
        f"{format_rfc3339(p['closes_at'])}"
    ),
    ReasonCode.HELD: _availability,
    ReasonCode.OTHER_ROLLOUT: _availability,
    ReasonCode.TRAIN: lambda node, p: (
        f"{node} {'stays isolated' if p.get('shares') else 'waits'} for {p['rollout']} of its train"
    ),
    ReasonCode.NODE_DOWN: _availability,
    ReasonCode.FOREIGN_CORDON: _availability,
    ReasonCode.FOREIGN_LOCK: _availability,
    ReasonCode.NODE_UNKNOWN: _availability,
    ReasonCode.POOL_CLOSED: lambda pool, _: f"pool {pool} is closed: its max_unavailable is 0",
    ReasonCode.POOL_FULL: lambda pool, p: _pool_full("full", pool, p),
    ReasonCode.POOL_OVER_BUDGET: lambda pool, p: _pool_full(f"over its budget of {p['budget']}", pool, p),
    ReasonCode.PEER_DOWN: _peer,
    ReasonCode.PEER_UNKNOWN: _peer,
    ReasonCode.MAX_PARALLEL: _max_parallel,
    ReasonCode.DISK_FULL: lambda _, p: (
        f"the daemon's disk is full: {format_size(p['free_bytes'])} are free,"
        f" {format_size(p['needed_bytes'])} are needed to begin a run"
    ),
    ReasonCode.TRAFFIC: lambda node, p: (
        str(p["detail"])
        if p["detail"] is not None
        else f"{node} has been idle for {format_duration(p['idle_s'])} of {format_duration(p['idle_for_s'])}"
    ),
    ReasonCode.TRAFFIC_UNKNOWN: lambda node, p: (
        f"{node} is being probed for client traffic" if p["detail"] is None else str(p["detail"])
    ),
    ReasonCode.CANNOT_ISOLATE: lambda node, p: f"{node} cannot be isolated: {p['detail']}",
    ReasonCode.NO_RUNNER: runner_text.describe_none,
    ReasonCode.RUNNER_DOWN: runner_text.describe_down,
    ReasonCode.RUNNER_FULL: runner_text.describe_full,
    ReasonCode.CHECKING_COMPLIANCE: lambda node, _: f"{node} is checked for whether it needs the change",
    ReasonCode.PREPARING: lambda node, p: (
        f"{node} is being prepared by {p['rollout']}"
        if "rollout" in p
        else f"{node} {'is in' if p['running'] else 'waits for'} prepare stage {p['stage']}; "
        f"{pluralize(p['left'], 'node')} of the rollout not prepared{_detail(p.get('detail'))}"
    ),
    ReasonCode.PREPARE_FAILED: lambda subject, p: (
        f"prepare stage {p['stage']} failed on {subject}{_more(p)}: {p['message']}; "
        f"try {p['attempt'] + 1} at {format_rfc3339(p['until'])}"
    ),
    ReasonCode.STAGED_UNKNOWN: lambda node, p: (
        f"the staged files on {node} cannot be compared: {p['detail']}"
        if p["detail"]
        else f"the staged files on {node} are being compared"
    ),
    ReasonCode.CHECKING: lambda node, _: f"{node} is being checked in service",
    ReasonCode.CHECK_MODE: lambda node, _: f"{node} runs a playbook in check mode",
    ReasonCode.CLEANING: lambda node, _: f"{node} is being cleaned of what ended rollouts left",
    ReasonCode.RELEASING: lambda node, _: f"{node} is being returned to service after a hold",
    ReasonCode.STARTING: lambda node, _: f"{node} starts now",
    ReasonCode.QUEUED: lambda node, p: (
        f"{node} is queued{_detail(p['ahead'] and p['ahead'] + ' goes first')}{_dry_run(p)}"
    ),
    ReasonCode.ROLLBACK_QUEUED: lambda node, _: f"{node} is queued for its rollback",
    # A node that does not wait to start.
    ReasonCode.FAILED: lambda node, p: describe_failure(node, p) if p else f"{node} failed",
    ReasonCode.DRIFTED: lambda node, p: (
        f"{node} has drifted: check mode would change {', '.join(p['tasks'])}"
    ),
    ReasonCode.DONE_WITH_EXCEPTIONS: lambda _, p: f"done with exceptions: {_exceptions(p)}",
    # A node in flight whose isolators or checks wait.
    ReasonCode.NOT_ISOLATED_YET: lambda _, p: f"{p['detail']}{_tries(p)}",
    ReasonCode.NOT_RETURNED_YET: lambda node, p: (
        f"{node} cannot return to service yet: {p['detail']}{_tries(p)}"
    ),
    ReasonCode.NOT_PASSED_YET: lambda _, p: f"{p['step']} has not passed yet: {p['detail']}",
    ReasonCode.AWAITING_API: lambda node, p: f"{node} waits for an answer: {p['detail']}",
    ReasonCode.INVENTORY_AWAITED: lambda node, p: (
        f"{node} waits for its passwords, which are not stored: {', '.join(p['sources'])} "
        "has not answered since the daemon started"
    ),
}

COMMANDS: Final[Mapping[RemedyKind, Callable[[Params], str]]] = {
    RemedyKind.APPROVE: lambda a: (
        f"approve {a['rollout']} {a['gate']}{' --wave ' + a['wave'] if a.get('wave') else ''} --reason ..."
    ),
    RemedyKind.APPROVE_REBOOTS: lambda a: f"approve {a['group']} --until 7d --reason ...",
    RemedyKind.WITHDRAW: lambda a: (
        f"withdraw {a['rollout']} {a['gate']}{' --wave ' + a['wave'] if a['wave'] else ''} --reason ..."
    ),
    RemedyKind.RESUME: lambda a: f"resume {a['rollout']} --reason ...",
    RemedyKind.RETRY: lambda a: f"retry {a['rollout']} {a['node']} --reason ...",
    # A build is of no node.
    RemedyKind.RETRY_PREPARATION: lambda a: (
        f"retry {a['rollout']}{a['node'] and ' ' + str(a['node'])} --reason ..."
    ),
    RemedyKind.ROLL_BACK: lambda a: f"rollback {a['rollout']} {a['nodes']} --reason ...",
    RemedyKind.SKIP: lambda a: (
        f"skip {a['rollout']} {a['node']}{' --return' if a['return'] else ''} --reason ..."
    ),
    RemedyKind.RETURN: lambda a: f"return {a['node']}",
    RemedyKind.RELEASE: lambda a: f"release {a['node']}{' --as ' + a['id'] if 'id' in a else ''}",
    RemedyKind.UNFREEZE: lambda a: f"unfreeze --scope {a['id']}",
    RemedyKind.SETTLE: lambda a: f"audit settle {a['subject']} --keep audit --reason ...",
    RemedyKind.ACCEPT_INVENTORY: lambda a: f"inventory accept {a['source']} --reason ...",
    RemedyKind.PIN_IDENTITY: lambda a: f"inventory pin {a['node']} --reason ...",
    RemedyKind.ADD_TEAM: lambda a: f"skip {a['rollout']} {a['node']} --reason ...",
}
"""The command that ends a wait; a failed node's alternatives to retry are in REMEDIES."""

REMEDIES: Final[Mapping[RemedyKind, Callable[[Remedy], str]]] = {
    RemedyKind.RETRY: lambda r: f"{command(r)} (or skip{', or rollback' if r.args['has_rollback'] else ''})",
    RemedyKind.RETRY_PREPARATION: lambda r: f"{command(r)}{' (or skip)' if r.args['node'] else ''}, or time",
    RemedyKind.ADD_TEAM: lambda r: (
        f"an admin, who adds team {r.args['team']} to the settings, or {command(r)}"
    ),
    RemedyKind.SUBMIT_AGAIN: lambda it: f"a new submission of the plan {it.args['plan']}, and its votes",
    RemedyKind.CHANGE_SETTINGS: lambda _: "an admin, who changes the settings and reloads them",
    RemedyKind.CHANGE_INVENTORY: lambda _: "a correction in the inventory",
    RemedyKind.UNCORDON: lambda r: f"the user or tool that took {r.args['node']} out of service",
    RemedyKind.RELEASE_BY_SOURCE: lambda r: f"{r.who}, which holds it as {r.args['id']}",
    RemedyKind.WAIT_UNTIL: lambda _: "time",
    RemedyKind.WAIT_FOR_NODE: lambda r: str(r.args["node"]),
    RemedyKind.WAIT_FOR_ROLLOUT: lambda r: f"{r.args['node']}, when it is done in {r.args['rollout']}",
    RemedyKind.WAIT_FOR_RETURN: lambda r: (
        f"{r.args['node']}, when it is returned{f', as {r.who} has ordered' if r.who else ''}"
    ),
    RemedyKind.WAIT_FOR_HEALTH: lambda r: (
        f"{r.args['node']}, when it is observed up or is no longer in the inventory"
    ),
    RemedyKind.WAIT_FOR_WAVE: lambda r: f"the end of wave {r.args['wave']}",
    RemedyKind.FREE_DISK: lambda _: "free space on the disk of the state directory",
    RemedyKind.WAIT_FOR_CAPACITY: lambda _: "the next node that is done",
    RemedyKind.WAIT_FOR_IDLE: lambda r: f"the end of that traffic{_about(r.until)}",
    RemedyKind.WAIT_FOR_PROBE: lambda r: f"an answer of the traffic probe{_about(r.until)}",
    RemedyKind.WAIT_FOR_BLOCKER: lambda _: "a change of what blocks it; the node is then tried again",
    RemedyKind.WAIT_FOR_ISOLATION: lambda r: (
        "its cause; the isolation is being aborted"
        if r.until is None
        else f"its cause, or time: at {format_rfc3339(r.until)} the isolation is aborted and tried later"
    ),
    RemedyKind.WAIT_FOR_INVENTORY: lambda _: "the next answer of its inventory source",
    RemedyKind.WAIT_FOR_RUN: lambda _: "the end of a run on this machine",
    RemedyKind.WAIT_FOR_RUNNER: lambda r: f"the next time that runner {r.args['runner']} is available",
    RemedyKind.WAIT_FOR_API: lambda _: "a better answer; it is asked again",
    RemedyKind.WAIT_FOR_WORK: lambda _: "the end of that work",
    RemedyKind.WAIT_FOR_COMPLIANCE: lambda _: "the result of that check",
    RemedyKind.WAIT_FOR_PREPARATION: lambda _: "the end of its preparation",
    RemedyKind.WAIT_FOR_CHECK: lambda r: (
        "its last try" if r.until is None else f"time: it may take until {format_rfc3339(r.until)}"
    ),
}
