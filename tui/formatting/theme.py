"""Two themes, and the colour of each role in them.

Colour repeats what glyphs and words already say, so NO_COLOR hides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.style import Style
from textual.theme import Theme

DARK, LIGHT = "rolloutd-dark", "rolloutd-light"

_STYLES = {
    "": ("#d5d9e2", "#2a2e38"),
    "dim": ("#939bab", "#5c6370"),
    "faint": ("#4a5161", "#b4bac6"),
    "bold": ("bold #eceff4", "bold #14171f"),
    "title": ("bold #eceff4", "bold #14171f"),
    "accent": ("#82aaff", "#2757c4"),
    "key": ("bold #82aaff", "bold #2757c4"),
    "ok": ("#93c97f", "#2f7d32"),
    "bad": ("bold #ff7a85", "bold #c01f38"),
    "warn": ("#e5b567", "#8a5a00"),
    "run": ("#7fd1e0", "#00728a"),
    "pending": ("#646d80", "#9097a5"),
    "isolating": ("#e5b567", "#8a5a00"),
    "maintaining": ("#82aaff", "#2757c4"),
    "verifying": ("#c099ff", "#7a3fc4"),
    "digest": ("#c8a2ff", "#7a3fc4"),
    "head": ("bold #939bab", "bold #5c6370"),
    "mine": ("bold #16181d on #e5b567", "bold #ffffff on #8a5a00"),
    "alert": ("bold #16181d on #ff7a85", "bold #ffffff on #c01f38"),
    "live": ("#93c97f", "#2f7d32"),
    "brand": ("bold #82aaff", "bold #2757c4"),
    "tab": ("bold #16181d on #82aaff", "bold #ffffff on #2757c4"),
    "match": ("reverse #e5b567", "reverse #8a5a00"),
}
"""Of each role, the dark and the light style."""

ROLE_STYLES: Mapping[str, Mapping[str, Style]] = {
    DARK: {role: Style.parse(dark) for role, (dark, _) in _STYLES.items()},
    LIGHT: {role: Style.parse(light) for role, (_, light) in _STYLES.items()},
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
