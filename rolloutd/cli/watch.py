"""Commands that follow: watch a rollout, show a node's log; and the option `--watch` of reading commands.

On a terminal `watch` draws a bar per pool (progress_bars.py, imported only then);
elsewhere it prints a line per event.  Both end when the rollout ends.  `--watch` runs
its command again after an event, and at intervals, because time changes reasons too.
"""

from __future__ import annotations

import argparse
import io
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from machines.model.timefmt import format_duration
from rolloutd.cli import exits
from rolloutd.cli.command_group import (
    CommandGroup,
    Handler,
    Invocation,
    duration_argument,
    int_argument,
    is_terminal,
    past_time_argument,
)
from rolloutd.cli.follow import (
    EventPrinter,
    Line,
    WatchUpdate,
    event_queue,
    follow_log,
    next_batch,
    show_updates,
    watch_updates,
)
from rolloutd.cli.output import format_local, parse_rfc3339, print_message, print_now, sanitize
from rolloutd.cli.status import CLOSED_STATES, GATES, PHASES
from rolloutd.cli.why import format_reason
from rolloutd.control.client import DaemonUnreachable, api_path

if TYPE_CHECKING:
    from rolloutd.control.rollouts.wire import Rollout


STATES: Final = ("awaiting-approval", "running", "soaking", "paused", "done", "cancelled")

ROLLED_BACK: Final = "rolled-back"
OUTCOMES: Final = ("already-current", "changed", ROLLED_BACK, "skipped")


def register(commands: CommandGroup) -> None:
    summary = "watch a rollout until it ends: exit 0 done, 1 cancelled"
    commands.add_command("watch", watch_rollouts, summary, formats=("json",)).rollout(optional=True)
    summary = "wait for a state of a rollout, a gate or a node (exit 0); 1 if it is too late"
    parser = commands.add_command("wait", wait, summary, formats=("json",)).rollout()
    condition = (
        f"a state ({', '.join(STATES)}); gate=GATE: it asks for votes or is open; gate=GATE:open;"
        " node/NODE=PHASE; node/NODE=OUTCOME, such as rolled-back"
    )
    parser.argument(
        "--for", metavar="CONDITION", text=condition, type=_condition, required=True, dest="wanted"
    )
    limit = "how long, such as 30s or 2h (for ever)"
    parser.argument("--timeout", metavar="DURATION", text=limit, type=duration_argument)
    parser = commands.add_command("logs", show_logs, "show a node's log", formats=("json",))
    parser.rollout().node(optional=True)
    parser.flag("-f", "--follow", text="follow the log until the run has ended")
    parser.flag("--failed", text="logs of the failed nodes, in place of NODE")
    parser.argument("-n", "--tail", metavar="N", text="only the last N lines (-1: all)", type=_line_count)
    since = "only lines after this: RFC 3339, or a duration before now, such as 10m (all)"
    parser.argument("--since", metavar="TIME", text=since, type=past_time_argument)
    attempt = "number of the attempt (the latest)"
    parser.argument("--attempt", metavar="K", text=attempt, type=int_argument(1))
    stage = "log of this prepare stage; NODE is localhost for a build here"
    parser.argument("--stage", metavar="STAGE", text=stage)


def watch_rollouts(call: Invocation) -> int:
    name = call.args.rollout
    found = (
        call.get(api_path("status"))["rollouts"] if name is None else [call.get(api_path("rollouts", name))]
    )
    return watch_until_closed(call, [rollout["rollout"] for rollout in found])


def watch_until_closed(call: Invocation, rollout_ids: Sequence[str]) -> int:
    """Show rollouts until all have ended; return 0 if all are done."""
    if not rollout_ids:
        print_message("no rollout is live")
        return exits.OK
    updates = watch_updates(call.client, rollout_ids)
    if call.args.json:
        last = show_updates(updates, _changed_rollouts_printer(call))
    elif is_terminal():
        from rolloutd.cli.progress_bars import draw_updates

        last = draw_updates(updates)
    else:
        last = show_updates(updates, EventPrinter().print_update)
    return exits.OK if all(rollout["state"] == "done" for rollout in last) else exits.REFUSED


