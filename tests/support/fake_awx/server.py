"""HTTP of the fake AWX: its API as far as a client launches and follows jobs, and faults that a test sets.

It knows nothing of rolloutd.  A launch is one transaction, as AWX's is: a client that goes away does not undo
it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from tests.support.fake_awx.jobs import Jobs
from tests.support.fake_awx.objects import (
    ACTIVE,
    ASK,
    FIELD_OF,
    BadFilter,
    Host,
    Inventory,
    Job,
    Project,
    Template,
    instant,
    select,
)
from tests.support.fake_awx.processes import Credential

JSON = Any
Intercept = Callable[[web.Request], Awaitable[web.StreamResponse | None]]

TOKEN = "awxFakeToken0123456789abcdefgh"
DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 25, 200
VERSION = "24.6.1"


@dataclass
class Token:
    """A token: its scope, and the organizations whose inventories it may administer."""

    scope: str = "write"
    organizations: frozenset[int] = frozenset({1})
    is_valid: bool = True


class FakeAwx:
    """One server: `async with FakeAwx() as awx`, then `awx.url`."""

    def __init__(self, prefix: str = "/api/v2") -> None:
        self.prefix = prefix.rstrip("/")
        self.tokens = {TOKEN: Token()}
        self.organizations = {1: "rolloutd"}
        self.projects: dict[int, Project] = {}
        self.templates: dict[int, Template] = {}
        self.inventories: dict[int, Inventory] = {}
        self.jobs = Jobs(Credential())
        self.requests: Counter[tuple[str, str]] = Counter()
        """Requests by method and path, with N in place of each number."""
        self.intercept: Intercept | None = None
        self.is_cut_off = False
        """Whether every connection is closed without an answer."""
        self.lost_answers = 0
        """How many of the next launches are committed without an answer."""
        self.late_commits = 0
        """How many of the next launches are committed only by commit_late()."""
        self._uncommitted: list[Callable[[], Job]] = []
        self._last_id = 10
        self.url = ""

    async def __aenter__(self) -> FakeAwx:
        application = web.Application(middlewares=[self._middleware])
        route = application.router.add_route
        for method, path, handler in (
            ("GET", "ping/", self._ping),
            ("GET", "me/", self._me),
            ("GET", "organizations/", self._list_organizations),
            ("GET", "projects/", self._list_projects),
            ("GET", "projects/{id}/", self._show_project),
            ("GET", "job_templates/", self._list_templates),
            ("GET", "job_templates/{id}/launch/", self._show_launch),
            ("POST", "job_templates/{id}/launch/", self._launch),
            ("GET", "inventories/", self._list_inventories),
            ("POST", "inventories/", self._add_inventory),
            ("DELETE", "inventories/{id}/", self._delete_inventory),
            ("GET", "inventories/{id}/hosts/", self._list_hosts),
            ("POST", "inventories/{id}/hosts/", self._add_host),
            ("POST", "inventories/{id}/groups/", self._add_group),
            ("POST", "groups/{id}/hosts/", self._add_to_group),
            ("PATCH", "hosts/{id}/", self._change_host),
            ("GET", "jobs/", self._list_jobs),
            ("GET", "jobs/{id}/", self._show_job),
            ("POST", "jobs/{id}/cancel/", self._cancel),
            ("GET", "jobs/{id}/job_events/", self._list_events),
        ):
            route(method, f"{self.prefix}/{path}", handler)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *_: object) -> None:
        # The nodes are this machine: what runs have there is in a directory of the host's interpreter.
        for host in (host for each in self.inventories.values() for host in each.hosts):
            path = Path(str(host.variables.get("ansible_python_interpreter", "")))
            if path.parent.name.startswith("rolloutd-run-"):
                shutil.rmtree(path.parent, ignore_errors=True)
        await self.jobs.close()
        await self._runner.cleanup()

    # -- what a test sets up

    def add_project(self, name: str, scm_url: str, checkout: Callable[[str], Path]) -> Project:
        project = Project(self._new_id(), name, scm_url, checkout)
        self.projects[project.id] = project
        return project

    def add_template(self, name: str, project: Project, playbook: str) -> Template:
        template = Template(self._new_id(), name, project, playbook)
        self.templates[template.id] = template
        return template

    def commit_late(self) -> list[Job]:
        """Commit the launches whose clients have gone."""
        waiting, self._uncommitted = self._uncommitted, []
        return [commit() for commit in waiting]

    def stored_text(self) -> str:
        """Return all that the server stores of inventories and jobs, as its users may read it."""
        shown = [[each.show(), [host.variables for host in each.hosts]] for each in self.inventories.values()]
        jobs = [[job.show(detail=True), job.events] for job in self.jobs.by_id.values()]
        return json.dumps([shown, jobs], default=str)

    # -- requests

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        words = [
            ("N" if word.isdecimal() else word) for word in request.path[len(self.prefix) + 1 :].split("/")
        ]
        self.requests[request.method, "/".join(words)] += 1
        if self.is_cut_off:
            return self._hang_up(request)
        if self.intercept is not None and (answer := await self.intercept(request)) is not None:
            return answer
        token = self.tokens.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if not request.path.endswith("/ping/"):
            if token is None or not token.is_valid:
                return _answer(401, detail="Authentication credentials were not provided.")
            if request.method not in ("GET", "OPTIONS") and token.scope != "write":
                return _answer(403, detail="You do not have permission to perform this action.")
        try:
            response: web.StreamResponse = await handler(request)
        except BadFilter as error:
            return _answer(error.status, detail=str(error))
        except web.HTTPNotFound:
            return _answer(404, detail="Not found.")
        response.headers["X-API-Product-Version"] = VERSION
        return response

    def _hang_up(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _ping(self, _: web.Request) -> web.Response:
        capacity = sum(job.status in ("waiting", "running") for job in self.jobs.by_id.values())
        groups = [{"name": "default", "capacity": self.jobs.capacity, "consumed_capacity": capacity}]
        return web.json_response({"version": VERSION, "ha": False, "instance_groups": groups})

    async def _me(self, request: web.Request) -> web.Response:
        return self._page(request, [{"id": 3, "username": "rolloutd", "is_superuser": False}])

    async def _list_organizations(self, request: web.Request) -> web.Response:
        return self._page(
            request, [{"id": number, "name": name} for number, name in self.organizations.items()]
        )

    async def _list_projects(self, request: web.Request) -> web.Response:
        return self._page(request, [each.show() for each in self.projects.values()])

    async def _show_project(self, request: web.Request) -> web.Response:
        return web.json_response(_get(self.projects, request).show())

    async def _list_templates(self, request: web.Request) -> web.Response:
        return self._page(request, [each.show() for each in self.templates.values()])

    async def _list_inventories(self, request: web.Request) -> web.Response:
        return self._page(request, [each.show() for each in self.inventories.values()])

    async def _list_jobs(self, request: web.Request) -> web.Response:
        return self._page(request, [each.show() for each in self.jobs.by_id.values()])

    async def _show_job(self, request: web.Request) -> web.Response:
        return web.json_response(_get(self.jobs.by_id, request).show(detail=True))

    async def _list_hosts(self, request: web.Request) -> web.Response:
        inventory = _get(self.inventories, request)
        return self._page(request, [each.show(inventory.id) for each in inventory.hosts])

    async def _add_inventory(self, request: web.Request) -> web.Response:
        body = await request.json()
        organization = body["organization"]
        if organization not in self._token(request).organizations:
            return _answer(403, detail="You do not have permission to perform this action.")
        if any(
            (each.name, each.organization) == (body["name"], organization)
            for each in self.inventories.values()
        ):
            text = "Inventory with this Name and Organization already exists."
            return _answer(400, __all__=[text])
        inventory = Inventory(
            self._new_id(),
            body["name"],
            organization,
            instant(time.time()),
            body.get("description", ""),
            body.get("variables", ""),
        )
        self.inventories[inventory.id] = inventory
        return web.json_response(inventory.show(), status=201)

    async def _delete_inventory(self, request: web.Request) -> web.Response:
        inventory = _get(self.inventories, request)
        active = [
            {"id": job.id, "type": "job"}
            for job in self.jobs.by_id.values()
            if job.inventory is inventory and job.status in ACTIVE
        ]
        if active:
            return _answer(409, error="Resource is being used by running jobs.", active_jobs=active)
        # The real server sets `pending_deletion`, and a task deletes it later.
        del self.inventories[inventory.id]
        for job in self.jobs.by_id.values():
            if job.inventory is inventory:
                job.inventory = None
        return web.Response(status=202)

    async def _add_host(self, request: web.Request) -> web.Response:
        inventory, body = _get(self.inventories, request), await request.json()
        if any(host.name == body["name"] for host in inventory.hosts):
            return _answer(400, __all__=["Host with this Name and Inventory already exists."])
        variables = json.loads(body.get("variables") or "{}")
        host = Host(self._new_id(), body["name"], variables, body.get("enabled", True))
        inventory.hosts.append(host)
        return web.json_response(host.show(inventory.id), status=201)

    async def _change_host(self, request: web.Request) -> web.Response:
        number = int(request.match_info["id"])
        for inventory in self.inventories.values():
            for host in inventory.hosts:
                if host.id == number:
                    host.enabled = (await request.json()).get("enabled", host.enabled)
                    return web.json_response(host.show(inventory.id))
        raise web.HTTPNotFound

    async def _add_group(self, request: web.Request) -> web.Response:
        inventory, body = _get(self.inventories, request), await request.json()
        if any(name == body["name"] for name, _ in inventory.groups.values()):
            return _answer(400, __all__=["Group with this Name and Inventory already exists."])
        number = self._new_id()
        inventory.groups[number] = (body["name"], [])
        return web.json_response({"id": number, "name": body["name"]}, status=201)

    async def _add_to_group(self, request: web.Request) -> web.Response:
        number, body = int(request.match_info["id"]), await request.json()
        for inventory in self.inventories.values():
            for host in inventory.hosts:
                if number in inventory.groups and host.id == body["id"]:
                    inventory.groups[number][1].append(host.name)
                    return web.Response(status=204)
        raise web.HTTPNotFound

    async def _show_launch(self, request: web.Request) -> web.Response:
        template = _get(self.templates, request)
        shown = {
            "can_start_without_user_input": not template.survey,
            "variables_needed_to_start": [f"'{name}' value missing" for name in template.survey],
            "passwords_needed_to_start": [],
            "survey_enabled": bool(template.survey),
        }
        return web.json_response({**shown, **template.show_asks()})

    async def _launch(self, request: web.Request) -> web.StreamResponse:
        template, body = _get(self.templates, request), await request.json()
        if not template.may_start:
            return _answer(403, detail="You do not have permission to perform this action.")
        if template.project.status != "successful" and not template.project.scm_update_on_launch:
            return _answer(
                400, resources_needed_to_start=["Missing a revision to run due to failed project update."]
            )
        inventory = self.inventories.get(body.get("inventory", 0))
        if "inventory" in template.asks and inventory is None:
            return _answer(400, inventory=[f'Invalid pk "{body.get("inventory")}" - object does not exist.'])

        def commit() -> Job:
            return self._commit(template, inventory, body)

        if self.late_commits:
            self.late_commits -= 1
            self._uncommitted.append(commit)
            return self._hang_up(request)
        job = commit()
        if self.lost_answers:
            self.lost_answers -= 1
            return self._hang_up(request)
        ignored = {
            name: body[name]
            for name in body
            if name in {FIELD_OF.get(ask, ask) for ask in ASK if ask not in template.asks}
        }
        shown = {"job": job.id, "ignored_fields": ignored, **job.show()}
        return web.json_response(shown, status=201)

    def _commit(self, template: Template, inventory: Inventory | None, body: dict[str, JSON]) -> Job:
        defaults: dict[str, JSON] = {
            "scm_branch": "",
            "extra_vars": {},
            "job_type": "run",
            "timeout": 0,
            "diff_mode": False,
            "limit": "",
        }
        asked = {FIELD_OF.get(name, name) for name in template.asks}
        fields = {
            name: body[name] if name in body and name in asked else value for name, value in defaults.items()
        }
        given = inventory if "inventory" in template.asks else None
        job = Job(self._new_id(), template, given, fields, instant(time.time()))
        self.jobs.add(job)
        return job

    async def _cancel(self, request: web.Request) -> web.Response:
        job = _get(self.jobs.by_id, request)
        if job.status not in ACTIVE:
            return _answer(405, detail='Method "POST" not allowed.')
        self.jobs.cancel(job)
        return web.Response(status=202)

    async def _list_events(self, request: web.Request) -> web.Response:
        job = _get(self.jobs.by_id, request)
        events = [
            each if "no_truncate" in request.query else {**each, "stdout": each["stdout"][:1024]}
            for each in job.events
        ]
        return self._page(request, events, default_order="start_line")

    # -- lists

    def _page(self, request: web.Request, records: list[JSON], default_order: str = "id") -> web.Response:
        query = request.query
        found = select(records, query.items(), self._resolve)
        order = query.get("order_by", default_order)
        found.sort(key=lambda each: each[order.lstrip("-")], reverse=order.startswith("-"))
        size = min(int(query.get("page_size", DEFAULT_PAGE_SIZE)), MAX_PAGE_SIZE)
        page = int(query.get("page", 1))
        if page > 1 and (page - 1) * size >= len(found):
            return _answer(404, detail="Invalid page.")
        following = None
        if page * size < len(found):
            following = f"{request.path}?{urlencode({**query, 'page': page + 1})}"
        shown = found[(page - 1) * size : page * size]
        return web.json_response({"count": len(found), "next": following, "previous": None, "results": shown})

    def _resolve(self, record: JSON, path: list[str]) -> JSON:
        if path[0] not in record:
            raise BadFilter(400, f"{record.get('type', 'object')} has no field named '{path[0]}'")
        value = record[path[0]]
        if len(path) == 1:
            return value
        related: dict[str, dict[int, JSON]] = {
            "inventory": self.inventories,
            "project": self.projects,
            "job_template": self.templates,
        }
        target = related[path[0]].get(value) if value is not None else None
        return None if target is None else self._resolve(target.show(), path[1:])

    def _token(self, request: web.Request) -> Token:
        return self.tokens[request.headers["Authorization"].removeprefix("Bearer ")]

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id


def _get(objects: dict[int, Any], request: web.Request) -> Any:
    with contextlib.suppress(KeyError, ValueError):
        return objects[int(request.match_info["id"])]
    raise web.HTTPNotFound


def _answer(status: int, **body: JSON) -> web.Response:
    return web.json_response(body, status=status)
