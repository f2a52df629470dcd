"""Plain requests to an API server by a kubeconfig, made without any code of ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config.kube_config import load_kube_config

JSON = Any
STRATEGIC = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The server refused."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:300]}")
        self.status = status


class KubernetesApi:
    """An API server as one user sees it.

    `person` is the field manager of their writes, `user` whom they impersonate.
    """

    def __init__(self, kubeconfig: Path, person: str = "kubectl", user: str = "") -> None:
        self.person = person
        self.user = user
        self._kubeconfig = kubeconfig
        self._client: ApiClient | None = None

    async def open(self) -> None:
        """Read the kubeconfig."""
        configuration = Configuration()
        await load_kube_config(
            str(self._kubeconfig), client_configuration=configuration, persist_config=False
        )
        self._client = ApiClient(configuration)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def get(self, path: str, **query: str) -> JSON:
        """Read."""
        return await self._ask("GET", path, query)

    async def find(self, path: str) -> JSON:
        """Read; None where there is nothing."""
        try:
            return await self.get(path)
        except ApiError as said:
            if said.status != 404:
                raise
            return None

    async def post(self, path: str, body: JSON) -> JSON:
        """Create."""
        return await self._ask("POST", path, {"fieldManager": self.person}, body)

    async def patch(self, path: str, body: JSON) -> JSON:
        """Merge."""
        return await self._ask("PATCH", path, {"fieldManager": self.person}, body, STRATEGIC)

    async def merge(self, path: str, body: JSON) -> JSON:
        """Merge by RFC 7386, which kinds without merge keys need."""
        query = {"fieldManager": self.person}
        return await self._ask("PATCH", path, query, body, "application/merge-patch+json")

    async def apply(self, path: str, body: JSON) -> JSON:
        """Apply server-side."""
        query = {"fieldManager": self.person, "force": "true"}
        return await self._ask("PATCH", path, query, body, "application/apply-patch+yaml")

    async def delete(self, path: str, **options: JSON) -> None:
        """Delete; what is gone already is fine."""
        try:
            await self._ask("DELETE", path, {}, {"kind": "DeleteOptions", "apiVersion": "v1", **options})
        except ApiError as said:
            if said.status not in (404, 409):
                raise

    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[JSON]:
        """Yield the events of a list from a version on, until the server ends it."""
        query |= {"watch": "true", "resourceVersion": version, "timeoutSeconds": "120"}
        async with await self._answer("GET", path, query) as answer:
            async for line in answer.content:
                if line.strip():
                    yield json.loads(line)

    async def _ask(
        self, method: str, path: str, query: dict[str, str], body: JSON = None, kind: str = "application/json"
    ) -> JSON:
        async with await self._answer(method, path, query, body, kind) as answer:
            text = await answer.text()
            if answer.status >= 300:
                raise ApiError(answer.status, text)
            return json.loads(text)

    async def _answer(
        self, method: str, path: str, query: dict[str, str], body: JSON = None, kind: str = "application/json"
    ) -> aiohttp.ClientResponse:
        assert self._client is not None, "open() first"
        headers = {"Content-Type": kind, "Accept": "application/json", "User-Agent": self.person}
        if self.user:
            headers["Impersonate-User"] = self.user
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        return await self._client.rest_client.request(
            method,
            self._client.configuration.host + path,
            headers=headers,
            query_params=query,
            body=body,
            _preload_content=False,
            _request_timeout=150,
        )
