"""Commands for people who vote: the gates with their votes, and what a vote is for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, add_rollout_argument, add_watch_option
from rolloutd.cli.output import colorize, print_line, sanitize
from rolloutd.cli.queries import print_gates, print_traffic_probes
from rolloutd.control import answer_text
from rolloutd.control.client import api_path
from rolloutd.text import pluralize

if TYPE_CHECKING:
    from rolloutd.control.wire import Rollout
    from rolloutd.control.wire_plans import Review


def register(commands: CommandGroup) -> None:
    parser = commands.add_command(
        "gates", gates, "list gates, their votes and the missing votes; for one rollout, also its review"
    )
    add_rollout_argument(parser, optional=True)
    add_watch_option(parser)
    parser = commands.add_command(
        "review", review, "show what a vote approves: change, targets, checks, digest, plan"
    )
    add_rollout_argument(parser)


def gates(call: Invocation) -> int:
    """List the gates of one rollout, or of all live ones."""
    name = call.args.rollout
    found = (
        call.get(api_path("status"))["rollouts"] if name is None else [call.get(api_path("rollouts", name))]
    )
    if call.args.json:
        call.print_data([{"rollout": each["rollout"], **gate} for each in found for gate in each["gates"]])
        return exits.OK
    for each in found:
        print_line(colorize(each["rollout"], "bold"))
        print_gates(each)
    if name is not None:
        _print_review(found[0], call.get(api_path("rollouts", found[0]["rollout"], "review")))
    return exits.OK


def review(call: Invocation) -> int:
    """Print what a voter reads before approving."""
    rollout: Rollout = call.get(api_path("rollouts", call.args.rollout))
    found: Review = call.get(api_path("rollouts", rollout["rollout"], "review"))
    if call.args.json:
        call.print_data(found)
    else:
        _print_review(rollout, found)
    return exits.OK


def _print_review(rollout: Rollout, review: Review) -> None:
    """Print the change, the targets, the checks, what is not probed, the digest, then the plan."""
    if review["previous"] is not None:
        _print_section(f"CHANGE since {review['previous']}")
        _print_lines(answer_text.difference_lines(review), "none: the same plan and the same source")
    for playbook in review["playbooks"]:
        _print_section(f"PLAYBOOK {playbook['path']}")
        _print_lines((playbook["text"] or playbook["note"] or "").splitlines())
    if review["overrides"]:
        _print_section("FAILED BEFORE with the same content")
        _print_lines(f"{e['node']} in {e['rollout']}, {e['step']}: {e['text']}" for e in review["overrides"])
    _print_section("TARGETS")
    for gate in rollout["gates"]:
        found = answer_text.find_gate(review, gate)
        if found is not None and gate["state"] in ("waiting", "rejected"):
            print_line(f"  {gate['gate']} starts {answer_text.describe_blast_radius(found['blast_radius'])}")
            print_line(f"  {answer_text.describe_approval(found['your_approval'], rollout['owner'])}")
    for pool in rollout["pools"]:
        nodes = pluralize(pool["total"], "node")
        print_line(sanitize(f"  {pool['pool']}: {nodes}, {pool['max_unavailable']} at a time"))
    _print_section("CHECKS")
    _print_lines(review["checks"])
    _print_section("NOT PROBED")
    print_traffic_probes(rollout)
    _print_section("DIGEST")
    print_line(f"  {rollout['digest']}")
    _print_section("PLAN without defaults")
    _print_lines(f"{each['path']}: {each['value']}" for each in review["plan"])


def _print_section(title: str) -> None:
    print_line()
    print_line(colorize(sanitize(title), "bold"))


def _print_lines(lines: Iterable[str], otherwise: str = "nothing") -> None:
    printed = 0
    for printed, line in enumerate(lines, 1):  # noqa: B007  # counted, without keeping them
        print_line(f"  {sanitize(line)}")
    if not printed:
        print_line(f"  {otherwise}")
