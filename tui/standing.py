"""What every screen says: the connection, who we are, and what everybody must see."""

from __future__ import annotations

from collections.abc import Sequence

from tui import wording
from tui.lines import Line, clean, fit, wrapped
from tui.link import Lost
from tui.model import Model

MOST_FREEZES = 2
"""Freezes told on every screen; the locks screen has all."""

MOST_LINES = 2
"""Lines in which it is said why the daemon is away."""


def line(model: Model, lost: Lost | None, width: int, *, is_known: bool, reach: str) -> Line:
    """Return the connection and who we are, for the right end of the top line."""
    me = model.me
    where = f"{reach} " if reach else ""
    who = "" if me is None else f"{me['user']}{' (admin)' if me['admin'] and width >= 110 else ''} "
    if lost is not None:
        return [("✗ lost ", "alert"), (" ", ""), (where + who, "dim")]
    if not is_known:
        return [("○ connecting ", "warn")]
    seq = f"{model.seq:,} " if width >= 100 else ""
    return [("● live ", "live"), (seq, "dim"), (where + who, "dim")]


def alerts(model: Model, lost: Lost | None, width: int, now: float, *, is_known: bool) -> Sequence[Line]:
    """Return what everybody must see, on every screen."""
    locks, health = model.locks, model.health
    texts: list[tuple[str, str]] = []
    if lost is not None:
        stale = f"stale: what is shown is of {wording.hour(lost.since)}, {wording.ago(lost.since, now)}. "
        said = wrapped(f"{stale if is_known else ''}{lost.why}; trying again", width - 4, MOST_LINES)
        texts += [(f" {'✗' if number == 0 else ' '} {text}", "alert") for number, text in enumerate(said)]
    texts += [
        (f" ‖ frozen: {freeze['scope']}, by {freeze['by']}: {freeze['reason']}", "mine")
        for freeze in (locks["freezes"][:MOST_FREEZES] if locks is not None else ())
    ]
    if model.trouble:
        texts.append((f" ! {model.trouble}", "alert"))
    if health is not None and health["observe_only"]:
        texts.append((" ○ observe only: this daemon decides and explains, and touches nothing", "mine"))
    return [[(fit(clean(text), width), role)] for text, role in texts]
