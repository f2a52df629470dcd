"""Routes: what a route is, and the services and requests that handlers receive.

It knows no HTTP: a handler is a function from a Request to a JSON value.  The
server checks what was sent and writes what is returned.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, get_args, get_origin, get_type_hints

from typing_extensions import TypeVar

from machines.model.rollout import Actor
from rolloutd.control import rights
from rolloutd.control.identity import Identity
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.requests import NoParams, QueryParams, ReasonBody, RequestBody
from rolloutd.control.responses import Encoded, SharedAnswers, encode_in_slices
from rolloutd.control.status_feed import StatusFeed
from rolloutd.engine.background.drift_checks import DriftChecker
from rolloutd.engine.background.node_cleaning import NodeCleaner
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.forecasts import Forecaster
from rolloutd.engine.state import State
from rolloutd.ports import AuditReport, Checkpoints, Host, Leadership, Runners, SourceStore

Input = TypeVar("Input", covariant=True, default=NoParams)
Body = TypeVar("Body", covariant=True)

InventoryCommand = Callable[[str, Actor, str], Awaitable[None]]
"""Changes what is believed of a source or a node, on behalf of an actor and for a reason."""


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers work with.

    `refresh_inventory` and `prune_runs` start background work and return at once;
    `observe_nodes` returns once the nodes were observed; `verify_audit` makes the loop obey its report;
    `compare_anchors` returns how the audit differs from what is kept outside; `shell_command` returns how a
    person gets a shell on a node, or raises NodeUnreachable.  `step_down` makes the daemon hand over and end.
    """

    state: State
    runners: Runners
    check_mode: CheckMode
    drift: DriftChecker
    sources: SourceStore
    started_at: float
    version: str
    refresh_inventory: Callable[[], None]
    observe_nodes: Callable[[Sequence[str]], Awaitable[None]]
    prune_runs: Callable[[], None]
    verify_audit: Callable[[], Awaitable[AuditReport]]
    compare_anchors: Callable[[], Awaitable[str]]
    accept_inventory: InventoryCommand
    pin_identity: InventoryCommand
    checkpoints: Checkpoints
    cleaner: NodeCleaner
    forecaster: Forecaster
    shell_command: Callable[[Host], Sequence[str]]
    leadership: Leadership
    step_down: Callable[[], None]
    is_standby: bool = False
    answers: SharedAnswers = field(default_factory=SharedAnswers)
    kept: KeptAnswers = field(default_factory=KeptAnswers)
    status_feed: StatusFeed = field(default_factory=StatusFeed)


@dataclass(frozen=True, slots=True)
class Request(Generic[Input]):
    """A checked request: the caller, the path's parameters, and the query or the body as `input`.

    A route without either takes a plain Request.
    """

    identity: Identity
    operation: str
    path_params: Mapping[str, str]
    input: Input
    upload: bytes = b""

    @property
    def cause(self: Request[ReasonBody]) -> str:
        """The cause of the command's audit entries."""
        return f"{self.operation}: {self.input.reason}"


ANONYMOUS = Identity(uid=-1, user="")
"""The caller of a shared answer."""


@dataclass(frozen=True, slots=True)
class Created(Generic[Body]):
    """An answer with status 201: something new exists."""

    body: Body


LineStream = AsyncGenerator[Any, None]
"""A stream: one JSON object per line, or the bytes of several lines that streams share."""

Handler = Callable[[Services, Request[Any]], Awaitable[Any]]
"""Returns a JSON value, Created, Encoded if the route is shared, or a LineStream if it streams."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the route table: a handler, the models of its input and of its answer, and who may call it.

    `response_type` is the model of the body, or of one line if the route streams.
    `access` is checked before query and body are read, and is in the documents.  `is_heavy`: a core is busy
    for seconds, so only few run at once.  `is_shared`: the answer does not depend on the caller, so equal
    requests share one.  `on_standby`: the answer needs only the store, so that a standby gives it too.
    `operation` begins the cause of audit entries, which are permanent; it is for commands that use it.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    query_model: type[QueryParams]
    body_model: type[RequestBody] | None
    response_type: Any
    streams: bool
    creates: bool
    upload_type: str | None = None
    is_heavy: bool = False
    is_shared: bool = False
    on_standby: bool = False
    operation: str = ""
    access: rights.Access = rights.EVERYBODY

    @property
    def is_body_optional(self) -> bool:
        fields = {} if self.body_model is None else self.body_model.model_fields
        return not any(each.is_required() for each in fields.values())


async def shared_answer(services: Services, path: str, handler: Handler, request: Request[Any]) -> bytes:
    """Return the encoded answer to a question of any caller; equal ones that wait at once share it."""
    # Without the caller, so that no answer can depend on who asked first.
    anonymous = replace(request, identity=ANONYMOUS)

    async def compute() -> bytes:
        await services.state.advance()
        answer = await handler(services, anonymous)
        return answer.text if isinstance(answer, Encoded) else await encode_in_slices(answer)

    question = (*sorted(request.path_params.items()), request.input)
    return await services.answers.get(path, question, compute)


class RouteTable(list[Route]):
    """The routes of one module: `@routes.add(...)` above a handler adds it."""

    def add(self, method: str, path: str, **options: Any) -> Callable[[Handler], Handler]:
        """Add a route; its models are the handler's annotations, its summary is the handler's docstring."""

        def register(handler: Handler) -> Handler:
            hints = get_type_hints(handler)
            model: Any = next(iter(get_args(hints["request"])), NoParams)
            is_body, returned = issubclass(model, RequestBody), hints["return"]
            kinds = {get_origin(each): each for each in (returned, *get_args(returned))}
            wrapped = kinds.get(AsyncGenerator) or kinds.get(Created) or kinds.get(Encoded)
            self.append(
                Route(
                    method,
                    path,
                    handler,
                    summary=(handler.__doc__ or "").partition("\n")[0].rstrip("."),
                    query_model=NoParams if is_body else model,
                    body_model=model if is_body else None,
                    response_type=returned if wrapped is None else get_args(wrapped)[0],
                    streams=AsyncGenerator in kinds,
                    creates=Created in kinds,
                    **options,
                )
            )
            return handler

        return register
