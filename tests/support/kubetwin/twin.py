"""Starts and stops a twin, and hands out kubeconfigs for it."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from aiohttp import web

from tests.support.kubetwin.access import EVERYTHING, Access, Rules
from tests.support.kubetwin.controllers import Controllers
from tests.support.kubetwin.objects import Objects
from tests.support.kubetwin.server import Server

JSON = Any


class Twin:
    """One API server on a loopback port of its own; an async context manager.

    `silence_s`: a node whose kubelet has not written for so long becomes unknown.
    """

    def __init__(self, *, silence_s: float | None = None, delay_s: float = 0.01) -> None:
        self.objects = Objects()
        self.access = Access()
        self.server = Server(self.objects, self.access)
        self.controllers = Controllers(self.objects, delay_s=delay_s, silence_s=silence_s)
        self.admin_token = self.token()
        self.port = 0
        self.most_connections = 0
        self._runner: web.AppRunner | None = None
        self._work: asyncio.Task[None] | None = None
        self.server.interferences.append(self._count)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def token(self, rules: Rules = EVERYTHING) -> str:
        """Return a new token with these rights."""
        token = secrets.token_urlsafe(12)
        self.access.tokens[token] = rules
        return token

    def kubeconfig(self, path: Path, *, token: str | None = None) -> Path:
        """Write a kubeconfig with the context `twin`, for the admin or for another token."""
        user = {"token": self.admin_token if token is None else token}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "twin", "cluster": {"server": self.url}}],
            "users": [{"name": "somebody", "user": user}],
            "contexts": [{"name": "twin", "context": {"cluster": "twin", "user": "somebody"}}],
            "current-context": "twin",
        }
        path.write_text(yaml.safe_dump(document))
        return path

    async def __aenter__(self) -> Twin:
        await self.start()
        self._work = asyncio.create_task(self.controllers.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        assert self._work is not None
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)

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

    def _count(self, asked: object) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        self.most_connections = max(self.most_connections, len(self._runner.server.connections))
