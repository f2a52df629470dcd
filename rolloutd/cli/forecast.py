"""`forecast`: when nodes are touched, when gates ask, and what if."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machines.model.timefmt import format_duration
from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, int_argument, time_argument, without_none
from rolloutd.cli.forecast_figures import format_instants, format_train
from rolloutd.cli.output import (
    AGE_UNITS,
    Columns,
    format_local,
    print_line,
    print_list,
    print_message,
    sanitize,
)
from rolloutd.cli.plans import post_plan, request_body
from rolloutd.control import user_time
from rolloutd.control.client import api_path
from rolloutd.control.response_text import describe_bottleneck
from rolloutd.texts import event_text
from rolloutd.texts.formats import pluralize

if TYPE_CHECKING:
    from rolloutd.control.forecasts.wire_forecasts import Forecast, ForecastBody, Score
    from rolloutd.control.rollouts.wire import Seconds

MAX_WAITS_SHOWN = 6
"""Causes of waiting that are shown; --json has all."""

PLAN_SUFFIXES = (".yml", ".yaml")


def register(commands: CommandGroup) -> None:
    summary = "forecast when each node is touched, when gates ask and when a rollout ends; and what if"
    parser = commands.add_command("forecast", forecast, summary)
    subject = "an open rollout, or a plan file, whose name ends in .yml or .yaml (all open rollouts)"
    parser.argument("subject", metavar="ROLLOUT | FILE", text=subject, nargs="?")
    parser.flag("--nodes", text="list every node, also where there are many")
    approve = "when each gate gets its votes after it asks: a duration, or never (0s)"
    parser.argument("--approve-after", "--approve", metavar="DURATION", text=approve, type=_approval)
    rate = "share of attempts that fail, such as 0.05 (the one seen)"
    parser.argument("--failure-rate", metavar="N", text=rate, type=_rate)
    parser.argument("--draws", metavar="N", text="number of draws (200)", type=int_argument(1, 2000))
    parser.argument("--seed", metavar="N", text="seed of the draws (1)", type=int_argument(0, 2**53))
    for option, metavar, text in (
        ("--set", "PATH=VALUE", "what if: pools.rack.max_unavailable=2, or plan.soak=30m"),
        ("--freeze", "SCOPE:WHEN", "what if: a freeze, such as team/payments:fri or all:2026-12-24"),
        ("--without", "NODE", "what if: leave out this node"),
        ("--with-failure", "NODE", "what if: this node's run fails once"),
    ):
        parser.argument(option, metavar=metavar, text=f"{text} (repeatable)", action="append", default=[])
    parser.argument(
        "--at", metavar="TIME", text="what if: it continues only at that time", type=time_argument
    )
    parser.flag("--ics", text="print an iCalendar, and keep the forecast to compare it with what comes")
    parser.argument("--team", metavar="TEAM", text="with --ics: only this team's nodes")
    parser.flag("--score", text="show how good the forecasts were that people have seen")


def forecast(call: Invocation) -> int:
    """Forecast rollouts or a plan, or show how good forecasts were."""
    args = call.args
    if args.team is not None and not args.ics:
        raise exits.Exit(exits.USAGE, "rolloutctl forecast: --team is for --ics; give both")
    asks_what_if = bool(args.set or args.freeze or args.without or args.with_failure or args.at)
    if asks_what_if and args.ics:
        raise exits.Exit(exits.USAGE, "rolloutctl forecast: a calendar has no what-if; leave out one of them")
    if args.score:
        if asks_what_if or args.ics:
            raise exits.Exit(exits.USAGE, "rolloutctl forecast: --score forecasts nothing; give it alone")
        return _show_score(call)
    body = without_none(
        draws=args.draws, seed=args.seed, approve_after_s=args.approve_after, failure_rate=args.failure_rate
    )
    body |= {
        "sets": args.set,
        "freezes": args.freeze,
        "without": args.without,
        "with_failure": args.with_failure,
    }
    body |= without_none(at=args.at)
    if args.subject is None:
        if asks_what_if or args.ics:
            raise exits.Exit(exits.USAGE, "rolloutctl forecast: what-if and --ics need one ROLLOUT; name it")
        return _forecast_all(call, body)
    if Path(args.subject).suffix in PLAN_SUFFIXES:
        answer: Forecast = post_plan(call, "forecast", request_body(call, args.subject) | body)
    else:
        body |= {"publish": "calendar"} if args.ics else {}
        answer = call.client.post(api_path("rollouts", args.subject, "forecast"), body)
    if args.ics:
        from rolloutd.cli.calendar import render

        sys.stdout.write(render(answer, args.team))
        return exits.OK
    if not call.print_data(answer, [node["node"] for node in answer["nodes"]]):
        _print_forecast(call, answer)
    return exits.OK


def _forecast_all(call: Invocation, body: dict[str, Any]) -> int:
    answer = call.client.post(api_path("forecasts"), body)
    found: list[Forecast] = answer["forecasts"]
    if call.print_data(answer, [each["rollout"] for each in found]):
        return exits.OK
    if not found:
        print_message("no rollout is open")
    else:
        print_list(_ROLLOUT_COLUMNS, found)
    return exits.OK


def _print_forecast(call: Invocation, answer: Forecast) -> None:
    for line in _summary_lines(answer):
        print_line(line)
    changed = answer.get("changed")
    if changed is not None:
        print_line()
        print_line("WHAT IF")
        for line in _summary_lines(changed):
            print_line(line)
        print_line(f"difference: {format_difference(answer['difference']['ends_at_s'])}")
    shown = answer if changed is None else changed
    print_line()
    print_list(_GATE_COLUMNS, shown["gates"])
    print_line()
    print_list({"WAVE": "name", **_GROUP_COLUMNS}, shown["waves"])
    print_line()
    print_list({"TEAM": "name", **_GROUP_COLUMNS}, shown["teams"])
    if len(shown["nodes"]) <= MAX_NODES_SHOWN or call.args.nodes or call.args.wide:
        print_line()
        print_list(_NODE_COLUMNS, shown["nodes"])
    else:
        print_message(f"{pluralize(len(shown['nodes']), 'node')}; --nodes lists them")


MAX_NODES_SHOWN = 40
"""Nodes that are listed without --nodes: a screen."""


def _summary_lines(found: ForecastBody) -> Iterator[str]:
    note = "; it stays open after that, because its plan checks for drift" if found["stays_open"] else ""
    yield f"{sanitize(found['rollout'])} ends {format_instants(found['ends_at'])}{note}"
    if found["waits"]:
        total = sum(found["waits"].values())
        causes = list(found["waits"].items())[:MAX_WAITS_SHOWN]
        shares = (f"{code} {100 * seconds / total:.0f} %" for code, seconds in causes)
        yield f"nodes wait for: {', '.join(shares)}"
    if found["bottleneck"] is not None:
        yield sanitize(f"bottleneck: {describe_bottleneck(found['bottleneck'])}")
    if found["train"] is not None:
        yield format_train(found["train"])
    for assumption in found["assumptions"]:
        yield f"assumed: {sanitize(assumption['text'])}"


def format_difference(found: Seconds) -> str:
    """Return `2h earlier (p90 1h later)`."""
    if found["p50"] is None and found["p90"] is None:
        return _later(None)
    return f"{_later(found['p50'])} (p90 {_later(found['p90'])})"


def _later(seconds: float | None) -> str:
    if seconds is None:
        return "not comparable, because one of them never ends"
    if round(seconds) == 0:
        return "no difference"
    return f"{format_duration(abs(seconds), AGE_UNITS)} {'later' if seconds > 0 else 'earlier'}"


def _show_score(call: Invocation) -> int:
    answer: Score = call.get(api_path("forecasts", "score"), rollout=call.args.subject)
    if call.print_data(answer, [each["rollout"] for each in answer["forecasts"]]):
        return exits.OK
    if not answer["forecasts"]:
        print_message("no forecast is kept; they are where a gate waits, and with --ics")
        return exits.OK
    print_list(_SCORE_COLUMNS, answer["forecasts"])
    print_line()
    print_line(f"all: {format_score(answer)}")
    return exits.OK


def format_score(found: Any) -> str:
    """Return `91 % of 40 nodes came by p90, median error 4m`."""
    if not found["nodes"]:
        return "no node has come back since"
    error = format_duration(found["median_error_s"], AGE_UNITS)
    nodes = pluralize(found["nodes"], "node")
    return f"{100 * found['within_p90']:.0f} % of {nodes} came by p90, median error {error}"


def _approval(text: str) -> float | str:
    import argparse

    if text == "never":
        return text
    try:
        return float(user_time.parse_duration(text))
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(f"{wrong}, or never") from None


def _rate(text: str) -> float:
    import argparse

    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0.0 <= rate <= 0.9:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 to 0.9")
    return rate


def _instant(key: str, part: str = "p50") -> Callable[[Any], str]:
    return lambda item: format_local(item[key][part]) if item[key][part] else "never"


def _longest_wait(item: Any) -> str:
    code, seconds = next(iter(item["waits"].items()), ("", 0.0))
    return f"{code} {format_duration(seconds, AGE_UNITS)}" if code else ""


_ROLLOUT_COLUMNS: Columns = {
    "ROLLOUT": "rollout",
    "ENDS": _instant("ends_at"),
    "P90": _instant("ends_at", "p90"),
    "NODES AHEAD": lambda item: len(item["nodes"]),
    "WAITS MOST FOR": _longest_wait,
}
_GATE_COLUMNS: Columns = {
    "GATE": event_text.gate_label,
    "ASKED": _instant("asked_at"),
    "P90": _instant("asked_at", "p90"),
}
_GROUP_COLUMNS: Columns = {
    "NODES": "nodes",
    "FIRST STARTS": _instant("starts_at"),
    "LAST IS BACK": _instant("ends_at"),
    "P90": _instant("ends_at", "p90"),
}
_NODE_COLUMNS: Columns = {
    "NODE": "node",
    "STARTS": _instant("starts_at"),
    "BACK": _instant("ends_at"),
    "BACK P90": _instant("ends_at", "p90"),
    "WAITS MOST FOR": _longest_wait,
}
_SCORE_COLUMNS: Columns = {
    "ROLLOUT": "rollout",
    "MADE": lambda each: format_local(each["made_at"]),
    "FOR": "occasion",
    "SCORE": format_score,
    "MISSED": lambda each: "yes" if each["missed"] else "no",
}
