"""The connection, the user, and the alerts on every screen."""

from __future__ import annotations

from collections.abc import Sequence

from tui.connection.event_stream import Disconnected
from tui.formatting import formatting
from tui.formatting.lines import Line, fit, sanitize, wrap_text
from tui.state.model import Model

MAX_FREEZES = 2
"""The locks screen shows all freezes."""

MAX_DISCONNECT_LINES = 2


def status_line(
    model: Model,
    disconnected: Disconnected | None,
    width: int,
    now: float,
    *,
    has_connected: bool,
    reach: str,
) -> Line:
    """Return the right end of the top line."""
    me = model.current_user
    where = f"{reach} " if reach else ""
    who = "" if me is None else f"{me['user']}{' (admin)' if me['admin'] and width >= 110 else ''} "
    if disconnected is not None:
        return [("✗ offline ", "alert"), (" ", ""), (where + who, "dim")]
    if not has_connected:
        return [("○ connecting ", "warn")]
    seq = f"{model.seq:,} " if width >= 100 else ""
    age = "" if model.status_at is None else f"age {formatting.format_duration(now - model.status_at)} "
    return [("● live ", "live"), (seq, "dim"), (f"{age} {where}{who}", "dim")]


def alerts(
    model: Model, disconnected: Disconnected | None, width: int, now: float, *, has_connected: bool
) -> Sequence[Line]:
    locks, health = model.locks, model.health
    texts: list[tuple[str, str]] = []
    if disconnected is not None:
        since = formatting.format_time(disconnected.since)
        stale = f"stale: state of {since}, {formatting.format_age(disconnected.since, now)}; "
        sentence = f"{stale if has_connected else ''}{disconnected.reason}; reconnecting"
        for number, text in enumerate(wrap_text(sentence, width - 4, MAX_DISCONNECT_LINES)):
            texts.append((f" {' ' if number else '✗'} {text}", "alert"))
    texts += [
        (f" ‖ frozen: {freeze['scope']}, by {freeze['by']}: {freeze['reason']}", "mine")
        for freeze in (locks["freezes"][:MAX_FREEZES] if locks is not None else ())
    ]
    if model.daemon_error:
        texts.append((f" ! {model.daemon_error}", "alert"))
    if health is not None and health["observe_only"]:
        texts.append((" ○ observe only: the daemon decides and explains, and changes nothing", "mine"))
    return [[(fit(sanitize(text), width), role)] for text, role in texts]
