"""Messages to people through apprise: mail, Slack, webhooks and whatever else it knows.

Where to send is a list of apprise's URLs in a file of its own, one per line,
because they hold passwords: they are never logged, audited or put on a command
line.  apprise blocks, so it works in a thread; it decides nothing and repeats
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path
from typing import Any

import apprise

from rolloutd.errors import InvalidFile, Mistake, NotifyFailed
from rolloutd.ports import Notifier

MOST_URLS = 50
"""Channels of one daemon; a team that needs more has a list of its own."""

# What apprise logs of a failure may hold the URL with its password.
logging.getLogger("apprise").setLevel(logging.CRITICAL)


class AppriseNotifier:
    """ports.Notifier over one of apprise's URLs."""

    def __init__(self, url: str, place: str = "notify") -> None:
        """Take the URL, and where it was written; raises ValueError where apprise does not know it."""
        made: Any = apprise.Apprise.instantiate(url, suppress_exceptions=True)
        if made is None:
            raise ValueError("apprise does not know this URL")
        self._made = made
        # Paths of web hooks are secrets too, so only the kind is named.
        self.name = f"{url.partition(':')[0]} ({place})"

    async def send(self, title: str, text: str) -> None:
        """Send one message; raises NotifyFailed."""
        try:
            done = await asyncio.to_thread(self._made.notify, body=text or title, title=title)
        except (OSError, TypeError, ValueError) as error:
            raise NotifyFailed(f"the message was not taken: {type(error).__name__}") from error
        if not done:
            raise NotifyFailed("the message was not taken; look at the service and at its URL")


def load(path: Path) -> list[Notifier]:
    """Return a notifier for each line of the file that is neither empty nor a comment.

    Raises InvalidFile, naming lines and never what stands in them.
    """
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFile((_mistake(path, 1, "no text that can be read", str(error)),)) from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        found = f"mode {stat.S_IMODE(mode):o}"
        raise InvalidFile((_mistake(path, 1, found, "a file that only the daemon's user reads"),))
    found_all: list[Notifier] = []
    mistakes = []
    for number, line in enumerate(lines, 1):
        url = line.strip()
        if not url or url.startswith("#"):
            continue
        try:
            found_all.append(AppriseNotifier(url, f"line {number} of {path.name}"))
        except ValueError:
            mistakes.append(_mistake(path, number, "a URL that apprise does not know", "a URL of apprise's"))
    if len(found_all) > MOST_URLS:
        mistakes.append(_mistake(path, 1, f"{len(found_all)} URLs", f"at most {MOST_URLS}"))
    if mistakes:
        raise InvalidFile(tuple(mistakes))
    return found_all


def _mistake(path: Path, line: int, found: str, allowed: str) -> Mistake:
    return Mistake(str(path), line, 1, "notify.urls_file", found, allowed, "where to send cannot be read")