@dataclass(frozen=True, slots=True)
class Condition:
    """What `wait` waits for; `subject` is a gate or a node, "" for the rollout itself."""

    kind: str
    subject: str
    value: str
    text: str

    def is_met(self, call: Invocation, rollout: Rollout) -> bool:
        match self.kind:
            case "gate":
                gates = [gate for gate in rollout["gates"] if gate["gate"] == self.subject]
                if not gates:
                    raise exits.Exit(
                        exits.USAGE, f"--for {self.text}: the rollout has no such gate; see rolloutctl gates"
                    )
                reached = ("open",) if self.value == "open" else ("open", "waiting", "rejected", "in-doubt")
                return any(gate["state"] in reached for gate in gates)
            case "node":
                path = api_path("rollouts", rollout["rollout"], "nodes", self.subject)
                node = call.get(path)
                return self.value in (node["phase"], node["outcome"])
            case _:
                return rollout["state"] == self.value


def _condition(text: str) -> Condition:
    subject, _, value = text.partition("=")
    if text in STATES:
        return Condition("state", "", text, text)
    gate, _, how = value.partition(":")
    if subject == "gate" and gate in GATES and how in ("", "open"):
        return Condition("gate", gate, how, text)
    if subject.startswith("node/") and subject != "node/" and value in (*PHASES, *OUTCOMES):
        return Condition("node", subject.removeprefix("node/"), value, text)
    states, gates = ", ".join(STATES), ", ".join(GATES)
    problem = f"'{text}' is not a condition; use {states}, gate= with {gates}, node/NODE=PHASE or =OUTCOME"
    raise argparse.ArgumentTypeError(problem)


def wait(call: Invocation) -> int:
    """Wait until the condition is met; a closed rollout ends the wait, because only a rollback changes it."""
    args, wanted = call.args, call.args.wanted
    limit_s = float("inf") if args.timeout is None else args.timeout
    deadline = time.monotonic() + limit_s
    rollout: Rollout = call.get(api_path("rollouts", args.rollout))
    last_state = ""
    with event_queue(call.client, rollout["rollout"]) as lines:
        while True:
            is_met = wanted.is_met(call, rollout)
            if rollout["state"] != last_state:
                last_state = rollout["state"]
                reason = f": {format_reason(rollout['reason'])}" if rollout["reason"] else ""
                print_message(f"{rollout['rollout']} is {last_state}{reason}")
            is_over = last_state in CLOSED_STATES and wanted.value != ROLLED_BACK
            remaining_s = deadline - time.monotonic()
            if is_met or is_over or remaining_s <= 0:
                break
            with suppress(queue.Empty):
                next_batch(lines, min(REPEAT_INTERVAL_S, remaining_s))
            # While the daemon is away, the event thread reconnects or gives up.
            with suppress(DaemonUnreachable):
                rollout = call.get(api_path("rollouts", rollout["rollout"]))
    call.print_data({"rollout": rollout["rollout"], "for": wanted.text, "met": is_met}, ())
    if not is_met:
        problem = f"it is {last_state}" if is_over else f"not within {format_duration(limit_s)}"
        action = f"see rolloutctl why {rollout['rollout']}"
        print_message(f"{rollout['rollout']} --for {wanted.text}: {problem}; {action}")
    return exits.OK if is_met else exits.REFUSED


def show_logs(call: Invocation) -> int:
    """Show a node's log, or those of the failed nodes; with --follow until its run has ended."""
    args = call.args
    if (args.node is None) != args.failed:
        problem = (
            "--failed names the nodes; leave out NODE"
            if args.failed
            else "no NODE; name one, or use --failed"
        )
        raise exits.Exit(exits.USAGE, f"rolloutctl logs: {problem}")
    if not args.failed:
        _show_log(call, args.node)
        return exits.OK
    if args.follow:
        raise exits.Exit(exits.USAGE, "rolloutctl logs: a failed node's run has ended; leave out --follow")
    failed = call.get(api_path("rollouts", args.rollout, "nodes"), phase="failed")["nodes"]
    for number, node in enumerate(failed):
        if not args.json:
            print_message(f"{'' if number == 0 else chr(10)}==> {node['node']} <==")
        _show_log(call, node["node"])
    if not failed:
        print_message(f"{args.rollout}: no node has failed")
    return exits.OK


