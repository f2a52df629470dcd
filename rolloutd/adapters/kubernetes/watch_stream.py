"""The answer to a watch: its events, and the end of its connection when the peer is gone."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Mapping

import aiohttp

from rolloutd.adapters.kubernetes.api_errors import check_object
from rolloutd.ports import JSON

KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Of a watch: a peer that is gone is noticed in 25 s, and until then its silence counts as no change."""


def probe_peer(answer: aiohttp.ClientResponse) -> None:
    """Let the kernel end the connection of an answer whose peer is gone, as behind a dropped NAT entry."""
    transport = None if answer.connection is None else answer.connection.transport
    if transport is not None:  # an answer that has ended already has none
        peer = transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            peer.setsockopt(socket.IPPROTO_TCP, option, value)


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, JSON]]:
    # One object a line; aiohttp limits a line, so an event without end is an error.
    async for line in response.content:
        if line.strip():
            event = json.loads(line)
            if not isinstance(event, dict) or "type" not in event:
                raise ValueError("a watch's line is not an event")
            check_object(event.get("object"))
            yield event
