"""Messages to people through apprise: mail, Slack, webhooks and whatever else it knows.

Where to send is a list of apprise's URLs in a file of its own, one per line,
because they hold passwords: they are never logged, audited or put on a command
line.  apprise blocks, so it works in a thread; it decides nothing and repeats
nothing.
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import Any

import apprise

from rolloutd.concurrency import threads
from rolloutd.errors import Diagnostic, InvalidFile, NotifyFailed
from rolloutd.ports import Message, Notifier

MAX_URLS = 50
"""Channels of one daemon; a team that needs more has a list of its own."""

# What apprise logs of a failure may hold the URL with its password.
logging.getLogger("apprise").setLevel(logging.CRITICAL)


class AppriseNotifier:
    def __init__(self, url: str, location: str = "notify") -> None:
        """Take the URL, and where it was written; raises ValueError where apprise does not know it."""
        instance: Any = apprise.Apprise.instantiate(url, suppress_exceptions=True)
        if instance is None:
            raise ValueError("apprise does not know this URL")
        self._apprise = instance
        # Paths of web hooks are secrets too, so only the kind is named.
        self.name = f"{url.partition(':')[0]} ({location})"

    async def send(self, message: Message) -> None:
        """Send one message; raises NotifyFailed."""
        title, text = message.title, message.text
        try:
            delivered = await threads.NOTIFICATIONS.run(self._apprise.notify, body=text or title, title=title)
        except (OSError, TypeError, ValueError) as error:
            raise NotifyFailed(f"the message was not taken: {type(error).__name__}") from error
        if not delivered:
            raise NotifyFailed("the message was not taken; look at the service and at its URL")


def load_notifiers(path: Path) -> list[Notifier]:
    """Return a notifier for each line of the file that is neither empty nor a comment.

    Raises InvalidFile, naming lines and never what stands in them.
    """
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFile((_diagnostic(path, 1, "no text that can be read", str(error)),)) from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        found = f"mode {stat.S_IMODE(mode):o}"
        raise InvalidFile((_diagnostic(path, 1, found, "a file that only the daemon's user reads"),))
    notifiers: list[Notifier] = []
    diagnostics = []
    for number, line in enumerate(lines, 1):
        url = line.strip()
        if not url or url.startswith("#"):
            continue
        try:
            notifiers.append(AppriseNotifier(url, f"line {number} of {path.name}"))
        except ValueError:
            diagnostics.append(
                _diagnostic(path, number, "a URL that apprise does not know", "a URL of apprise's")
            )
    if len(notifiers) > MAX_URLS:
        diagnostics.append(_diagnostic(path, 1, f"{len(notifiers)} URLs", f"at most {MAX_URLS}"))
    if diagnostics:
        raise InvalidFile(tuple(diagnostics))
    return notifiers


def _diagnostic(path: Path, line: int, found: str, allowed: str) -> Diagnostic:
    return Diagnostic(str(path), line, 1, "notify.urls_file", found, allowed, "where to send cannot be read")
