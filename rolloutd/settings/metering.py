"""What the settings say of metrics: for this machine alone, as whoever reads them is not asked who he is."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, PlainValidator

from rolloutd.planfile.scalars import Unreadable, schema_of
from rolloutd.planfile.steps import Part
from rolloutd.settings.sources import read_path

PATHS: tuple[tuple[str, ...], ...] = (("metrics", "path"),)
"""Where paths stand."""

HIGHEST_PORT = 65_535


def _loopback(value: object) -> str | None:
    if value is None:
        return None
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    try:
        loopback = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback or not port.isdecimal() or not 0 < int(port) <= HIGHEST_PORT:
        raise Unreadable(
            "metrics are served on this machine alone",
            "a loopback address with a port, such as 127.0.0.1:9477 or [::1]:9477",
        )
    return str(value)


def _path_or_none(value: object) -> Path | None:
    return None if value is None else read_path(value)


Loopback = Annotated[str | None, PlainValidator(_loopback), schema_of(type=["string", "null"], minLength=1)]
SocketPath = Annotated[
    Path | None, PlainValidator(_path_or_none), schema_of(type=["string", "null"], minLength=1)
]


class Metrics(Part):
    """Where Prometheus may read metrics, on this machine alone; nowhere if nothing is said."""

    listen: Loopback = Field(default=None, description="Loopback address and port, such as 127.0.0.1:9477.")
    path: SocketPath = Field(default=None, description="Unix socket; its mode is 0660.")
