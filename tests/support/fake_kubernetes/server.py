"""The HTTP of the fake: paths and verbs become reads and writes of its objects."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from tests.support.fake_kubernetes import discovery, patches, protobuf
from tests.support.fake_kubernetes.access import Access, Rules, allows, review
from tests.support.fake_kubernetes.controllers import end_pod
from tests.support.fake_kubernetes.definitions import judge
from tests.support.fake_kubernetes.errors import ApiRefusal, conflict
from tests.support.fake_kubernetes.evictions import check_preconditions, evict
from tests.support.fake_kubernetes.objects import FLEET_KINDS, RESOURCES, Change, Objects, format_time
from tests.support.fake_kubernetes.schema import validate_fields
from tests.support.fake_kubernetes.selectors import Matches, matcher

JSON = Any
STATUS_SUBRESOURCES = (
    "pods",
    "nodes",
    "poddisruptionbudgets",
    "maintenancerollouts",
    "maintenancevotes",
    *FLEET_KINDS,
)
IMMUTABLE_SPECS = ("maintenancerollouts", "maintenancevotes")
"""Resources whose definition has the rule `self == oldSelf` for the spec."""
APPLY_PATCH = "application/apply-patch+yaml"
REQUESTS_KEPT = 20_000
WATCH_TIMEOUT_S = 1800.0

_PATH = re.compile(
    r"^/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>[a-z]+))?$"
)


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request, taken apart."""

    verb: str
    group: str
    namespace: str
    resource: str
    name: str
    subresource: str
    query: dict[str, str]
    manager: str
    body: JSON = None
    token: str = ""
    impersonated: str = ""
    version: str = "v1"

    @property
    def full_resource(self) -> str:
        """The resource as rules name it."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and the status that it was answered with; watches count when they begin."""

    request: ApiRequest
    code: int


Interceptor = Callable[[ApiRequest], Awaitable[None] | None]
"""Called before a request is answered: somebody else may move first, or it may be refused."""


