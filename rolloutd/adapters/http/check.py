"""Check `http`: a GET request answers with the expected status and body.

It sends no cookie, password or proxy setting, and follows no redirect, so an answer cannot lead it to another
server.  The caller repeats the check until its deadline.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from functools import lru_cache

import aiohttp

from rolloutd.adapters.bounded_read import read_start
from rolloutd.concurrency import threads
from rolloutd.plugin.patterns import MAX_SEARCHED_CHARS, InvalidPattern, is_found
from rolloutd.ports import JSON, AdapterContext, Failed, Ok, StepContext, Unknown

MAX_TIMEOUT_S = 600.0
"""Limit of one try, whatever the plan says: a health page answers sooner."""

MAX_OUTPUT_CHARS = 2000
"""Characters of the body kept as evidence: an error page's title and message."""

HEADERS = {"User-Agent": "rolloutd", "Accept-Encoding": "identity"}
"""Without compression, so that the limit of the body is also the limit of memory."""


class HttpCheck:
    """ports.Check with the parameters `url`, `status`, `body`, `tls`."""

    def __init__(self, context: AdapterContext) -> None:
        self._clock = context.clock

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        request = f"{ctx.host.name}: GET {ctx.params['url']}"
        timeout_s = ctx.remaining_s(self._clock.now(), most=MAX_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await _get(str(ctx.params["url"]), ctx.params.get("tls") or {})
        except TimeoutError:
            return Failed(f"{request}: no answer within {timeout_s:.0f} s")
        except aiohttp.ClientConnectorDNSError as error:
            return Unknown(f"{request}: the name is not resolved: {error.strerror}")
        except aiohttp.ClientSSLError as error:
            return Failed(f"{request}: TLS: {error.os_error}")
        except aiohttp.ClientConnectorError as error:
            return Failed(f"{request}: cannot connect: {os.strerror(error.errno or 0)}")
        except aiohttp.InvalidURL:
            return Failed(f"{request}: this is not a URL; correct the template or the node's address")
        except (aiohttp.ClientError, OSError) as error:
            return Failed(f"{request}: {error or type(error).__name__}")
        # In a thread: the largest pattern needs seconds, and RE2 lets the event loop run meanwhile.
        mismatch = await threads.MATCHING.run(_find_mismatch, status, body, ctx.params)
        output = body[:MAX_OUTPUT_CHARS]
        if mismatch is not None:
            return Failed(f"{request}: {mismatch}", output=output)
        return Ok(f"{request} answered {status} as expected", output=output)


async def _get(url: str, tls: Mapping[str, JSON]) -> tuple[int, str]:
    """Return the status and the first part of the body."""
    connector = aiohttp.TCPConnector(ssl=_ssl_context(verify=bool(tls.get("verify", True))))
    async with (
        aiohttp.ClientSession(connector=connector, headers=HEADERS, auto_decompress=False) as session,
        session.get(
            url,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None),
            server_hostname=tls.get("server_name"),
        ) as response,
    ):
        body = await read_start(response.content, MAX_SEARCHED_CHARS)
        return response.status, body.decode("utf-8", "replace")


@lru_cache(maxsize=2)
def _ssl_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _find_mismatch(status: int, body: str, params: Mapping[str, JSON]) -> str | None:
    """Return the expected and the found answer if they differ, else None."""
    expected = int(params.get("status", 200))
    if status != expected:
        redirect = " (a redirect is not followed)" if 300 <= status < 400 else ""
        return f"expected status {expected}, found {status}{redirect}"
    pattern = params.get("body")
    try:
        if pattern is None or is_found(str(pattern), body):
            return None
    except InvalidPattern as error:
        return f"the pattern {pattern!r} is not a regular expression: {error}"
    return f"the body has no match of {pattern!r}"
