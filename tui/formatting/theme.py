"""Two themes, and the colour of each role in them.

Colour repeats what glyphs and words already say, so NO_COLOR hides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.style import Style
from textual.theme import Theme

DARK, LIGHT = "rolloutd-dark", "rolloutd-light"

_DARK_STYLES = {
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
    "match": "reverse #e5b567",
}
_LIGHT_STYLES = {
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
    "match": "reverse #8a5a00",
}

ROLE_STYLES: Mapping[str, Mapping[str, Style]] = {
    DARK: {role: Style.parse(text) for role, text in _DARK_STYLES.items()},
    LIGHT: {role: Style.parse(text) for role, text in _LIGHT_STYLES.items()},
}

CURSOR_STYLES: Mapping[str, Style] = {DARK: Style.parse("on #2a3142"), LIGHT: Style.parse("on #dbe4f7")}
UNFOCUSED_CURSOR_STYLES: Mapping[str, Style] = {
    DARK: Style.parse("on #20252f"),
    LIGHT: Style.parse("on #eceff5"),
}
"""The background of the cursor's row, in the focused list and in the others."""


def _theme(name: str, *, surfaces: tuple[str, str, str], scrollbar: str) -> Theme:
    styles = ROLE_STYLES[name]
    colours = {role: style.color.name for role, style in styles.items() if style.color is not None}
    background, panel, boost = surfaces
    return Theme(
        name=name,
        primary=colours["accent"],
        secondary=colours["run"],
        accent=colours["accent"],
        warning=colours["warn"],
        error=colours["bad"],
        success=colours["ok"],
        foreground=colours[""],
        background=background,
        surface=background,
        panel=panel,
        boost=boost,
        dark=name == DARK,
        variables={
            "scrollbar": scrollbar,
            "scrollbar-background": background,
            "border": colours["faint"],
        },
    )


THEMES = (
    _theme(DARK, surfaces=("#16181d", "#1f232b", "#262b35"), scrollbar="#343b4a"),
    _theme(LIGHT, surfaces=("#fbfbfd", "#eef0f5", "#e4e7ee"), scrollbar="#b4bac6"),
)


def choose_theme(name: str | None) -> str:
    """Return the named theme, else the one for the terminal's background (COLORFGBG)."""
    if name is not None:
        return LIGHT if name == "light" else DARK
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT if background in ("7", "15") else DARK
