"""Source trees on their way to pods: what is cut is fetched again, what left the memory is packed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from rolloutd.adapters.kubernetes_jobs import pod, tree_server
from rolloutd.adapters.kubernetes_jobs.tree_server import TreeServer
from rolloutd.errors import AdapterFailed


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TreeServer]:
    opened = TreeServer({"listen": "127.0.0.1:0"}, tmp_path / "key")
    yield opened
    await opened.close()


def make_tree(directory: Path, name: str) -> Path:
    tree = directory / name
    tree.mkdir()
    (tree / "site.yml").write_text(f"# {name}\n")
    return tree


async def fetch(tmp_path: Path, url: str, digest: str, *, is_stopping: bool = False) -> str:
    """Return the playbook of a fetched tree."""
    spec = {"tree_url": url, "tree_sha256": digest}
    tree = await asyncio.to_thread(pod._fetch_tree, spec, tmp_path, tmp_path, lambda: is_stopping)
    return (tree / "site.yml").read_text()


async def test_cut_answer_is_fetched_again(
    server: TreeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "FETCH_PAUSE_S", 0.0)
    _, digest = await server.publish(make_tree(tmp_path, "one"))
    packed, asked = server._packed[digest], []

    async def serve(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        if len(asked) > 1:
            return web.Response(body=packed)
        # Without a length, as of a proxy, the end of the connection is the end of the answer.
        cut = web.StreamResponse()
        cut.force_close()
        await cut.prepare(request)
        await cut.write(packed[:-10])
        return cut

    application = web.Application()
    application.router.add_get("/", serve)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    assert await fetch(tmp_path, f"http://{host}:{port}/", digest) == "# one\n"
    await runner.cleanup()


async def test_tree_beyond_memory_is_packed_again(server: TreeServer, tmp_path: Path) -> None:
    """A pod waits for its place while nine rollouts begin."""
    url, digest = await server.publish(make_tree(tmp_path, "first"))
    for number in range(tree_server.MAX_TREES):
        await server.publish(make_tree(tmp_path, f"later-{number}"))
    assert await fetch(tmp_path, url, digest) == "# first\n"
    assert len(server._packed) == tree_server.MAX_TREES


async def test_cancelled_pod_begins_nothing(server: TreeServer, tmp_path: Path) -> None:
    url, digest = await server.publish(make_tree(tmp_path, "one"))
    with pytest.raises(AdapterFailed, match="cancelled"):
        await fetch(tmp_path, url, digest, is_stopping=True)
