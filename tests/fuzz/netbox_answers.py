"""Fuzz targets of what NetBox sends: the pages of its lists, and its webhooks."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rolloutd.adapters.netbox import custom_fields, rest
from rolloutd.adapters.netbox.http import NetboxSession
from rolloutd.adapters.netbox.objects import Mapper, from_rest, read_shape
from rolloutd.adapters.netbox.webhook import Refused, read_message
from rolloutd.errors import SourceFailed
from tests.fuzz.engine import encoded
from tests.support.fake_netbox import Fleet

SECRET = b"fuzz-fuzz-fuzz-fuzz"

LABELS = {
    "team": "tenant",
    "rack": "rack",
    "canary": "tags.canary",
    "pool": "custom_fields.pool",
    "window": "config_context.patching.window",
}

_FLEET = Fleet.of(2)

NETBOX_PAGES = encoded(
    {"count": 2, "next": None, "results": _FLEET.devices},
    {"count": 8, "next": None, "results": _FLEET.custom_fields},
)

NETBOX_MESSAGES = encoded(
    {
        "event": "updated",
        "timestamp": "2026-11-20T19:38:15.231699+00:00",
        "object_type": "dcim.device",
        "request_id": "1",
        "data": {"id": 1},
    }
)


class _Answer:
    """A session that answers every request with one page."""

    source = "netbox/fuzz"

    def __init__(self, page: Any) -> None:
        self._page = page

    def get_page(
        self, path: str, filters: Mapping[str, Any], limit: int, offset: int
    ) -> tuple[Any, Sequence[Any]]:
        return self._page["count"], list(self._page["results"])

    def error(self, problem: str, remedy: str) -> SourceFailed:
        return SourceFailed(f"{self.source}: {problem}; {remedy}")


def read_netbox_page(data: bytes, _: Path) -> None:
    try:
        session = cast(NetboxSession, _Answer(json.loads(data)))
    except (ValueError, RecursionError):
        return
    mapper = Mapper(session.source, LABELS)
    with contextlib.suppress(SourceFailed):
        records = rest.read_page(session, "/", {}).records
        found = read_shape(lambda: [from_rest("devices", each, frozenset()) for each in records], "netbox")
        mapper.to_nodes(found)
    with contextlib.suppress(SourceFailed):
        custom_fields.read_custom_fields(session)


def read_netbox_message(data: bytes, _: Path) -> None:
    with contextlib.suppress(Refused):
        read_message(data, hmac.new(SECRET, data, hashlib.sha512).hexdigest(), SECRET)
