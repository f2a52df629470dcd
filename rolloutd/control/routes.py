"""What a route is: the one table from which the server serves and the document is made.

A handler is a function from a Call to a value; it knows no HTTP.  The server
reads and checks what was sent, and writes what is returned.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolloutd.control.identity import Identity
from rolloutd.control.requests import NoQuery, Query
from rolloutd.ports import JSON, Runner, Sources
from rolloutd.state import State

EVERYBODY = "everybody who can open the socket"


async def _observe_nobody(nodes: Sequence[str]) -> None:
    """Observe nothing: what is unknown stays unknown."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What handlers work with.

    `refresh` asks the inventory sources beside us; `observe` returns once these
    nodes were looked at; `prune` removes what nobody needs any more, soon.
    """

    state: State
    runner: Runner
    sources: Sources
    since: float
    version: str
    refresh: Callable[[], None]
    observe: Callable[[Sequence[str]], Awaitable[None]] = _observe_nobody
    prune: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Call:
    """One checked request: who asks, for what, the parts of the path, the query and the body."""

    who: Identity
    verb: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    query: Any = None
    body: Any = None
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Created:
    """An answer that says that something is new: status 201."""

    body: JSON


Lines = AsyncGenerator[Any, None]
"""A stream: one JSON object per line."""

Handler = Callable[[Desk, Call], Awaitable[Any]]
"""Returns a JSON value, Created, or Lines where the route streams."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table.

    `answer` is the TypedDict of the body, or of one line where `streams`; `body`
    is the model of a JSON body; `content` the media type of a body that is no
    JSON.  `who` is a sentence: the rule itself lies where the order is given.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    answer: Any
    body: type[Any] | None = None
    query: type[Query] = NoQuery
    content: str | None = None
    optional_body: bool = False
    streams: bool = False
    creates: bool = False
    who: str = EVERYBODY
