"""The user, the teams with their members, the limits, and the daemon."""

from __future__ import annotations

from collections.abc import Iterator

from rolloutd.control.daemons import wire_daemons
from rolloutd.texts import formats
from tui.formatting import formatting, lines
from tui.formatting.lines import column
from tui.screens.page import Item, Page, heading, note_row
from tui.state.values import parse_timestamp


class TeamsPage(Page):
    screen_name = "teams"

    def build_items(self) -> Iterator[Item]:
        model = self.console.model
        me, settings, health = model.current_user, model.settings, model.health
        if me is None or settings is None or health is None:
            yield note_row("loading")
            return
        yield heading("YOU", "as the socket reports")
        yield _field_row("you", me["user"], f"uid {me['uid']}{', admin' if me['admin'] else ''}")
        my_teams = ", ".join(me["teams"]) or "none: you may read everything and change nothing"
        yield _field_row("my-teams", "teams", my_teams)
        yield heading("TEAMS", str(len(settings["teams"])))
        for team in settings["teams"]:
            yield _team_row(team, is_mine=team["team"] in me["teams"])
        yield _field_row("admins", "admins", ", ".join(settings["admins"]))
        yield heading("LIMITS")
        max_parallel = formats.pluralize(settings["max_parallel"], "node")
        yield _field_row("max-parallel", "in parallel", f"{max_parallel}, all rollouts together")
        for key in settings["pools"]:
            budget = f"{key['max_unavailable']} down at a time, unless a pool has its own budget"
            yield _field_row(f"key:{key['key']}", f"pools by {key['key']}", budget)
        yield heading("DAEMON")
        started = formatting.format_age(parse_timestamp(health["since"]), self.console.now())
        version = f"{health['version']}, process {health['pid']}, epoch {health['epoch']}, started {started}"
        yield _field_row("version", "rolloutd", version)
        mode = "observe only: decides and explains, changes nothing" if health["observe_only"] else "active"
        yield _field_row("mode", "mode", mode)
        yield _field_row("socket", "socket", self.console.client.path)
        yield _field_row("error", "error", model.daemon_error or "none")
        runners = health["runs"]["runners"]
        for each in runners if len(runners) > 1 else ():
            yield _field_row(f"runner:{each['name']}", f"runner {each['name']}", each["text"])


def _field_row(key: str, name: str, text: str) -> Item:
    return key, lambda width: [("  ", ""), (column(name, 20, width), "bold"), (lines.sanitize(text), "")]


def _team_row(team: wire_daemons.TeamSummary, *, is_mine: bool) -> Item:
    counts = (("check", team["checks"]), ("window", team["windows"]))
    own = ", ".join(formats.pluralize(number, noun) for noun, number in counts if number)
    members = ", ".join(team["members"]) or "no members: cannot vote"
    return f"team:{team['team']}", lambda width: [
        ("● " if is_mine else "  ", "ok"),
        (column(team["team"], 20, width), "bold"),
        (column(members, 34, width) if own else members, ""),
        (own, "dim"),
    ]
