"""The route table: what a route is, and the services and requests that handlers receive.

It knows no HTTP: a handler is a function from a Request to a JSON value.  The
server checks what was sent and writes what is returned.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from machines.model.rollout import Actor
from rolloutd.control import rights
from rolloutd.control.identity import Identity
from rolloutd.control.requests import NoParams, QueryParams
from rolloutd.engine.background.drift_checks import DriftChecker
from rolloutd.engine.background.node_cleaning import NodeCleaner
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.state import State
from rolloutd.ports import JSON, AuditReport, Checkpoints, Runner, SourceStore


def _record_nothing(report: AuditReport) -> None:
    pass


async def _find_nothing() -> str:
    return ""


async def _observe_nothing(nodes: Sequence[str]) -> None:
    pass


async def _change_nothing(name: str, actor: Actor, reason: str) -> None:
    pass


InventoryCommand = Callable[[str, Actor, str], Awaitable[None]]
"""Changes what is believed of a source or a node, on behalf of an actor and for a reason."""


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers work with.

    `refresh_inventory` and `prune_runs` start background work and return at once;
    `observe_nodes` returns once the nodes were observed; `record_audit` makes the loop obey a verification;
    `compare_anchors` returns how the audit differs from what is kept outside.
    """

    state: State
    runner: Runner
    check_mode: CheckMode
    drift: DriftChecker
    sources: SourceStore
    started_at: float
    version: str
    refresh_inventory: Callable[[], None]
    observe_nodes: Callable[[Sequence[str]], Awaitable[None]] = _observe_nothing
    prune_runs: Callable[[], None] = lambda: None
    record_audit: Callable[[AuditReport], None] = _record_nothing
    compare_anchors: Callable[[], Awaitable[str]] = _find_nothing
    accept_inventory: InventoryCommand = _change_nothing
    pin_identity: InventoryCommand = _change_nothing
    checkpoints: Checkpoints | None = None
    cleaner: NodeCleaner | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request: the caller, the path's parameters, the query and the body."""

    identity: Identity
    operation: str = ""
    path_params: Mapping[str, str] = field(default_factory=dict)
    query: Any = None
    body: Any = None
    upload: bytes = b""


@dataclass(frozen=True, slots=True)
class Created:
    """An answer with status 201: something new exists."""

    body: JSON


LineStream = AsyncGenerator[Any, None]
"""A stream: one JSON object per line."""

Handler = Callable[[Services, Request], Awaitable[Any]]
"""Returns a JSON value, Created, or a LineStream if the route streams."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the route table.

    `response_type` is the TypedDict of the body, or of one line if the route streams.
    `access` is checked before query and body are read, and is in the documents.  `is_heavy`: a core is busy
    for seconds, so only few run at once.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    response_type: Any
    body_model: type[Any] | None = None
    query_model: type[QueryParams] = NoParams
    upload_type: str | None = None
    is_body_optional: bool = False
    streams: bool = False
    creates: bool = False
    is_heavy: bool = False
    access: rights.Access = rights.EVERYBODY


class RouteTable(list[Route]):
    """The routes of one module: `@routes.add(...)` above a handler adds it."""

    def add(
        self, method: str, path: str, *, creates: Any = None, **options: Any
    ) -> Callable[[Handler], Handler]:
        """Add a route; its summary is the handler's docstring, its type the return annotation.

        `creates` is the response type of a handler that may return Created; `options` are fields of Route.
        """

        def register(handler: Handler) -> Handler:
            response_type = creates or get_type_hints(handler)["return"]
            streams = get_origin(response_type) is AsyncGenerator
            if streams:
                response_type = get_args(response_type)[0]
            summary = (handler.__doc__ or "").partition("\n")[0].rstrip(".")
            self.append(
                Route(
                    method,
                    path,
                    handler,
                    summary,
                    response_type,
                    streams=streams,
                    creates=creates is not None,
                    **options,
                )
            )
            return handler

        return register