class Server:
    """Answers requests from the objects."""

    def __init__(self, objects: Objects, access: Access) -> None:
        self.objects = objects
        self.access = access
        self.interceptors: list[Interceptor] = []
        self.throttled = 0
        """So many requests are still to be sent away by flow control."""
        self.bookmark_s = 30.0
        self.requests: deque[ApiRequest] = deque(maxlen=REQUESTS_KEPT)
        self.answered: deque[Answered] = deque(maxlen=REQUESTS_KEPT)
        self.watches = 0
        self.groups = dict(discovery.GROUPS)
        """The served version of each group."""
        self.read_log: Callable[[JSON, dict[str, str]], str] = lambda pod, query: ""

    def app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            rules = self.access.rules_for(request.headers.get("Authorization"))
            impersonated = request.headers.get("Impersonate-User")
            if impersonated is not None:
                if not allows(rules, "impersonate", "", "users"):
                    raise ApiRefusal(403, "users is forbidden: this user cannot impersonate")
                rules = self.access.rules_of_user(impersonated)
            if self.throttled > 0:
                self.throttled -= 1
                text = "Too many requests, please try again later.\n"
                return web.Response(status=429, text=text, headers={"Retry-After": "1"})
            document = discovery.discovery_document(request.path.rstrip("/"), self.groups)
            if document is not None:
                return web.json_response(document)
            return await self._answer(request, rules)
        except ApiRefusal as refusal:
            headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
            return web.json_response(refusal.body, status=refusal.code, headers=headers)

    async def _answer(self, request: web.Request, rules: Rules) -> web.StreamResponse:
        asked = await _parse_request(request)
        if asked.resource == "selfsubjectaccessreviews":
            self.requests.append(asked)
            return web.json_response(review(rules, asked.body), status=201)
        if not allows(rules, asked.verb, asked.group, asked.full_resource, asked.namespace):
            self.answered.append(Answered(asked, 403))
            raise ApiRefusal(403, f"{asked.full_resource} is forbidden: this user cannot {asked.verb} it")
        if asked.resource == "tokenreviews":
            return web.json_response(self.access.review_token(asked.body), status=201)
        if asked.resource == "subjectaccessreviews":
            return web.json_response(self.access.review_subject(asked.body), status=201)
        if asked.resource not in RESOURCES or asked.version != self.groups.get(asked.group, "v1"):
            raise ApiRefusal(404, "the server could not find the requested resource")
        if request.content_type == APPLY_PATCH and not asked.subresource:
            self._authorise_creation(asked, rules)
        self.requests.append(asked)
        for interference in list(self.interceptors):
            done = interference(asked)
            if done is not None:
                await done
        if asked.verb == "watch":
            self.answered.append(Answered(asked, 200))
            return await self._watch(request, asked)
        try:
            code, body = self._serve(asked, request.content_type)
        except ApiRefusal as refusal:
            self.answered.append(Answered(asked, refusal.code))
            raise
        self.answered.append(Answered(asked, code))
        if isinstance(body, str):
            return web.Response(text=body, status=code)
        return web.json_response(body, status=code)

    def _serve(self, asked: ApiRequest, content_type: str) -> tuple[int, JSON]:
        match asked.verb:
            case "get" if asked.subresource == "log":
                return 200, self.read_log(self.objects.get("pods", asked.namespace, asked.name), asked.query)
            case "get":
                return 200, self.objects.get(asked.resource, asked.namespace, asked.name)
            case "list":
                return 200, self._list(asked)
            case "create" if asked.subresource == "eviction":
                return 201, evict(self.objects, asked.namespace, asked.name, asked.body)
            case "create" if asked.subresource == "token":
                return 201, self.access.issue_token(asked.namespace, asked.name, asked.body)
            case "create":
                return 201, self._create(asked)
            case "patch" | "update":
                return 200, self._write(asked, content_type)
            case "delete":
                return 200, self._delete(asked)
            case _:
                raise ApiRefusal(405, f"the server does not do {asked.verb}", reason="MethodNotAllowed")

    # -- reading

    def _list(self, asked: ApiRequest) -> JSON:
        version, after = self.objects.version, ""
        if "continue" in asked.query:
            token = json.loads(base64.urlsafe_b64decode(asked.query["continue"]))
            version, after = token["v"], token["after"]
            if version < self.objects.compacted:
                raise ApiRefusal(
                    410, "The provided continue parameter is too old to display a consistent list result."
                )
        matches = matcher(asked.query)
        found = [
            thing
            for thing in self.objects.all(asked.resource, asked.namespace)
            if matches(thing) and _object_key(thing) > after
        ]
        limit = int(asked.query.get("limit") or 0) or len(found)
        metadata: dict[str, JSON] = {"resourceVersion": str(version)}
        if len(found) > limit:
            token = json.dumps({"v": version, "after": _object_key(found[limit - 1])}).encode()
            metadata["continue"] = base64.urlsafe_b64encode(token).decode()
            metadata["remainingItemCount"] = len(found) - limit
        kind = RESOURCES[asked.resource]
        return {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.version,
            "metadata": metadata,
            "items": found[:limit],
        }

    async def _watch(self, request: web.Request, asked: ApiRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.watches += 1
        try:
            with contextlib.suppress(ConnectionError):
                await self._stream(response, asked)
        finally:
            self.watches -= 1
        return response

    async def _stream(self, response: web.StreamResponse, asked: ApiRequest) -> None:
        matches, kind = matcher(asked.query), RESOURCES[asked.resource]
        loop = asyncio.get_running_loop()
        until = loop.time() + float(asked.query.get("timeoutSeconds") or WATCH_TIMEOUT_S)
        version = int(asked.query.get("resourceVersion") or 0)
        if version > self.objects.version:
            return
        if version == 0:
            version = self.objects.version
            for thing in list(self.objects.all(asked.resource, asked.namespace)):
                if matches(thing):
                    await _send(response, "ADDED", thing)
        elif version < self.objects.compacted:
            text = f"too old resource version: {version} ({self.objects.compacted})"
            await _send(response, "ERROR", ApiRefusal(410, text).body)
            return
        bookmark_at = loop.time() + self.bookmark_s
        while loop.time() < until:
            now = self.objects.version
            for change in self.objects.changes_after(asked.resource, version):
                event = _watch_event(change, asked.namespace, matches)
                if event is not None:
                    await _send(response, *event)
            version = now
            if loop.time() >= bookmark_at and asked.query.get("allowWatchBookmarks") == "true":
                mark = {
                    "kind": kind.kind,
                    "apiVersion": kind.version,
                    "metadata": {"resourceVersion": str(version)},
                }
                await _send(response, "BOOKMARK", mark)
                bookmark_at = loop.time() + self.bookmark_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self.objects.wait(version), max(0.001, min(until, bookmark_at) - loop.time())
                )

    # -- writing

    def _create(self, asked: ApiRequest, operation: str = "Update") -> JSON:
        thing = asked.body
        if asked.resource == "maintenancevotes":
            self._admit_vote(asked)
        if asked.resource == "maintenancerollouts":
            spec = thing.get("spec") or {}
            if ("plan" in spec) == ("source" in spec):
                raise ApiRefusal(422, "spec: Invalid value: give either plan or source", reason="Invalid")
        if RESOURCES[asked.resource].strict:
            validate_fields(RESOURCES[asked.resource].kind, thing)
        meta = thing.setdefault("metadata", {})
        if RESOURCES[asked.resource].namespaced:
            within = self.objects.get("namespaces", "", asked.namespace)
            if "deletionTimestamp" in within["metadata"]:
                cause = {"reason": "NamespaceTerminating", "message": "namespace is being terminated"}
                raise ApiRefusal(403, f"namespace {asked.namespace} is being terminated", causes=[cause])
            meta["namespace"] = asked.namespace
        if asked.resource == "pods":
            thing.setdefault("spec", {}).setdefault("terminationGracePeriodSeconds", 30)
            thing["status"] = {"phase": "Pending"}
        elif asked.resource in ("nodes", "namespaces"):
            thing.setdefault("spec", {})
        judge(asked.resource, thing)
        if asked.query.get("dryRun") == "All":
            return thing
        return self.objects.create(asked.resource, thing, manager=asked.manager, operation=operation)

    def _admit_vote(self, asked: ApiRequest) -> None:
        """Do what the shipped admission policy says, while it is there with its binding."""
        kinds = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
        if not all(list(self.objects.all(kind)) for kind in kinds):
            return
        known = self.access.users.get(asked.token)
        name = asked.impersonated or (known.name if known is not None else "")
        if not name or asked.body["spec"]["voter"] != name:
            raise ApiRefusal(422, "spec.voter must be your own user name", reason="Invalid")
        rules = self.access.rules_of_user(name)
        if not allows(rules, "approve", "rolloutd.io", "maintenancerollouts", asked.namespace):
            raise ApiRefusal(422, "you may not approve this rollout", reason="Invalid")

    def _write(self, asked: ApiRequest, content_type: str) -> JSON:
        if content_type == APPLY_PATCH and not asked.subresource:
            return self._apply(asked)
        before = self.objects.get(asked.resource, asked.namespace, asked.name)
        if content_type == "application/json-patch+json":
            return self._migrate_managers(asked, before)
        uid = asked.body.get("metadata", {}).get("uid")
        if uid not in (None, before["metadata"]["uid"]):
            raise ApiRefusal(409, f"Precondition failed: UID in precondition: {uid}")
        if asked.resource in FLEET_KINDS and "strategic" in content_type:
            raise ApiRefusal(415, "the body of the request was in an unknown format: strategic merge patch")
        after = asked.body if asked.verb == "update" else _patched(before, asked.body, content_type)
        wanted = asked.body.get("metadata", {}).get("resourceVersion", "")
        if asked.subresource == "status":
            after = {**before, "status": after.get("status")}
        elif asked.resource in STATUS_SUBRESOURCES and "status" in before:
            after["status"] = before["status"]
        if asked.resource in IMMUTABLE_SPECS and after.get("spec") != before.get("spec"):
            raise ApiRefusal(422, "spec: Invalid value: spec is immutable", reason="Invalid")
        judge(asked.resource, after)
        after["metadata"] = {**after["metadata"], "resourceVersion": wanted}
        return self.objects.update(
            asked.resource, before, after, manager=asked.manager, subresource=asked.subresource
        )

    def _authorise_creation(self, asked: ApiRequest, rules: Rules) -> None:
        """Ask for the right to create too where an apply would create."""
        if self.objects.find(asked.resource, asked.namespace, asked.name) is not None:
            return
        if not allows(rules, "create", asked.group, asked.resource, asked.namespace):
            raise ApiRefusal(403, f"{asked.resource} is forbidden: this user cannot create it")
        self.answered.append(Answered(replace(asked, verb="create"), 201))

    def _migrate_managers(self, asked: ApiRequest, before: JSON) -> JSON:
        """Replace the field managers, which a patch of just these and of the version may do."""
        patch = {each["path"]: each["value"] for each in asked.body if each["op"] == "replace"}
        if patch.keys() != {"/metadata/resourceVersion", "/metadata/managedFields"}:
            raise ApiRefusal(422, "this fake patches nothing else in this way", reason="Invalid")
        if patch["/metadata/resourceVersion"] != before["metadata"]["resourceVersion"]:
            raise conflict(asked.resource, asked.name)
        managed = patch["/metadata/managedFields"]
        return self.objects.modify(
            asked.resource, before, lambda thing: thing["metadata"].update(managedFields=managed)
        )

    def _apply(self, asked: ApiRequest) -> JSON:
        """Apply server-side: an unknown object is created, another manager's field is a conflict."""
        before = self.objects.find(asked.resource, asked.namespace, asked.name)
        meta = asked.body["metadata"]
        if before is None:
            if meta.get("uid") or meta.get("resourceVersion"):
                raise conflict(asked.resource, asked.name)
            return self._create(asked, operation="Apply")
        if meta.get("uid") not in (None, before["metadata"]["uid"]):
            raise ApiRefusal(409, f"Precondition failed: UID in precondition: {meta['uid']}")
        force = asked.query.get("force") == "true"
        after = patches.apply(before, asked.body, asked.manager, force=force)
        if asked.resource in IMMUTABLE_SPECS and after.get("spec") != before.get("spec"):
            raise ApiRefusal(422, "spec: Invalid value: spec is immutable", reason="Invalid")
        judge(asked.resource, after)
        after["metadata"]["resourceVersion"] = meta.get("resourceVersion", "")
        return self.objects.update(
            asked.resource, before, after, manager=asked.manager, applied=patches.paths_of(asked.body)
        )

    def _delete(self, asked: ApiRequest) -> JSON:
        thing = self.objects.get(asked.resource, asked.namespace, asked.name)
        options = asked.body or {}
        check_preconditions(thing, options, asked.resource)
        if asked.resource == "pods":
            grace = options.get("gracePeriodSeconds", asked.query.get("gracePeriodSeconds"))
            end_pod(self.objects, thing, None if grace is None else int(grace))
        elif asked.resource == "jobs":
            if options.get("propagationPolicy") != "Foreground":
                raise ApiRefusal(400, "this fake deletes no Job without its pods: they would be orphans")
            self.objects.modify("jobs", thing, _being_deleted)
        elif asked.resource == "namespaces":

            def going(each: JSON) -> None:
                each["metadata"].setdefault("deletionTimestamp", format_time())
                each["status"] = {"phase": "Terminating"}

            self.objects.modify("namespaces", thing, going)
        else:
            self.objects.remove(asked.resource, thing)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


