"""Commands that follow: watch a rollout, show a node's log; and the option `--watch` of reading commands.

On a terminal `watch` draws a bar per pool (progress_bars.py, imported only then);
elsewhere it prints a line per event.  Both end when the rollout ends.  `--watch` runs
its command again after an event, and at intervals, because time changes reasons too.
"""

from __future__ import annotations

import io
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, NoReturn

from rolloutd.cli import exits
from rolloutd.cli.command_group import (
    CommandGroup,
    Handler,
    Invocation,
    int_argument,
    is_terminal,
)
from rolloutd.cli.follow import (
    EventPrinter,
    Line,
    WatchUpdate,
    follow_log,
    next_batch,
    queue_events,
    show_updates,
    watch_updates,
)
from rolloutd.cli.output import (
    format_local,
    print_json_line,
    print_message,
    print_now,
    sanitize,
)
from rolloutd.cli.queries import format_reason
from rolloutd.control.client import DaemonUnreachable, api_path

if TYPE_CHECKING:
    from rolloutd.control.wire import Rollout


def register(commands: CommandGroup) -> None:
    summary = "watch a rollout until it ends: exit 0 done, 1 cancelled"
    commands.add_command("watch", watch_rollouts, summary, formats=("json",)).rollout(optional=True)
    parser = commands.add_command("logs", show_logs, "show a node's log", formats=("json",)).rollout().node()
    parser.flag("-f", "--follow", text="follow the log until the run has ended")
    attempt = "number of the attempt (the latest)"
    parser.argument("--attempt", metavar="K", text=attempt, type=int_argument(1))
    stage = "log of this prepare stage; NODE is localhost for a build here"
    parser.argument("--stage", metavar="STAGE", text=stage)


def watch_rollouts(call: Invocation) -> int:
    """Watch one rollout, or all live ones."""
    rollout_ids = _rollout_ids(call)
    if not rollout_ids:
        print_message("no rollout is live")
        return exits.OK
    updates = watch_updates(call.client, rollout_ids)
    if call.args.json:
        last = show_updates(updates, _changed_rollouts_printer())
    elif is_terminal():
        from rolloutd.cli.progress_bars import draw_updates

        last = draw_updates(updates)
    else:
        last = show_updates(updates, EventPrinter().print_update)
    return exits.OK if all(rollout["state"] == "done" for rollout in last) else exits.REFUSED


def show_logs(call: Invocation) -> None:
    """Show a node's log; with --follow until its run has ended."""
    args = call.args
    if args.follow:
        if args.attempt is None and args.stage is None:
            _report_if_pending(call)
        lines: Iterator[Line] = follow_log(call.client, args.rollout, args.node, args.attempt, args.stage)
    else:
        path = api_path("rollouts", args.rollout, "nodes", args.node, "log")
        lines = call.client.stream(path, {"attempt": args.attempt, "stage": args.stage})
    printed = 0
    for printed, line in enumerate(lines, 1):  # noqa: B007  # counted, without keeping them
        if args.json:
            print_json_line(line)
        else:
            at = f"{format_local(line['at'])}  " if line.get("at") else ""
            for text in str(line.get("text", "")).splitlines() or [""]:
                print_now(sanitize(f"{at}{text}"))
    if args.stage is not None:
        if not printed:
            print_message(
                f"{args.node} has no log of stage {args.stage}; see rolloutctl prepare {args.rollout}"
            )
    elif not printed and not args.follow and not _report_if_pending(call):
        print_message(f"{args.node} has no log")


def _report_if_pending(call: Invocation) -> bool:
    """Report on stderr if the node has not begun, and why; return whether that is so."""
    answer = call.get(api_path("rollouts", call.args.rollout, "nodes", call.args.node, "why"))
    if answer["phase"] != "pending":
        return False
    reason_text = f": {format_reason(answer['reason'])}" if answer["reason"] else ""
    print_message(f"{answer['node']} is pending{reason_text}")
    return True


def _changed_rollouts_printer() -> Callable[[WatchUpdate], None]:
    """Return a function that prints the rollouts that are not as in the update before."""
    last: list[Rollout] = []

    def show(update: WatchUpdate) -> None:
        for rollout in update.rollouts:
            if rollout not in last:
                print_json_line(rollout)
        last[:] = update.rollouts

    return show


def _rollout_ids(call: Invocation) -> list[str]:
    if call.args.rollout is not None:
        return [call.get(api_path("rollouts", call.args.rollout))["rollout"]]
    return [rollout["rollout"] for rollout in call.get(api_path("status"))["rollouts"]]


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
    lines: queue.Queue[Line | Exception] = queue.Queue()
    # Documents of YAML need a mark between them; those of JSON end with their line.
    separator = "---\n" if call.args.json == "yaml" else ""
    shown = _capture(handler, call)
    _show(separator, shown)
    threading.Thread(
        target=queue_events, args=(call.client, None, lines, threading.Event()), name="events", daemon=True
    ).start()
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
