"""Commands that show rollouts and nodes.

They import only the standard library, because start-up counts, and compute
nothing that the daemon could contradict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from machines.model.timefmt import format_duration
from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, confirm
from rolloutd.cli.output import (
    Columns,
    age_of,
    colorize,
    format_age,
    format_local,
    format_range,
    parse_rfc3339,
    percent_of,
    print_line,
    print_list,
    print_message,
    progress_bar,
    sanitize,
    short_of,
    with_columns,
)
from rolloutd.cli.why import MAX_NODES_NAMED, format_reason
from rolloutd.control import response_text, review_text
from rolloutd.control.client import api_path
from rolloutd.texts import event_text
from rolloutd.texts.formats import format_exceptions, format_percent, join_limited, pluralize, short_hash

if TYPE_CHECKING:
    from rolloutd.control.daemons.wire_daemons import Runner
    from rolloutd.control.fleet.wire_fleet import PoolSlots
    from rolloutd.control.nodes.wire_nodes import Node
    from rolloutd.control.plans.wire_plans import Preview
    from rolloutd.control.rollouts import wire

FRESH_FORECAST_S = 120.0
"""Age up to which a status shows a forecast without its age: the daemon makes one a minute while nodes move,
but on a busy machine much fewer."""

PHASES = ("pending", "isolating", "maintaining", "verifying", "done", "failed")

GATES = ("pilot", "start", "continue", "proceed")

CLOSED_STATES = frozenset({"done", "cancelled"})


def register(commands: CommandGroup) -> None:
    summary = "show the rollouts' state and progress"
    parser = commands.add_command("status", status, summary, is_list=True)
    parser.rollout(optional=True).flag("--all", text="include closed rollouts").watch()
    summary = "list all rollouts, or delete a closed one"
    parser = commands.add_command("rollouts", rollouts, summary, is_list=True).watch()
    verbs, summary = commands.add_verbs(parser), "delete a closed rollout, with the output of its runs"
    verbs.add_command("delete", delete_rollout, summary).rollout().yes()
    parser = commands.add_command("nodes", nodes, "list the nodes of a rollout", is_list=True)
    parser.rollout().watch()
    selector = "only nodes whose labels match, such as team=payments,rack!=r1 (repeatable: all must match)"
    parser.argument("-l", "--selector", metavar="SELECTOR", text=selector, action="append")
    phase = f"only nodes in this phase: {', '.join(PHASES)} (repeatable)"
    parser.add_argument("--phase", metavar="PHASE", help=phase, action="append", choices=PHASES)
    parser.argument("--pool", metavar="POOL", text="only nodes of this pool, such as rack/r1")


def status(call: Invocation) -> None:
    args = call.args
    if args.rollout is not None:
        found = call.get(api_path("rollouts", args.rollout))
        if not call.print_data(found, [found["rollout"]]):
            print_rollout(found)
        return
    answer = call.get(api_path("status"), all=args.all or None)
    if call.print_data(answer, [each["rollout"] for each in answer["rollouts"]]):
        return
    if answer["trouble"]:
        print_line(colorize(f"trouble: {sanitize(answer['trouble'])}", "red"))
    _print_runners(call)
    found = answer["rollouts"]
    _print_kept_slots(answer.get("kept_slots", ()))
    if not found:
        print_message("no rollout is live")
    elif len(found) == 1 and not (args.wide or args.is_csv or args.sort_by):
        print_rollout(found[0])
    else:
        call.print_items(STATUS_COLUMNS, found, STATUS_WIDE)


def _print_kept_slots(kept: Sequence[wire.KeptSlots]) -> None:
    """Print which nodes ended rollouts have not returned: no live rollout has them in its status."""
    for each in kept:
        rollout, more = each["rollout"], each["total"] - len(each["nodes"])
        named = sanitize(", ".join(each["nodes"])) + (f" and {more:,} more" if more else "")
        print_message(
            f"{rollout} has ended and still holds the slots of {named}; see rolloutctl why {rollout}"
        )


def _print_runners(call: Invocation) -> None:
    """Print each runner and its room, where the settings name others than this machine."""
    runners: list[Runner] = call.get(api_path("health"))["runs"]["runners"]
    for each in runners if len(runners) > 1 else ():
        text = sanitize(f"runner {each['name']}: {each['text']}")
        print_line(text if each["problem"] is None else colorize(text, "red"))


def rollouts(call: Invocation) -> int:
    answer = call.get(api_path("rollouts"))
    if call.print_data(answer, [each["rollout"] for each in answer["rollouts"]]):
        return exits.OK
    if not answer["rollouts"]:
        print_message("there are no rollouts")
    else:
        call.print_items(ROLLOUT_COLUMNS, answer["rollouts"], {"DIGEST": "digest"})
    return exits.OK


def delete_rollout(call: Invocation) -> int:
    name = call.args.rollout
    loss = f"{name}: the output of its runs is lost for ever; its audit stays"
    confirm(call, lambda: loss, "delete it?", must_ask=True)
    answer = call.client.delete(api_path("rollouts", name))
    return call.report(answer, f"{name}: deleted, with the output of its runs; its audit stays", name)


def nodes(call: Invocation) -> None:
    """List a rollout's nodes, or those that the options select."""
    args = call.args
    phases = None if args.phase is None else ",".join(args.phase)
    selector = None if args.selector is None else ",".join(filter(None, args.selector))
    query = {"selector": selector, "phase": phases, "pool": args.pool}
    found = call.get(api_path("rollouts", args.rollout, "nodes"), **query)["nodes"]
    if not call.print_data(found, [node["node"] for node in found]):
        call.print_items(with_runner(NODE_COLUMNS, found), found, NODE_WIDE)


