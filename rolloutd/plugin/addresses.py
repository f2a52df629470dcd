"""Addresses to listen at, as values of settings."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import PlainValidator

from rolloutd.plugin.field_types import InvalidValue, with_json_schema

MAX_PORT = 65_535


def parse_loopback(value: object, problem: str) -> str:
    """Return a loopback address with a port, else raise InvalidValue with the given problem."""
    address = _split_address(value)
    if address is None or not address.is_loopback:
        raise InvalidValue(problem, "a loopback address with a port, such as 127.0.0.1:9477 or [::1]:9477")
    return str(value)


def parse_address(value: object) -> str:
    """Return an IP address with a port, else raise InvalidValue."""
    if _split_address(value) is None:
        raise InvalidValue("this is not an address to listen at", "an address and a port, as 192.0.2.7:9478")
    return str(value)


def _split_address(value: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address of ADDRESS:PORT, None if it is something else."""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= MAX_PORT:
        return None
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


ListenAddress = Annotated[str, PlainValidator(parse_address), with_json_schema(type="string", minLength=1)]