def _show_log(call: Invocation, node: str) -> None:
    args, printed = call.args, 0
    for line in _wanted_lines(call, node):
        printed += 1
        if args.json:
            call.print_data({"node": node, **line} if args.failed else line, (), is_streamed=True)
        else:
            at = f"{format_local(line['at'])}  " if line.get("at") else ""
            for text in str(line.get("text", "")).splitlines() or [""]:
                print_now(sanitize(f"{at}{text}"))
    if printed or args.tail == 0:
        return
    if args.stage is not None:
        print_message(f"{node} has no log of stage {args.stage}; see rolloutctl prepare {args.rollout}")
    elif args.since is not None:
        print_message(f"{node} has no lines since then")
    elif not args.follow and not _report_if_pending(call, node):
        print_message(f"{node} has no log")


def _line_count(text: str) -> int | None:
    """Return how many lines --tail keeps; None for all, which kubectl writes as -1."""
    return None if text == "-1" else int_argument(0)(text)


def _wanted_lines(call: Invocation, node: str) -> Iterator[Line]:
    """Yield a log's lines as --since, --tail and --follow ask for them."""
    args, offset = call.args, 0
    if args.follow and args.attempt is None and args.stage is None:
        _report_if_pending(call, node)
    if not args.follow or args.tail is not None:
        path = api_path("rollouts", args.rollout, "nodes", node, "log")
        written = call.client.stream(path, {"attempt": args.attempt, "stage": args.stage})
        kept: deque[Line] = deque(maxlen=args.tail)  # only the last lines, however long the log is
        for line in written:
            offset = line.get("offset", offset)
            if args.tail is None and _is_since(line, args.since):
                yield line
            elif args.tail is not None:
                kept.append(line)
        yield from (line for line in kept if _is_since(line, args.since))
        if not args.follow:
            return
    for line in follow_log(call.client, args.rollout, node, args.attempt, args.stage, offset):
        if _is_since(line, args.since):
            yield line


def _is_since(line: Line, since: str | None) -> bool:
    return since is None or not line.get("at") or parse_rfc3339(line["at"]) >= parse_rfc3339(since)


def _report_if_pending(call: Invocation, node: str) -> bool:
    """Report on stderr if the node has not begun, and why; return whether that is so."""
    answer = call.get(api_path("rollouts", call.args.rollout, "nodes", node, "why"))
    if answer["phase"] != "pending":
        return False
    reason_text = f": {format_reason(answer['reason'])}" if answer["reason"] else ""
    print_message(f"{answer['node']} is pending{reason_text}")
    return True


def _changed_rollouts_printer(call: Invocation) -> Callable[[WatchUpdate], None]:
    last: list[Rollout] = []

    def show(update: WatchUpdate) -> None:
        for rollout in update.rollouts:
            if rollout not in last:
                call.print_data(rollout, (), is_streamed=True)
        last[:] = update.rollouts

    return show


REPEAT_INTERVAL_S = 10.0
"""Between two questions without an event."""

CLEAR = "\x1b[H\x1b[2J"


class _Screen(io.StringIO):
    """A buffer that looks like the real stdout, so that colours and widths stay."""

    def __init__(self) -> None:
        super().__init__()
        self.is_terminal = is_terminal()

    def isatty(self) -> bool:
        return self.is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.__stdout__.encoding if sys.__stdout__ is not None else "utf-8"


def repeat_on_change(handler: Handler, call: Invocation) -> NoReturn:
    """Run the command until interrupted; raises what its first run raises."""
    # Documents of YAML need a mark between them; those of JSON end with their line.
    separator = "---\n" if call.args.json == "yaml" else ""
    shown = _capture(handler, call)
    _show(separator, shown)
    with event_queue(call.client, None) as lines:
        while True:
            with suppress(queue.Empty):
                next_batch(lines, REPEAT_INTERVAL_S)
            # While the daemon is away, the last answer stays; the event thread reconnects or gives up.
            with suppress(DaemonUnreachable):
                latest = _capture(handler, call)
                if latest != shown:
                    shown = latest
                    _show(separator, shown)


def _capture(handler: Handler, call: Invocation) -> tuple[str, str]:
    """Run the command and return its data and its messages."""
    screen, messages = _Screen(), io.StringIO()
    with redirect_stdout(screen), redirect_stderr(messages):
        handler(call)
    return screen.getvalue(), messages.getvalue()


def _show(separator: str, shown: tuple[str, str]) -> None:
    text, messages = shown
    if is_terminal():
        print_now(f"{CLEAR}{text}")
    elif text:
        print_now(separator + text.rstrip("\n"))
    print_message(messages)
