"""The forecast of a rollout: when it ends, when its gates ask, and when each node is touched."""

from __future__ import annotations

from collections.abc import Iterator

from rolloutd.control import response_text
from rolloutd.control.forecasts import wire_forecasts
from rolloutd.control.rollouts import wire
from rolloutd.texts import event_text
from tui.formatting import formatting, lines
from tui.formatting.lines import Line, column, fit
from tui.screens.fetched import RolloutResourcePage
from tui.screens.page import Item, heading, note_row, static_line
from tui.state.values import parse_timestamp

NAME_WIDTH = 28


class ForecastPage(RolloutResourcePage):
    """The latest forecast that the daemon has made."""

    screen_name = resource = "forecast"
    refresh_interval_s = 10.0
    """The daemon makes one a minute at most."""

    def found_items(self, found: wire_forecasts.Forecast) -> Iterator[Item]:
        made_at = parse_timestamp(found["made_at"]) or 0.0
        age = formatting.format_age(made_at, self.console.now())
        yield heading("ENDS", f"made {age}, {found['draws']} draws; p90: nine of ten draws are not later")
        yield self._span_row("end", self.rollout_id, found["ends_at"], None)
        bottleneck = found["bottleneck"]
        if bottleneck is not None:
            yield _text_row("bottleneck", "bottleneck", response_text.describe_bottleneck(bottleneck))
        for assumption in found["assumptions"]:
            yield _text_row(f"assumed {assumption['code']}", "assumed", assumption["text"])
        yield heading("GATES", "when they ask for votes" if found["gates"] else "none is ahead")
        for gate in found["gates"]:
            name = event_text.gate_label(gate)
            yield self._span_row(f"gate {name}", name, None, gate["asked_at"])
        for title, groups in (("WAVES", found["waves"]), ("TEAMS", found["teams"])):
            yield heading(title, "the first node starts, the last one is back")
            for group in groups:
                yield self._span_row(
                    f"{title} {group['name']}", group["name"], group["ends_at"], group["starts_at"]
                )
        yield heading("NODES", str(len(found["nodes"])) if found["nodes"] else "none is ahead")
        for node in found["nodes"]:
            yield self._span_row(
                node["node"], node["node"], node["ends_at"], node["starts_at"], node["waits"]
            )
        if not found["nodes"]:
            yield note_row("every node is done")

    def do_open(self) -> None:
        names = {node["node"] for node in self._found["nodes"]} if self._found is not None else set()
        if self.body.cursor_key in names:
            self.console.open_page("node", self.rollout_id, self.body.cursor_key)

    def _span_row(
        self,
        key: str,
        name: str,
        ends: wire.Instants | None,
        starts: wire.Instants | None,
        waits: dict[str, float] | None = None,
    ) -> Item:
        line: Line = []
        if starts is not None:
            line.append((self._time(starts["p50"]), ""))
        if ends is not None:
            line += [(f" → {self._time(ends['p50'])}", ""), (f"  p90 {self._time(ends['p90'])}", "dim")]
        first = starts or ends
        if first is None or first["p50"] is None:
            # A node in quarantine, or one that a gate without voters holds.
            line = [("never, as things are", "warn")]
        code, seconds = next(iter((waits or {}).items()), ("", 0.0))
        if code:
            line.append((f"  {code} {formatting.format_duration(seconds)}", "dim"))
        return key, lambda width: [("  ", ""), (column(name, NAME_WIDTH, width), "bold"), *line]

    def _time(self, instant: str | None) -> str:
        at = parse_timestamp(instant) if instant is not None else None
        if at is None:
            return "never"
        today = formatting.format_datetime(self.console.now())[:10]
        return formatting.format_datetime(at).removeprefix(f"{today} ")


def _text_row(key: str, title: str, text: str) -> Item:
    return key, static_line([("  ", ""), (fit(title, 12), "dim"), (lines.sanitize(text), "")])