def _being_deleted(thing: JSON) -> None:
    thing["metadata"].setdefault("deletionTimestamp", format_time())


async def _parse_request(request: web.Request) -> ApiRequest:
    found = _PATH.match(request.path)
    if found is None:
        raise ApiRefusal(404, "the server could not find the requested resource")
    query = dict(request.query)
    name = found["name"] or ""
    verbs = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
    verb = verbs.get(request.method, "get" if name else "list")
    if verb == "list" and query.get("watch") in ("true", "1"):
        verb = "watch"
    agent = request.headers.get("User-Agent", "unknown").split("/")[0]
    content = await request.read()
    try:
        is_protobuf = request.content_type == protobuf.CONTENT_TYPE
        body = protobuf.read_token_request(content) if is_protobuf else json.loads(content or "null")
    except ValueError:
        raise ApiRefusal(400, "the body is no JSON") from None
    return ApiRequest(
        verb,
        found["group"] or "",
        found["namespace"] or "",
        found["resource"],
        name,
        found["part"] or "",
        query,
        query.get("fieldManager") or agent,
        body,
        request.headers.get("Authorization", "").removeprefix("Bearer "),
        request.headers.get("Impersonate-User", ""),
        found["version"],
    )


def _patched(before: JSON, patch: JSON, content_type: str) -> JSON:
    if content_type == "application/strategic-merge-patch+json":
        return patches.strategic(before, patch)
    # Every list that rolloutd applies is atomic, or a map of which it owns all items.
    if content_type in ("application/merge-patch+json", APPLY_PATCH):
        return patches.merge(before, patch)
    raise ApiRefusal(415, f"the body of the request was in an unknown format: {content_type}")


def _watch_event(change: Change, namespace: str, matches: Matches) -> tuple[str, JSON] | None:
    """Return what a watch with this selection sees of a change."""

    def seen(thing: JSON) -> bool:
        return thing is not None and namespace in ("", thing["metadata"].get("namespace")) and matches(thing)

    was, now = seen(change.before), seen(change.after)
    if now:
        return ("MODIFIED" if was else "ADDED", change.after)
    if was:
        last = change.before if change.after is None else change.after
        return ("DELETED", last)
    return None


def _object_key(thing: JSON) -> str:
    return f"{thing['metadata'].get('namespace', '')}/{thing['metadata']['name']}"


async def _send(response: web.StreamResponse, kind: str, thing: JSON) -> None:
    await response.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")
