"""The event stream and logs, resumed after each interruption, and requests in threads.

The client blocks, so each use runs in a thread.  The queue between the listening
thread and the console is bounded: when the console is slow, the thread waits,
then the socket, then the daemon, and no entry is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rolloutd.control.client import ApiError, Client, DaemonUnreachable, api_path
from rolloutd.control.reconnect import read_with_reconnect
from rolloutd.control.status_changes import merge

MAX_QUEUED_MESSAGES = 5_000
"""Five frames' worth of the busiest fleet measured, a few megabytes."""

REQUEST_TIMEOUT_S = 20.0

MAX_CONCURRENT_REQUESTS = 4
"""More would only wait for each other in the daemon."""

MALFORMED = (KeyError, TypeError, ValueError)
"""What an answer raises that another version or another program has sent."""

T = TypeVar("T")

Lines = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream is open; `initial_state` has the responses read just before, by name."""

    at: float
    initial_state: Mapping[str, Any]
    is_new_history: bool


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream is closed; the console shows the state of `since`."""

    since: float
    reason: str


Message = Connected | Disconnected | Mapping[str, Any]
"""A change of the connection, or a line of the stream."""


class MessageQueue:
    """A bounded queue from one thread to the console; a full queue blocks the thread."""

    def __init__(self, limit: int = MAX_QUEUED_MESSAGES) -> None:
        self._limit = limit
        self._messages: deque[Message] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self.on_message: Callable[[], None] = lambda: None

    def put(self, *messages: Message) -> bool:
        """Add messages together, waiting while the queue is full; return False once it is closed."""
        with self._condition:
            while len(self._messages) >= self._limit and not self._closed:
                self._condition.wait()
            if self._closed:
                return False
            first = not self._messages
            self._messages.extend(messages)
        # One wake-up serves all messages of a frame; a thousand a second would flood the loop.
        if first:
            self.on_message()
        return True

    def take_all(self) -> list[Message]:
        with self._condition:
            taken = list(self._messages)
            self._messages.clear()
            self._condition.notify_all()
        return taken

    def close(self) -> None:
        """Release a thread that waits in `put`."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


class EventListener:
    """A thread that follows the event stream until the console ends."""

    def __init__(self, client: Client, message_queue: MessageQueue, now: Callable[[], float]) -> None:
        self._client = client
        self._message_queue = message_queue
        self._now = now
        self._stopped = threading.Event()
        self._last_seq: int | None = None
        self._last_received_at = now()

    def start(self) -> None:
        # A daemon thread: it may block in a read and must not delay the end of the process.
        threading.Thread(target=self._run, name="events", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to end; nothing waits for it."""
        self._stopped.set()
        self._message_queue.close()

    def _run(self) -> None:
        for seq, messages in read_with_reconnect(self._read, self._report, stop=self._stopped):
            # Together: a frame that has some of them would delay the others by a frame.
            if not self._message_queue.put(*messages):
                return
            self._last_seq = seq

    def _report(self, problem: DaemonUnreachable | None) -> None:
        if problem is not None:
            group = isinstance(problem.__cause__, PermissionError)
            reason = f"{problem}{'; members of its group may open it' if group else ''}"
            self._message_queue.put(Disconnected(self._last_received_at, reason))

    def _read(self) -> Generator[tuple[int, Sequence[Message]], None, None]:
        """Yield the initial state, then what the stream brings, each with the entry that it is as of."""
        try:
            # Before the stream: an entry that is committed between the two comes with the stream.
            initial_state = {
                name: self._client.get(api_path(name)) for name in ("status", "whoami", "settings", "health")
            }
            seq, last_seq = int(initial_state["status"]["seq"]), self._last_seq
            # A daemon with fewer entries than we have read serves another database.
            is_new_history = last_seq is not None and seq < last_seq
            after = seq if last_seq is None or is_new_history else last_seq
            self._last_received_at = self._now()
            yield after, [Connected(self._last_received_at, initial_state, is_new_history)]
            yield from self._follow_events(after)
        except ApiError as error:
            raise DaemonUnreachable(str(error)) from error
        except MALFORMED as error:
            raise DaemonUnreachable(f"the daemon's answer is malformed: {error!r}") from error

    def _follow_events(self, last_seq: int) -> Generator[tuple[int, Sequence[Message]], None, None]:
        query = {"after": last_seq, "follow": True, "status": True, "changes": True}
        status: Mapping[str, Any] = {}
        version = 0
        with contextlib.closing(self._client.stream_parts(api_path("events"), query)) as parts:
            for lines in parts:
                self._last_received_at = self._now()
                for line in lines:
                    if "change" in line:
                        if line["version"] != version + 1:
                            # The next connection begins with a whole status.
                            raise ValueError(f"version {line['version']} of the status follows {version}")
                        line["status"] = merge(status, line["change"])
                    if "status" in line:
                        status, version = line["status"], line.get("version", 0)
                    seq = line.get("seq")
                    if seq is not None:
                        last_seq = seq
                    elif "heartbeat" in line:
                        last_seq = max(last_seq, line["heartbeat"])
                yield last_seq, lines


class LogReader:
    """A thread that reads the log of one attempt and follows it to its end."""

    def __init__(
        self, client: Client, path: Sequence[str], attempt: int | None, on_lines: Callable[[Lines], None]
    ) -> None:
        self._client = client
        self._path = api_path(*path)
        self._attempt = attempt
        self._on_lines = on_lines
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._offset = 0
        self.status = "reading"

    def start(self) -> None:
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def stop(self) -> None:
        """Deliver no more lines; the thread ends at the stream's next lines or heartbeat."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            for lines in read_with_reconnect(self._read, self._report, stop=self._stopped, is_finite=True):
                self._offset = lines[-1]["offset"] if lines else self._offset
                self._emit("live", lines)
            self._emit("ended")
        except ApiError as error:
            self._emit(str(error))
        except MALFORMED as error:
            self._emit(f"the daemon's answer is malformed: {error!r}")

    def _read(self) -> Generator[Lines, None, None]:
        query = {"offset": self._offset, "attempt": self._attempt, "follow": True}
        return self._client.stream_parts(self._path, query)

    def _report(self, problem: DaemonUnreachable | None) -> None:
        self._emit("live" if problem is None else "the daemon is unreachable")

    def _emit(self, status: str, lines: Lines = ()) -> None:
        self.status = status
        if not self._stopped.is_set():
            # The console may have ended meanwhile, and its loop with it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_lines, lines)


@dataclass(frozen=True, slots=True)
class Response(Generic[T]):
    """The result of a request, or why there is none."""

    result: T | None
    error: ApiError | None = None
    unreachable: DaemonUnreachable | None = None


class RequestRunner:
    """Runs blocking requests in threads, a few at once."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def run(self, call: Callable[[], T]) -> Response[T]:
        """Run a call in a thread that does not delay the end of the process."""
        async with self._slots:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Response[T]] = loop.create_future()

            def deliver(response: Response[T]) -> None:
                if not future.done():
                    future.set_result(response)

            def run_call() -> None:
                response: Response[T] = Response(None, unreachable=DaemonUnreachable("the request failed"))
                try:
                    response = Response(call())
                except ApiError as error:
                    response = Response(None, error=error)
                except DaemonUnreachable as error:
                    response = Response(None, unreachable=error)
                finally:
                    # The console may have ended meanwhile, and its loop with it.
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(deliver, response)

            # Not an executor: the process would wait for its threads at exit, up to REQUEST_TIMEOUT_S.
            threading.Thread(target=run_call, name="request", daemon=True).start()
            return await future
