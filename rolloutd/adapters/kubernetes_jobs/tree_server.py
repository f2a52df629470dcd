"""Server of source trees: pods fetch a tree once, by a signed URL that names its content."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import hmac
import io
import logging
import ssl
import tarfile
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from rolloutd.concurrency import threads
from rolloutd.files.key_file import load_key
from rolloutd.ports import JSON
from rolloutd.service.listen_socket import bind_address

log = logging.getLogger(__name__)

VALID_S = 3600.0
"""How long a URL is valid: a pod waits for its place and its image, and then fetches at once."""

MAX_TREES = 8
"""Packed trees in memory; a rollout has one.  Another one is packed again when a pod asks for it."""


class TreeServer:
    """Trees by the hash of their packed content; a URL is valid for one tree and a time."""

    def __init__(self, params: Mapping[str, JSON], key_file: Path) -> None:
        self._params = params
        self._key = load_key(key_file)
        self._packed: OrderedDict[str, bytes] = OrderedDict()
        self._hashes: dict[Path, str] = {}
        self._trees: dict[str, Path] = {}
        self._runner: web.AppRunner | None = None
        self._lock = asyncio.Lock()
        self.address = ""

    async def publish(self, tree: Path) -> tuple[str, str]:
        """Return the URL and the hash of a packed tree, and listen from now on; raises CannotListen."""
        async with self._lock:
            if self._runner is None:
                await self._listen()
            await self._pack(tree)
        digest, until = self._hashes[tree], int(time.time() + VALID_S)
        base = str(self._params.get("url") or f"http://{self.address}").rstrip("/")
        return f"{base}/trees/{digest}?until={until}&signature={self._sign(digest, until)}", digest

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _pack(self, tree: Path) -> None:
        """Have a packed tree in memory, in the place of the one that was asked for the longest time ago."""
        if self._hashes.get(tree) in self._packed:
            self._packed.move_to_end(self._hashes[tree])
            return
        packed = await threads.FILES.run(_pack, tree)
        self._hashes[tree] = digest = hashlib.sha256(packed).hexdigest()
        self._packed[digest], self._trees[digest] = packed, tree
        while len(self._packed) > MAX_TREES:
            self._packed.popitem(last=False)

    async def _listen(self) -> None:
        application = web.Application()
        application.router.add_get("/trees/{digest}", self._serve)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        sock = bind_address(self._params["listen"], "trees.listen")
        self.address = "{}:{}".format(*sock.getsockname()[:2])
        context = None
        if self._params.get("cert"):
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._params["cert"], self._params["key"])
        await web.SockSite(self._runner, sock, ssl_context=context).start()
        log.info("source trees are served to pods at %s", self.address)

    async def _serve(self, request: web.Request) -> web.Response:
        digest, until = request.match_info["digest"], request.query.get("until", "")
        is_valid = until.isdecimal() and len(until) < 12 and int(until) >= time.time()
        signature = self._sign(digest, int(until)) if is_valid else ""
        given = request.query.get("signature", "").encode(errors="replace")
        if not is_valid or not hmac.compare_digest(signature.encode(), given):
            return web.Response(status=403, text="the URL is not valid, or not any more\n")
        async with self._lock:
            if (tree := self._trees.get(digest)) is not None:
                await self._pack(tree)
            packed = self._packed.get(digest)
        if packed is None:
            return web.Response(status=404, text="there is no such tree\n")
        return web.Response(body=packed, content_type="application/gzip")

    def _sign(self, digest: str, until: int) -> str:
        return hmac.new(self._key, f"{digest} {until}".encode(), hashlib.sha256).hexdigest()


def _pack(tree: Path) -> bytes:
    """Return a tree as an archive whose bytes depend on its content alone."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for path in sorted(tree.rglob("*")):
            archive.add(path, str(path.relative_to(tree)), recursive=False, filter=_anonymous)
    return buffer.getvalue()


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = 0
    return info
