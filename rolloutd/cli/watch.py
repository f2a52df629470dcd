"""Commands that stay and look: watch a rollout move, follow a node's log.

On a terminal there is a bar per pool; elsewhere one line per thing that
happens (lines.py).  Both end when the rollout ends.  The pictures come from bars.py,
which is imported on a terminal only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rolloutd.cli import exits, moments
from rolloutd.cli.command import Call, Family, add_node, add_rollout, number, on_terminal
from rolloutd.cli.following import Line, follow_log
from rolloutd.cli.lines import tell
from rolloutd.cli.output import printable, put_json_line, say
from rolloutd.cli.reading import reason_sentence
from rolloutd.cli.views import View, views
from rolloutd.control.client import path_of

if TYPE_CHECKING:
    from rolloutd.control.wire import Rollout


def register(family: Family) -> None:
    """Add the commands of this family."""
    parser = family.command("watch", watch, "watch a rollout until it ends: exit 0 done, 1 cancelled")
    add_rollout(parser, optional=True)
    parser = family.command("logs", logs, "show what a node's run has said")
    add_rollout(parser)
    add_node(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument("--attempt", metavar="K", type=number(1), help="of this attempt, not the latest")


def watch(call: Call) -> int:
    """Watch one rollout, or all that are live."""
    wanted = _rollouts(call)
    if not wanted:
        say("no rollout is live")
        return exits.DONE
    seen = views(call.client, wanted)
    if call.args.json:
        last = _watch_as_json(seen)
    elif on_terminal():
        from rolloutd.cli.bars import show

        last = show(seen)
    else:
        last = tell(seen)
    return exits.DONE if all(rollout["state"] == "done" for rollout in last) else exits.NO


def logs(call: Call) -> int:
    """Show a node's log; with --follow until its run has ended."""
    args = call.args
    if args.follow:
        if args.attempt is None:
            _say_if_not_begun(call)
        lines: Iterator[Line] = follow_log(call.client, args.rollout, args.node, args.attempt)
    else:
        path = path_of("rollouts", args.rollout, "nodes", args.node, "log")
        lines = call.client.stream(path, {"attempt": args.attempt})
    told = 0
    for told, line in enumerate(lines, 1):  # noqa: B007  # counted, without keeping them
        if args.json:
            put_json_line(line)
        else:
            at = f"{moments.local(line['at'])}  " if line.get("at") else ""
            for text in str(line.get("text", "")).splitlines() or [""]:
                print(printable(f"{at}{text}"), flush=True)  # noqa: T201
    if not told and not args.follow and not _say_if_not_begun(call):
        say(f"{args.node} has said nothing")
    return exits.DONE


def _say_if_not_begun(call: Call) -> bool:
    """Tell a person who waits for a node's words that it has not begun, and why."""
    answer = call.get(path_of("rollouts", call.args.rollout, "nodes", call.args.node, "why"))
    if answer["phase"] != "pending":
        return False
    because = f": {reason_sentence(answer['reason'])}" if answer["reason"] else ""
    say(f"{answer['node']} is pending{because}")
    return True


def _watch_as_json(seen: Iterator[View]) -> list[Rollout]:
    last: list[Rollout] = []
    for view in seen:
        for rollout in view.rollouts:
            if rollout not in last:
                put_json_line(rollout)
        last = view.rollouts
        if view.over:
            break
    return last


def _rollouts(call: Call) -> list[str]:
    if call.args.rollout is not None:
        return [call.get(path_of("rollouts", call.args.rollout))["rollout"]]
    return [rollout["rollout"] for rollout in call.get(path_of("status"))["rollouts"]]
