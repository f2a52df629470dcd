"""The in-memory fake of the Notifier: what was sent is a list, and it fails as often as a test says."""

from __future__ import annotations

from rolloutd.errors import NotifyFailed
from rolloutd.ports import Message


class FakeNotifier:
    """ports.Notifier; `failures` is how many of the next messages are not taken."""

    def __init__(self, name: str = "people") -> None:
        self.name = name
        self.failures = 0
        self.attempts = 0
        self.sent: list[tuple[str, str]] = []
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        """Take the message, or fail."""
        self.attempts += 1
        if self.failures > 0:
            self.failures -= 1
            raise NotifyFailed("the message was not taken")
        self.messages.append(message)
        self.sent.append((message.title, message.text))
