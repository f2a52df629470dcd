"""The connection to the daemon: one stream that goes on where it stood, and questions beside it.

The client blocks, so it is used in threads.  The listening thread puts what it
hears into a mailbox that has a limit: when the console is slow the thread waits,
then the socket, then the daemon, and nothing is lost.  It connects again for as
long as the console lives, and it notices when the daemon that answers has
another history than the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rolloutd.control.client import Answer, Client, NoDaemon, path_of

MOST_WAITING = 5_000
"""Lines in the mailbox: five frames' worth of the busiest fleet we know, some megabytes."""

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Between tries to connect; a restart takes seconds, and the last is for as long as it is away."""

ASK_LIMIT_S = 20.0
"""Patience for one question: the console shows what it has meanwhile."""

MOST_ASKING = 4
"""Questions asked at once: more only wait for each other in the daemon."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Live:
    """The stream stands; `answers` are what was asked as it began, by name."""

    at: float
    answers: Mapping[str, Any]
    is_other: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream broke off or did not begin; what is shown is true as of `since`."""

    since: float
    why: str


Letter = Live | Lost | Mapping[str, Any]
"""What the mailbox holds: news of the connection, and lines of the stream."""


class Mailbox:
    """Letters from a thread, taken all at once; a full one makes the thread wait."""

    def __init__(self, limit: int = MOST_WAITING) -> None:
        self._limit = limit
        self._letters: deque[Letter] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.ring: Callable[[], None] = lambda: None

    def put(self, letter: Letter) -> bool:
        """Leave a letter, waiting while it is full; return False once it is closed."""
        with self._changed:
            while len(self._letters) >= self._limit and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._letters.append(letter)
            first = len(self._letters) == 1
        if first:
            self.ring()
        return True

    def take(self) -> list[Letter]:
        """Return all letters and leave none."""
        with self._changed:
            taken = list(self._letters)
            self._letters.clear()
            self._changed.notify_all()
        return taken

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Listener:
    """Follows the event stream in a thread of its own for as long as the console lives."""

    def __init__(self, client: Client, mailbox: Mailbox, now: Callable[[], float]) -> None:
        self._client = client
        self._mailbox = mailbox
        self._now = now
        self._over = threading.Event()
        self._heard: int | None = None
        self._heard_at = now()
        self._told_lost = False

    def start(self) -> None:
        """Begin; the thread never keeps the process alive."""
        threading.Thread(target=self._listen, name="events", daemon=True).start()

    def stop(self) -> None:
        """Begin to end; the thread is left to itself."""
        self._over.set()
        self._mailbox.close()

    def _listen(self) -> None:
        tries = 0
        while not self._over.is_set():
            try:
                heard_before = self._heard
                self._follow(self._begin())
                why = "the daemon closed the stream"
            except (NoDaemon, Answer) as lost:
                why = str(lost)
                if isinstance(lost.__cause__, PermissionError):
                    why += "; its group may open it"
            tries = 0 if self._heard != heard_before else tries + 1
            if not self._told_lost:
                self._told_lost = True
                self._mailbox.put(Lost(self._heard_at, why))
            self._over.wait(RETRY_S[min(tries, len(RETRY_S) - 1)])

    def _begin(self) -> int:
        """Ask how things stand and return the entry after which the stream goes on."""
        answers = {
            name: self._client.get(path_of(name)) for name in ("status", "whoami", "settings", "health")
        }
        seq = int(answers["status"]["seq"])
        is_other = self._heard is not None and seq < self._heard
        if self._heard is None or is_other:
            self._heard = seq
        self._heard_at = self._now()
        self._told_lost = False
        self._mailbox.put(Live(self._heard_at, answers, is_other))
        return self._heard

    def _follow(self, after: int) -> None:
        with contextlib.closing(
            self._client.stream(path_of("events"), {"after": after, "follow": True})
        ) as lines:
            for line in lines:
                self._heard_at = self._now()
                seq = line.get("seq")
                if seq is not None:
                    self._heard = seq
                elif "heartbeat" in line:
                    self._heard = max(self._heard or 0, line["heartbeat"])
                if not self._mailbox.put(line):
                    return


@dataclass(frozen=True, slots=True)
class Said(Generic[T]):
    """What came of a question: an answer, or why there is none."""

    answer: T | None
    refused: Answer | None = None
    silent: NoDaemon | None = None


class Asker:
    """Asks questions in threads, a few at once."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MOST_ASKING)

    async def ask(self, work: Callable[[], T]) -> Said[T]:
        """Run a call of the client in a thread that dies with the process."""
        async with self._free:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Said[T]] = loop.create_future()

            def deliver(said: Said[T]) -> None:
                if not future.done():
                    future.set_result(said)

            def run() -> None:
                said: Said[T] = Said(None, silent=NoDaemon("the question could not be asked"))
                try:
                    said = Said(work())
                except Answer as refused:
                    said = Said(None, refused=refused)
                except NoDaemon as silent:
                    said = Said(None, silent=silent)
                finally:
                    # A loop that is closed has nobody left to tell.
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(deliver, said)

            threading.Thread(target=run, name="question", daemon=True).start()
            return await future
