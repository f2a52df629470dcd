"""HTTP of the fake NetBox: tokens, REST lists, and faults that a test sets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from multidict import MultiDict

from tests.support.fake_netbox import filters
from tests.support.fake_netbox.fleet import Fleet

JSON = Any
Intercept = Callable[[web.Request], Awaitable[web.StreamResponse | None]]

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 50, 1000

V1 = "0123456789abcdef0123456789abcdef01234567"
V2 = "nbt_twinTwinTwin.0123456789abcdef0123456789abcdef01234567"

_NO_CHOICE = "Select a valid choice. {} is not one of the available choices."


@dataclass
class Token:
    """A token: why it is refused, what it may view and write, and to which site it is limited."""

    refusal: str = ""
    may_view: bool = True
    only_site: str = ""
    may_write: bool = False
    lacks: frozenset[str] = frozenset()
    """Paths of lists that it may not view."""


class FakeNetbox:
    """One server: `async with FakeNetbox(fleet) as server`, then `server.url`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.tokens = {V1: Token(), V2: Token()}
        self.has_authentication_check = True
        self.intercept: Intercept | None = None
        self.ignored: frozenset[str] = frozenset()
        """Filters that this server does not know."""
        self.requests: list[web.Request] = []
        self.url = ""
        self.page_host = ""
        """Origin of `next` links, if a proxy in front of the server sets another Host."""

    async def __aenter__(self) -> FakeNetbox:
        application = web.Application(middlewares=[self._middleware])
        application.router.add_get("/api/status/", self._status)
        application.router.add_get("/api/authentication-check/", self._authentication_check)
        application.router.add_get("/api/dcim/devices/", self._devices)
        application.router.add_get("/api/virtualization/virtual-machines/", self._machines)
        application.router.add_get("/api/extras/custom-fields/", self._custom_fields)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def paths(self) -> list[str]:
        """The paths of the requests so far."""
        return [request.path for request in self.requests]

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(request)
        if self.intercept is not None and (answer := await self.intercept(request)) is not None:
            return answer
        refusal = self._refusal(request.headers.get("Authorization", ""))
        if refusal:
            return web.json_response({"detail": refusal}, status=403)
        token = self._token(request)
        if request.method == "OPTIONS":
            # NetBox lists the methods that this token may use, each with the fields that it takes.
            actions = {"POST": {}, "PUT": {}} if token.may_write else {}
            return web.json_response(
                {"name": "Device List", "parses": ["application/json"], "actions": actions}
            )
        if request.path in token.lacks:
            detail = "You do not have permission to perform this action."
            return web.json_response({"detail": detail}, status=403)
        response: web.StreamResponse = await handler(request)
        return response

    def _refusal(self, authorization: str) -> str:
        keyword, _, text = authorization.partition(" ")
        if keyword not in ("Token", "Bearer") or not text:
            return "Authentication credentials were not provided."
        if text.startswith("Bearer "):
            return "Invalid authorization header"
        if text not in self.tokens:
            return f"Invalid {'v2' if text.startswith('nbt_') else 'v1'} token"
        return self.tokens[text].refusal

    def _token(self, request: web.Request) -> Token:
        return self.tokens[request.headers["Authorization"].partition(" ")[2]]

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response({"netbox-version": "4.6.8", "plugins": {}})

    async def _authentication_check(self, _: web.Request) -> web.Response:
        if not self.has_authentication_check:
            return web.json_response({"error": "The requested url could not be found."}, status=404)
        return web.json_response({"id": 2, "username": "inventory", "is_active": True})

    async def _devices(self, request: web.Request) -> web.Response:
        return self._list(request, self.fleet.devices)

    async def _machines(self, request: web.Request) -> web.Response:
        return self._list(request, self.fleet.machines)

    async def _custom_fields(self, request: web.Request) -> web.Response:
        return self._page(request, self.fleet.custom_fields)

    def _visible(self, token: Token, records: Iterable[dict[str, JSON]]) -> Iterable[dict[str, JSON]]:
        if not token.may_view:
            return []
        return [each for each in records if token.only_site in ("", each["site"]["slug"])]

    def _list(self, request: web.Request, records: list[dict[str, JSON]]) -> web.Response:
        token = self._token(request)
        if not token.may_view:
            detail = "You do not have permission to perform this action."
            return web.json_response({"detail": detail}, status=403)
        for name in ("tag", "site", "tenant", "role", "platform", "status"):
            known = {value for each in records for value in filters.values_of(each, name)}
            for wanted in request.query.getall(name, []):
                if wanted not in known | {"active", "planned", "offline", "staged"}:
                    return web.json_response({name: [_NO_CHOICE.format(wanted)]}, status=400)
        visible, custom = self._visible(token, records), self.fleet.custom_fields
        query = MultiDict((name, value) for name, value in request.query.items() if name not in self.ignored)
        try:
            found = [each for each in visible if filters.matches(each, query, custom)]
        except filters.BadValue as error:
            return web.json_response({"filter": [str(error)]}, status=400)
        return self._page(request, found)

    def _page(self, request: web.Request, records: list[dict[str, JSON]]) -> web.Response:
        limit = int(request.query.get("limit", DEFAULT_PAGE_SIZE)) or MAX_PAGE_SIZE
        limit, offset = min(limit, MAX_PAGE_SIZE), int(request.query.get("offset", 0))
        following = None
        if offset + limit < len(records):
            query = {**dict(request.query), "limit": limit, "offset": offset + limit}
            following = f"{self.page_host or self.url}{request.path}?{urlencode(query)}"
        fields = request.query.get("fields")
        shown = [_only(each, fields) for each in records[offset : offset + limit]]
        return web.json_response(
            {"count": len(records), "next": following, "previous": None, "results": shown}
        )


def _only(record: dict[str, JSON], fields: str | None) -> dict[str, JSON]:
    return {key: value for key, value in record.items() if fields is None or key in fields.split(",")}