def with_runner(columns: Columns, nodes: Sequence[Node] | Sequence[wire.InFlight]) -> Columns:
    """Return the columns with that of the runners, where a fleet has more than one and some run now."""
    return with_columns(columns, RUNNER) if any(map(_runner, nodes)) else columns


def _runner(node: Node | wire.InFlight) -> str | None:
    # A daemon of an older version does not send it.
    return node.get("runner")


def print_rollout(rollout: wire.Rollout) -> None:
    """Print a rollout's state, progress, reason, gates and pools."""
    plan = colorize(sanitize(rollout["plan"]), "bold")
    print_line(f"{plan}   {rollout['rollout']}   digest {short_hash(rollout['digest'])}")
    print_line(f"source {sanitize(rollout['source']['text'])}")
    wave = f"wave {rollout['wave']}" if rollout["wave"] else ""
    print_line(", ".join(filter(None, (colorize(rollout["state"]), wave, format_remaining(rollout)))))
    print_line(
        f"{progress_bar(rollout['percent'])} {format_percent(rollout['percent'])}   {_format_counts(rollout)}"
    )
    print_preparation(rollout)
    if train := response_text.describe_train(rollout):
        print_line(sanitize(train))
    if rollout["reason"] is not None:
        print_line(colorize(format_reason(rollout["reason"]), "yellow"))
    deadline = response_text.describe_vote_deadline(rollout)
    if deadline:
        print_line(sanitize(deadline))
    print_traffic_probes(rollout)
    print_gates(rollout)
    if rollout["in_flight"]:
        print_line()
        print_list(with_runner(IN_FLIGHT_COLUMNS, rollout["in_flight"]), rollout["in_flight"])
    print_line()
    print_list(POOL_COLUMNS, rollout["pools"])


def print_preparation(rollout: wire.Rollout) -> None:
    """Print how many nodes are prepared, and what preparation kept out of the slots."""
    prepared, minutes = rollout["prepared"], rollout["minutes"]
    if prepared is None:
        return
    percent = 100.0 * prepared["done"] / prepared["total"] if prepared["total"] else 100.0
    counts = f"{prepared['done']} of {pluralize(prepared['total'], 'node')} prepared"
    print_line(f"{progress_bar(percent)} {format_percent(percent)}   {counts}")
    for forced in rollout["forced_stages"]:
        nodes = join_limited(forced["nodes"], MAX_NODES_NAMED) if forced["nodes"] else "all nodes"
        print_line(sanitize(f"prepare stage {forced['stage']} is forced on {nodes}"))
    slot, prepare = (format_duration(60.0 * minutes[key]) for key in ("slot", "prepare"))
    whole = format_duration(60.0 * (minutes["slot"] + minutes["prepare"]))
    print_line(f"{slot} in slots and {prepare} of preparation; without preparation {whole} in slots")


