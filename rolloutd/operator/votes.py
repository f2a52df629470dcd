"""Votes and questions of users of the cluster, who send their own token: the cluster says who they are.

The daemon has seen the proof itself, so no object that is written forges a vote.  An admin of the cluster who
can issue tokens for others can vote as them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from pydantic import ValidationError

from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import DEFAULT_DOMAIN, Cluster, api_path
from rolloutd.commands import voting
from rolloutd.commands.execution import UserCommand, execute
from rolloutd.commands.resolve import ResolvedRollout, resolve_for_reading
from rolloutd.control import responses
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.nodes import node_serializers
from rolloutd.control.plans.review import not_shown_to_voter
from rolloutd.control.rollouts import serializers
from rolloutd.control.rollouts.coverage import coverage_of
from rolloutd.control.tcp_listener import TlsFiles, serve_tcp
from rolloutd.control.votes.vote_requests import CastVote
from rolloutd.engine.state import State
from rolloutd.errors import NotAllowed, NotFound, RolloutdError
from rolloutd.operator.objects import RESOURCE
from rolloutd.operator.people import objects_of_namespace, person_of, rollout_of_object
from rolloutd.ports import JSON, SourceStore
from rolloutd.settings.operator import Operator, OperatorVotes

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024
"""Bytes of a vote: room for the ids of a thousand failures."""

MAX_TOKEN_CHARS = 16_384
"""Characters of a token; those with many groups have some thousand."""

ANSWER_TIMEOUT_S = 60.0
"""How long a call may take: two reviews by the cluster, and the vote."""


class NotAuthenticated(RolloutdError):
    """The cluster does not know the token."""


@dataclass(frozen=True, slots=True)
class ClusterUserInfo:
    """A user as the cluster authenticated them."""

    name: str
    uid: str
    groups: tuple[str, ...]
    extra: JSON


class VoteServer:
    """Answers `rolloutd` of kubectl: reads a rollout, and takes votes."""

    def __init__(self, state: State, sources: SourceStore, cluster: Cluster, settings: Operator) -> None:
        self._state = state
        self._sources = sources
        self._cluster = cluster
        self._settings = settings
        self._kept = KeptAnswers()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        path = "/v1/rollouts/{namespace}/{name}"
        application.router.add_get(path, self._handler(self._read))
        application.router.add_post(f"{path}/votes", self._handler(self._vote))
        application.router.add_get("/v1/namespaces/{namespace}/nodes/{node}/why", self._handler(self._why))
        return application

    def _handler(
        self, serve: Callable[[web.Request], Awaitable[JSON]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    response = responses.json_response(await responses.encode_in_slices(await serve(request)))
            except NotAuthenticated as error:
                response = responses.error_response(401, "not-authenticated", str(error))
            except (ApiError, ClusterUnreachable) as error:
                response = responses.error_response(
                    503, "cluster", f"the review of the token: {error}; try again"
                )
            except TimeoutError:
                text = f"no answer within {ANSWER_TIMEOUT_S:.0f} s; try again"
                response = responses.error_response(503, "too-slow", text)
            except RolloutdError as error:
                response = responses.from_error(error)
            except web.HTTPException as error:
                response = responses.from_http_error(error, request)
            except ConnectionError:
                response = web.Response(status=400)
            except Exception:
                error_id = secrets.token_hex(4)
                log.exception("a request failed", extra={"error_id": error_id})
                response = responses.internal_error(error_id)
            # A connection for each call: people vote now and then.
            response.force_close()
            return response

        return handle

    async def _read(self, request: web.Request) -> JSON:
        """Return the rollout, and the failures that a vote at `proceed` would cover."""
        user = await self._authenticate(request)
        await self._require(user, "get", request)
        resolved = await self._resolve(request)
        covered = await coverage_of(self._state, self._kept, resolved.index, resolved.rollout)
        unresolved = resolved.index.unresolved_failures(resolved.rollout.id)
        return {
            "rollout": serializers.rollout(self._state, self._kept, resolved, covered),
            "failures": [node_serializers.failure(each) for each in unresolved],
        }

    async def _why(self, request: web.Request) -> JSON:
        """Return why a node does not move, in each open rollout that an object of the namespace has."""
        user = await self._authenticate(request)
        await self._require(user, "list", request)
        namespace, node = request.match_info["namespace"], request.match_info["node"]
        index = self._state.index
        listed = objects_of_namespace(index.rollouts.values(), self._cluster.name, namespace)
        objects = {rollout.id: name for name, rollout in listed}
        answers = []
        for target in [each for each in index.targets_on(node) if each.rollout in objects]:
            resolved = await resolve_for_reading(self._state, target.rollout)
            answer = node_serializers.node_reason(self._state, resolved, target)
            answers.append({"object": objects[target.rollout], "rollout": target.rollout, **answer})
        if not answers:
            raise NotFound(f"{node}: in no open rollout of namespace {namespace}; name another namespace")
        return {"rollouts": answers}

    async def _vote(self, request: web.Request) -> JSON:
        user = await self._authenticate(request)
        await self._require(user, "approve", request)
        who = await person_of(user.name, self._settings, self._state.settings)
        try:
            body = CastVote.model_validate_json(await request.read())
        except ValidationError as error:
            raise responses.BadRequest(f"the body: {responses.describe_validation_error(error)}") from None
        if body.digest is None:
            raise responses.BadRequest("the body: digest is missing; send that of the rollout that you read")
        resolved = await self._resolve(request)
        ballot = body.ballot(resolved.rollout)
        not_shown = await not_shown_to_voter(self._state, self._sources, resolved, ballot)
        decide = partial(voting.vote, ballot=ballot, not_shown=not_shown)
        command = UserCommand(f"vote through Kubernetes: {body.reason}", decide, resolved, outside=user.name)
        await execute(self._state, who, command)
        return {"rollout": resolved.rollout.id, "gate": body.gate, "voter": who.user}

    # -- who, and what they may

    async def _authenticate(self, request: web.Request) -> ClusterUserInfo:
        """Return whose token it is, by the cluster's TokenReview; raises NotAuthenticated."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN_CHARS or not token.isprintable():
            raise NotAuthenticated("the request: no bearer token; send that of your kubeconfig")
        assert self._settings.votes is not None
        audience = self._settings.votes.audience
        status = (
            await self._cluster.post(
                api_path("tokenreviews", group="authentication.k8s.io/v1"),
                {
                    "apiVersion": "authentication.k8s.io/v1",
                    "kind": "TokenReview",
                    "spec": {"token": token, "audiences": [audience]},
                },
            )
        ).get("status") or {}
        # A server that does not know audiences names none, and then any token of the cluster would do.
        if not status.get("authenticated") or audience not in (status.get("audiences") or ()):
            raise NotAuthenticated(f"the token: not valid for {audience}; log in again, or name the audience")
        user = status.get("user") or {}
        name = str(user.get("username") or "")
        if not name:
            raise NotAuthenticated("the token: the cluster names no user; use another")
        groups = tuple(str(group) for group in user.get("groups") or ())
        return ClusterUserInfo(name, str(user.get("uid") or ""), groups, user.get("extra") or {})

    async def _require(self, user: ClusterUserInfo, verb: str, request: web.Request) -> None:
        """Raise NotAllowed unless the cluster gives the user this verb on the object."""
        namespace, name = request.match_info["namespace"], request.match_info.get("name", "")
        status = (
            await self._cluster.post(
                api_path("subjectaccessreviews", group="authorization.k8s.io/v1"),
                {
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SubjectAccessReview",
                    "spec": {
                        "user": user.name,
                        "uid": user.uid,
                        "groups": list(user.groups),
                        "extra": user.extra,
                        "resourceAttributes": {
                            "verb": verb,
                            "group": DEFAULT_DOMAIN,
                            "resource": RESOURCE,
                            "namespace": namespace,
                            "name": name,
                        },
                    },
                },
            )
        ).get("status") or {}
        if not status.get("allowed") or status.get("denied"):
            raise NotAllowed(
                f"{user.name} may not {verb} {namespace}/{name or RESOURCE}; ask for a role with this verb"
            )

    async def _resolve(self, request: web.Request) -> ResolvedRollout:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        rollout = rollout_of_object(self._state.index.rollouts.values(), self._cluster.name, namespace, name)
        if rollout is None:
            raise NotFound(f"{namespace}/{name}: no open rollout; see kubectl describe mr {name}")
        return await resolve_for_reading(self._state, rollout)


@contextlib.asynccontextmanager
async def serve_votes(server: VoteServer, settings: OperatorVotes) -> AsyncIterator[None]:
    """Listen while the context is open; raises CannotListen."""
    tls = TlsFiles(settings.tls.cert, settings.tls.key)
    async with serve_tcp(server.application(), settings.listen, "operator.votes", tls):
        yield
