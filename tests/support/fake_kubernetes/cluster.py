"""Starts and stops a fake, and hands out kubeconfigs for it."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from aiohttp import web

from tests.support.fake_kubernetes.access import ALL_RULES, Access, Rules
from tests.support.fake_kubernetes.controllers import Controllers
from tests.support.fake_kubernetes.objects import Objects
from tests.support.fake_kubernetes.server import Server

JSON = Any


class FakeKubernetes:
    """One API server on a loopback port of its own; an async context manager.

    `silence_s`: a node whose kubelet has not written for so long becomes unknown.
    """

    def __init__(self, *, heartbeat_timeout_s: float | None = None, delay_s: float = 0.01) -> None:
        self.objects = Objects()
        self.objects.create("namespaces", {"metadata": {"name": "default"}, "spec": {}})
        self.access = Access(self.objects)
        self.server = Server(self.objects, self.access)
        self.controllers = Controllers(self.objects, delay_s=delay_s, heartbeat_timeout_s=heartbeat_timeout_s)
        self.admin_token = self.token()
        self.port = 0
        self.max_connections = 0
        self._runner: web.AppRunner | None = None
        self._controller_task: asyncio.Task[None] | None = None
        self.server.interceptors.append(self._count_connections)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def token(self, rules: Rules = ALL_RULES) -> str:
        """Return a new token with these rights."""
        token = secrets.token_urlsafe(12)
        self.access.tokens[token] = rules
        return token

    def kubeconfig(self, path: Path, *, token: str | None = None) -> Path:
        """Write a kubeconfig with the context `fake`, for the admin or for another token."""
        user = {"token": self.admin_token if token is None else token}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "somebody", "user": user}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "somebody"}}],
            "current-context": "fake",
        }
        path.write_text(yaml.safe_dump(document))
        return path

    async def __aenter__(self) -> FakeKubernetes:
        await self.start()
        self._controller_task = asyncio.create_task(self.controllers.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        assert self._controller_task is not None
        self._controller_task.cancel()
        await asyncio.gather(self._controller_task, return_exceptions=True)

    async def start(self) -> None:
        """Listen, again on the same port after a stop."""
        self._runner = web.AppRunner(self.server.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Go away: connections are cut, the objects stay."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _count_connections(self, asked: object) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        self.max_connections = max(self.max_connections, len(self._runner.server.connections))