def format_remaining(rollout: wire.Rollout) -> str:
    """Return when a rollout ends, and what people have left: `ends in 4m to 6m, 2 votes left`."""
    work, votes = rollout["work"], rollout["votes_missing"]
    parts = [f"ends in {format_range(work['low_s'], work['high_s'])}{_forecast_age(rollout)}"] if work else []
    parts += [f"{pluralize(votes, 'vote')} left"] if votes else []
    return ", ".join(parts)


def _forecast_age(rollout: wire.Rollout) -> str:
    """Return how old the forecast is, if `rolloutctl forecast`, which makes a new one, may well differ."""
    made_at = rollout["forecast"] and rollout["forecast"]["made_at"]
    is_old = made_at and (datetime.now(UTC) - parse_rfc3339(made_at)).total_seconds() > FRESH_FORECAST_S
    return f" (forecast {format_age(made_at)} ago)" if is_old else ""


def print_traffic_probes(shown: wire.Rollout | Preview) -> None:
    """Print what is probed for traffic before a node is isolated, and what is not."""
    for probe in shown["traffic_probes"]:
        print_line(f"traffic probe: {sanitize(probe)}")
    if shown["not_probed"]:
        print_line(f"not probed: {sanitize(', '.join(shown['not_probed']))}")
    if shown["not_isolated"]:
        print_line(f"not isolated: {sanitize(', '.join(shown['not_isolated']))}")


def format_down(pool: wire.Pool | PoolSlots) -> str:
    """Return the nodes that are down, and separately those without a fresh observation."""
    down, unobserved = pool["down"], pool.get("unobserved", 0)
    return str(down) if not unobserved else f"{down - unobserved} + {unobserved} unobserved"


def print_gates(rollout: wire.Rollout) -> None:
    """Print the gates with their votes: who, when, why; of a closed rollout those that had votes."""
    for gate in rollout["gates"]:
        is_over = rollout["state"] in CLOSED_STATES and gate["state"] in ("not-asked", "waiting")
        if is_over and not gate["votes"]:
            continue
        print_line(
            f"  {sanitize(f'{event_text.gate_label(gate)} was not opened' if is_over else format_gate(gate))}"
        )
        if (prepared := gate["prepared"]) is not None:
            total = pluralize(prepared["total"], "node")
            print_line(f"    {prepared['done']} of the {total} after it prepared")
        if gate["waived"]:
            print_line(f"    pilot waived: {sanitize(gate['waived'])}")
        if gate["evidence"] is not None and gate["state"] != "open":
            pilot = review_text.pilot_section(gate["evidence"])
            print_line(f"    votes are for the plan and this evidence: digest {gate['digest']}")
            print_line(f"    pilot {sanitize(pilot.note)}")
            for line in pilot.lines:
                print_line(f"      {sanitize(line.label + line.text)}")
        for vote in gate["votes"]:
            answer = "withdrawn" if vote["withdrawn"] else "yes" if vote["yes"] else "no"
            not_counted = "" if vote["counts"] or vote["withdrawn"] else ", does not count"
            voter = f"{vote['by']}{not_counted}, {format_local(vote['at'])}"
            print_line(f"    {answer} by {voter}: {sanitize(vote['reason'])}")


def format_gate(gate: wire.Gate) -> str:
    """Return a gate's state and its missing votes, in one line."""
    name = event_text.gate_label(gate)
    if gate["state"] == "not-asked":
        return f"{name} is not needed yet{_later_votes(gate)}"
    missing = f": {gate['missing']}" if gate["missing"] and gate["state"] != "open" else ""
    return f"{name} is {gate['state'].replace('-', ' ')}{missing}"


def _later_votes(gate: wire.Gate) -> str:
    """Return the votes that a gate will need; `proceed` needs some only after a failure."""
    needs = gate["needs"]
    wanted = ["the owner"] if needs["owner"]["want"] > needs["owner"]["have"] else []
    wanted += [need["team"] for need in needs["teams"] if need["want"] > need["have"]]
    if not wanted:
        return ""
    when = "after a failure" if gate["gate"] == "proceed" else "later"
    return f"; {when} it needs votes of {', '.join(wanted)}"


