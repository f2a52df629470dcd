"""The console's command line, and what a browser's tab gets of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rolloutd.control.client import Client
from tui.__main__ import main, parse_arguments
from tui.app import Console

OF_THE_SERVER = {"web", "port", "socket", "no_mouse"}
"""Options that the server of the browser has, not the console in a tab; a browser's mouse is its own."""


def test_browser_tab_gets_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, int, Sequence[str]]] = []

    def serve(socket_path: str, port: int, display_args: Sequence[str]) -> int:
        served.append((socket_path, port, display_args))
        return 0

    monkeypatch.setattr("tui.connection.web.serve", serve)
    words = ["--theme", "light", "--ascii", "--still", "--reach", "ops1", "--hint", "press h"]
    assert main(["--socket", "/s", "--web", "--port", "8000", *words]) == 0
    ((socket_path, port, options),) = served
    assert (socket_path, port) == ("/s", 8000)
    given, passed = vars(parse_arguments(words)), vars(parse_arguments(list(options)))
    assert {name for name in given if given[name] == vars(parse_arguments([]))[name]} == OF_THE_SERVER
    assert {**passed, "socket": ""} == {**given, "socket": ""}


async def test_message_after_the_last_screen_closed_is_ignored() -> None:
    console = Console(Client("/nowhere"))
    console._frame_requested.set()
    assert console.screen_stack == []
    async with asyncio.timeout(10):
        await console._draw_frames()
