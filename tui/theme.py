"""Colours: two themes, and which colour each role of a line has in them.

Nothing is told by colour alone, so without colour (NO_COLOR) only weight is lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.style import Style
from textual.theme import Theme

DARK, LIGHT = "rolloutd-dark", "rolloutd-light"

_DARK = {
    "": "#d5d9e2",
    "dim": "#939bab",
    "faint": "#4a5161",
    "bold": "bold #eceff4",
    "title": "bold #eceff4",
    "accent": "#82aaff",
    "key": "bold #82aaff",
    "ok": "#93c97f",
    "bad": "bold #ff7a85",
    "warn": "#e5b567",
    "run": "#7fd1e0",
    "pending": "#646d80",
    "isolating": "#e5b567",
    "maintaining": "#82aaff",
    "verifying": "#c099ff",
    "digest": "#c8a2ff",
    "head": "bold #939bab",
    "mine": "bold #16181d on #e5b567",
    "alert": "bold #16181d on #ff7a85",
    "live": "#93c97f",
    "brand": "bold #82aaff",
    "tab": "bold #16181d on #82aaff",
}
_LIGHT = {
    "": "#2a2e38",
    "dim": "#5c6370",
    "faint": "#b4bac6",
    "bold": "bold #14171f",
    "title": "bold #14171f",
    "accent": "#2757c4",
    "key": "bold #2757c4",
    "ok": "#2f7d32",
    "bad": "bold #c01f38",
    "warn": "#8a5a00",
    "run": "#00728a",
    "pending": "#9097a5",
    "isolating": "#8a5a00",
    "maintaining": "#2757c4",
    "verifying": "#7a3fc4",
    "digest": "#7a3fc4",
    "head": "bold #5c6370",
    "mine": "bold #ffffff on #8a5a00",
    "alert": "bold #ffffff on #c01f38",
    "live": "#2f7d32",
    "brand": "bold #2757c4",
    "tab": "bold #ffffff on #2757c4",
}

ROLES: Mapping[str, Mapping[str, Style]] = {
    DARK: {role: Style.parse(text) for role, text in _DARK.items()},
    LIGHT: {role: Style.parse(text) for role, text in _LIGHT.items()},
}

CURSOR: Mapping[str, Style] = {DARK: Style.parse("on #2a3142"), LIGHT: Style.parse("on #dbe4f7")}
CURSOR_AWAY: Mapping[str, Style] = {DARK: Style.parse("on #20252f"), LIGHT: Style.parse("on #eceff5")}
"""The cursor's line in the half of the screen that has the keys, and in the other."""

THEMES = (
    Theme(
        name=DARK,
        primary="#82aaff",
        secondary="#7fd1e0",
        accent="#82aaff",
        warning="#e5b567",
        error="#ff7a85",
        success="#93c97f",
        foreground="#d5d9e2",
        background="#16181d",
        surface="#16181d",
        panel="#1f232b",
        boost="#262b35",
        dark=True,
        variables={"scrollbar": "#343b4a", "scrollbar-background": "#16181d", "border": "#4a5161"},
    ),
    Theme(
        name=LIGHT,
        primary="#2757c4",
        secondary="#00728a",
        accent="#2757c4",
        warning="#8a5a00",
        error="#c01f38",
        success="#2f7d32",
        foreground="#2a2e38",
        background="#fbfbfd",
        surface="#fbfbfd",
        panel="#eef0f5",
        boost="#e4e7ee",
        dark=False,
        variables={"scrollbar": "#b4bac6", "scrollbar-background": "#fbfbfd", "border": "#b4bac6"},
    ),
)


def chosen(named: str | None) -> str:
    """Return the theme that is named, else the one that suits the terminal as far as it tells."""
    if named is not None:
        return LIGHT if named == "light" else DARK
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT if background in ("7", "15") else DARK