def format_fraction(counts: wire.Rollout | wire.Pool | wire.RolloutLine) -> str:
    """Return the changed nodes of those that are to change, as in 7/11: skipped nodes are not."""
    return f"{counts['done']}/{counts['total'] - counts['skipped']}"


def _format_counts(rollout: wire.Rollout) -> str:
    to_change = rollout["total"] - rollout["skipped"]
    parts = [f"{rollout['done']} of {pluralize(to_change, 'node')} changed"]
    for name, number in (
        ("in flight", len(rollout["in_flight"])),
        ("pending", rollout["pending"]),
        ("failed", rollout["failed"]),
        ("skipped", rollout["skipped"] - rollout["rolled_back"]),
        ("rolled back", rollout["rolled_back"]),
        ("drifted", rollout.get("drifted", 0)),
    ):
        if number:
            parts.append(f"{number} {name}")
    return ", ".join(parts)


def _format_state(rollout: wire.RolloutLine) -> str:
    exceptions = format_exceptions(rollout["skipped"], rollout["rolled_back"])
    return f"done, {exceptions}" if rollout["state"] == "done" and exceptions else rollout["state"]


def _format_step(node: Node) -> str:
    step = node["step"] or ""
    return f"{step} {format_percent(node['percent'])}" if step and node["percent"] is not None else step


def _reason_text(item: wire.Rollout | Node) -> str:
    return item["reason"]["text"] if item["reason"] else ""


def _minutes(key: Literal["slot", "prepare"]) -> Callable[[Node], str]:
    return lambda node: format_duration(60.0 * node["minutes"][key])


STATUS_COLUMNS: Columns = {
    "ROLLOUT": "rollout",
    "PLAN": "plan",
    "STATE": "state",
    "WAVE": "wave",
    "DONE": format_fraction,
    "FAILED": "failed",
    "PROGRESS": percent_of("percent"),
    "REASON": _reason_text,
}
STATUS_WIDE: Columns = {
    "OWNER": "owner",
    "BY": "submitted_by",
    "SUBMITTED": lambda each: format_local(each["submitted_at"]),
    "ENDS IN": lambda each: format_range(**each["work"]) if each["work"] else "",
    "VOTES MISSING": "votes_missing",
    "TRAIN": lambda each: each["train"] and each["train"]["name"],
    "DIGEST": short_of("digest"),
}
ROLLOUT_COLUMNS: Columns = {
    "ROLLOUT": "rollout",
    "PLAN": "plan",
    "STATE": _format_state,
    "PROGRESS": lambda each: f"{format_fraction(each)} {format_percent(each['percent'])}",
    "BY": "submitted_by",
    "SUBMITTED": lambda each: format_local(each["submitted_at"]),
    "ENDED": lambda each: format_local(each["ended_at"]) if each["ended_at"] else "",
}
RUNNER: Columns = {"RUNNER": _runner}
NODE_COLUMNS: Columns = {
    "NODE": "node",
    "TEAM": "team",
    "WAVE": "wave",
    "PHASE": "phase",
    "OUTCOME": "outcome",
    "SINCE": age_of("since"),
    "STEP": _format_step,
    "REASON": _reason_text,
}
NODE_WIDE: Columns = {
    "ATTEMPT": "attempt",
    "ISOLATED": lambda node: "yes" if node["isolated"] else "no",
    "IN SLOT": _minutes("slot"),
    "PREPARATION": _minutes("prepare"),
    **RUNNER,
    "POOLS": "pools",
}
POOL_COLUMNS: Columns = {
    "POOL": "pool",
    "DONE": format_fraction,
    "FAILED": "failed",
    "IN FLIGHT": "in_flight",
    "DOWN": format_down,
    "BUDGET": "max_unavailable",
}
IN_FLIGHT_COLUMNS: Columns = {
    "IN FLIGHT": "node",
    "PHASE": "phase",
    "STEP": "step",
    "TASK": "task",
    "PROGRESS": percent_of("percent"),
    "FOR": age_of("since"),
    "POOLS": "pools",
}
