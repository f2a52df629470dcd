"""The teams, their members, and the limits: who may do what here, and how much at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tui import lines, wording
from tui.lines import Line, fit
from tui.page import Item, Page, fixed, heading
from tui.values import instant


class TeamsPage(Page):
    """Ourselves, the teams, the daemon and its limits."""

    place = "teams"

    def items(self) -> Iterator[Item]:
        """Yield everything anew."""
        model = self.console.model
        me, settings, health = model.me, model.settings, model.health
        if me is None or settings is None or health is None:
            yield ("", fixed([("  asking the daemon", "dim")]))
            return
        yield ("", heading("YOU", "as the socket says"))
        yield _line("you", me["user"], f"uid {me['uid']}{', admin' if me['admin'] else ''}")
        yield _line(
            "my-teams",
            "teams",
            ", ".join(me["teams"]) or "none: you may look at everything and change nothing",
        )
        yield ("", heading("TEAMS", str(len(settings["teams"]))))
        for team in settings["teams"]:
            yield (
                f"team:{team['team']}",
                _team(
                    team["team"],
                    team["members"],
                    team["checks"],
                    team["windows"],
                    is_mine=team["team"] in me["teams"],
                ),
            )
        yield _line("admins", "admins", ", ".join(settings["admins"]))
        yield ("", heading("LIMITS"))
        yield _line(
            "most", "at once", f"{wording.count(settings['max_parallel'], 'node')}, all rollouts together"
        )
        for key in settings["pools"]:
            yield _line(
                f"key:{key['key']}",
                f"pools by {key['key']}",
                f"{key['max_unavailable']} down at a time, unless a pool has its own",
            )
        yield ("", heading("DAEMON"))
        began = wording.ago(instant(health["since"]), self.console.now())
        yield _line(
            "version",
            "rolloutd",
            f"{health['version']}, process {health['pid']}, epoch {health['epoch']}, began {began}",
        )
        mode = "decides and explains, does nothing" if health["observe_only"] else "acts"
        yield _line("mode", "mode", mode)
        yield _line("socket", "socket", self.console.client.path)
        yield _line("trouble", "trouble", model.trouble or "none")


def _line(key: str, name: str, text: str) -> Item:
    return (key, fixed([("  ", ""), (fit(name, 20), "bold"), (lines.clean(text), "")]))


def _team(
    name: str, members: list[str], checks: int, windows: int, *, is_mine: bool
) -> Callable[[int], Line]:
    own = [wording.count(number, what) for number, what in ((checks, "check"), (windows, "window")) if number]
    mark: Line = [("● ", "ok")] if is_mine else [("  ", "")]
    return fixed(
        [
            *mark,
            (fit(name, 20), "bold"),
            (fit(", ".join(members) or "nobody: nobody can vote for it", 32), ""),
            (f"  {', '.join(own)}", "dim"),
        ]
    )
