"""Sentences for reviews, handovers and comparisons, shared by the command line and the console."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from machines.model.timefmt import format_duration
from rolloutd.texts.formats import pluralize

if TYPE_CHECKING:  # the command line's start-up counts
    from rolloutd.control.fleet.wire_fleet import HandoverRollout
    from rolloutd.control.nodes.wire_nodes import ComparedNode, Comparison
    from rolloutd.control.plans.wire_plans import ApprovalEffect, BlastRadius, GateReview, Review
    from rolloutd.control.rollouts.wire import Bottleneck, Gate, Rollout

TIME_UNITS = 2


def find_gate(review: Review, gate: Gate) -> GateReview | None:
    return next(
        (each for each in review["gates"] if (each["gate"], each["wave"]) == (gate["gate"], gate["wave"])),
        None,
    )


def describe_blast_radius(radius: BlastRadius) -> str:
    """Return what starts: `8 nodes of 4 teams, at most 4 at once, about 55s, traffic not probed`."""
    if not radius["nodes"]:
        return "no node starts"
    parts = [f"{pluralize(radius['nodes'], 'node')} of {pluralize(len(radius['teams']), 'team')}"]
    parts.append(f"at most {radius['at_once']} at once")
    work = radius["work"]
    if work is None:
        parts.append("no forecast yet")
    else:
        low, high = (format_duration(work[key], TIME_UNITS) for key in ("low_s", "high_s"))
        parts.append(f"about {low}" if low == high else f"{low} to {high}")
    parts.append("traffic probed" if radius["traffic_probed"] else "traffic not probed")
    return ", ".join(parts)


def describe_train(rollout: Rollout) -> str:
    """Return a rollout's place in its train: `train t (active): 2 of 3, 4 outages saved`; "" without one."""
    train = rollout["train"]
    if train is None:
        return ""
    place = train["rollouts"].index(rollout["rollout"]) + 1
    shown = f"train {train['name']} ({train['state']}): {place} of {len(train['rollouts'])}"
    if train["state"] == "waiting" and rollout["rollout"] in train["missing"]:
        return f"{shown}; rolloutctl approve {rollout['rollout']} train"
    return f"{shown}, {pluralize(train['outages_saved'], 'outage')} saved"


def describe_bottleneck(found: Bottleneck) -> str:
    """Return `pool team/payments; with one more there it ends 2h earlier`."""
    saves = format_duration(found["saves_s"], TIME_UNITS) if found["saves_s"] >= 1 else "no"
    more = "without it" if found["kind"] == "window" else "with one more there"
    return f"{found['kind']} {found['name']}; {more} it ends {saves} earlier"


def describe_vote_deadline(rollout: Rollout) -> str:
    """Return what a vote means: `a yes now: ends 14:10 to 15:02; one after 16:00 costs 22h`; "" without."""
    forecast = rollout["forecast"]
    if forecast is None or not any(gate["state"] == "waiting" for gate in rollout["gates"]):
        return ""
    ends = forecast["ends_at"]
    if ends["p50"] is None or ends["p90"] is None:
        return "a yes now: it does not end as it is; see rolloutctl forecast"
    low, high = (_local(ends[side] or "") for side in ("p50", "p90"))
    text = f"a yes now: ends {low}" if low == high else f"a yes now: ends {low} to {high}"
    deadline = forecast["vote_deadline"]
    if deadline is not None:
        costs = format_duration(deadline["costs_s"], TIME_UNITS)
        text += f"; one after {_local(deadline['yes_by'])} costs {costs}"
    return text


def _local(instant: str) -> str:
    """Return an instant in local time, with its day: `Thu 14:10`, or a date if it is far off."""
    at = datetime.fromisoformat(instant).astimezone()
    is_near = abs(at - datetime.now(UTC)) < timedelta(days=6)
    return at.strftime("%a %H:%M" if is_near else "%Y-%m-%d %H:%M")


def describe_approval(effect: ApprovalEffect, owner: str) -> str:
    """Return which missing votes an approval gives, and whether the gate opens then."""
    if effect["refused"] is not None:
        return f"your approval would be refused: {effect['refused']}"
    given = [f"{owner} (owner)"] if effect["owner"] else []
    given += effect["teams"]
    noun = "vote" if len(given) == 1 else "votes"
    votes = f"gives the missing {noun} of {_join(given)}" if given else "gives no vote that is missing"
    return f"your approval {votes}; then {'the gate opens' if effect['opens'] else 'other votes are missing'}"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def difference_lines(review: Review) -> Iterator[str]:
    """Yield the differences to the previous rollout as lines of a diff: of the plan, then of the source."""
    for value in review["plan_differences"]:
        if value["before"] is not None:
            yield f"-{value['path']}: {value['before']}"
        if value["after"] is not None:
            yield f"+{value['path']}: {value['after']}"
    for file in review["file_differences"]:
        yield f"{file['path']} is {file['change']}{'' if file['diff'] is not None else ' (not shown)'}"
        yield from (f"  {line}" for line in (file["diff"] or "").splitlines())


# -- handover and comparison ------------------------------------------------------


def describe_change(rollout: HandoverRollout) -> str:
    """Return what happened to a rollout: `opened, 5 nodes changed, n3 failed, ended`."""
    parts = ["opened"] if rollout["opened"] else []
    parts += [f"{pluralize(rollout['changed'], 'node')} changed"] if rollout["changed"] else []
    parts += [f"{', '.join(rollout['failed'])} failed"] if rollout["failed"] else []
    if rollout["ended"]:
        parts.append("ended" if rollout["reason"] is None else rollout["reason"]["text"])
    return ", ".join(parts) or "no change"


def describe_wait(rollout: HandoverRollout) -> str:
    """Return what a rollout waits for: the missing votes of its gates, else its reason; empty if nothing."""
    if rollout["gates"]:
        return "; ".join(f"{gate['gate']}: {gate['missing']}" for gate in rollout["gates"])
    return rollout["reason"]["text"] if rollout["reason"] is not None and not rollout["ended"] else ""


def describe_canaries(found: Comparison) -> str:
    """Return the canaries' number and times: `2 canaries took 30s to 34s`."""
    if found["low_s"] is None or found["high_s"] is None:
        return f"no node of wave {found['canary_wave']} is changed yet, so there is nothing to compare with"
    # Rounded down, as the clock of each node is.
    low, high = (format_duration(int(seconds), TIME_UNITS) for seconds in (found["low_s"], found["high_s"]))
    times = low if low == high else f"{low} to {high}"
    count = len(found["canaries"])
    return f"{pluralize(count, 'canary', 'canaries')} took {times}"


def describe_outlier(node: ComparedNode) -> str:
    """Return what is unlike the canaries; empty for a node like them."""
    parts = [] if node["time"] == "usual" else [f"{node['time']} than all canaries"]
    if node["extra_tasks"]:
        parts.append(f"changed, but on no canary: {', '.join(node['extra_tasks'])}")
    if node["missing_tasks"]:
        parts.append(f"not changed, but on every canary: {', '.join(node['missing_tasks'])}")
    return "; ".join(parts)
