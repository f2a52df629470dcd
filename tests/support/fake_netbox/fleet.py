"""Invented devices, virtual machines and custom fields in the form of NetBox's REST answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

JSON = Any

SITES = ("oslo", "rome")
TENANTS = ("Orders", "Search", "Mail")
ROLES = ("frontend", "queue")
POOLS = ("red", "blue")
BOTH = ["dcim.device", "virtualization.virtualmachine"]


@dataclass
class Fleet:
    """Devices without a role of servers are not here: each record is one node unless a test changes it."""

    devices: list[dict[str, JSON]] = field(default_factory=list)
    machines: list[dict[str, JSON]] = field(default_factory=list)
    custom_fields: list[dict[str, JSON]] = field(default_factory=list)

    @classmethod
    def of(cls, devices: int, machines: int = 0) -> Fleet:
        """Return a fleet of this many devices and virtual machines; ids are not contiguous."""
        return cls(
            [device(2 * number + 1) for number in range(devices)],
            [machine(3 * number + 1) for number in range(machines)],
            [
                custom_field("pool", "select"),
                custom_field("wave", "integer"),
                custom_field("frozen", "boolean"),
                custom_field("groups", "multiselect"),
                custom_field("spare_site", "object"),
                custom_field("policy", "json"),
                custom_field("hidden", "text", filter_logic="disabled"),
                custom_field("bay", "text", object_types=["dcim.device"]),
                custom_field("note", "text"),
                custom_field("vendor", "text", filter_logic="exact"),
                custom_field("bought", "date"),
                custom_field("peers", "multiobject"),
            ],
        )


def custom_field(
    name: str, kind: str, *, object_types: list[str] | None = None, filter_logic: str = "loose"
) -> dict[str, JSON]:
    return {
        "id": sum(name.encode()),
        "name": name,
        "type": {"value": kind, "label": kind.title()},
        "object_types": BOTH if object_types is None else object_types,
        "filter_logic": {"value": filter_logic, "label": filter_logic.title()},
    }


def device(number: int) -> dict[str, JSON]:
    """Return a device; every fifth is a canary, every seventh has only IPv6, every eleventh no tenant."""
    return {
        **_common(number, f"metal-{number:05}"),
        "rack": {"id": number % 9 + 1, "url": "", "display": "", "name": f"Row {number % 9 + 1}"},
        "device_type": _nested(1, "Model X", "model-x"),
        "cluster": None,
    }


def machine(number: int) -> dict[str, JSON]:
    return {
        **_common(number, f"guest-{number:05}"),
        "cluster": {"id": 1, "url": "", "display": "", "name": "Cluster North"},
        "device": None,
    }


def _common(number: int, name: str) -> dict[str, JSON]:
    site, tenant = SITES[number % 2], TENANTS[number % 3]
    has_v4 = number % 7 != 0
    ipv4 = _address(number, f"10.{number // 65536 % 256}.{number // 256 % 256}.{number % 256}/24", 4)
    ipv6 = _address(number + 100_000, f"2001:db8:1::{number:x}/64", 6)
    return {
        "id": number,
        "url": f"http://netbox.invalid/api/objects/{number}/",
        "display": name,
        "name": name,
        "status": {"value": "active", "label": "Active"},
        "site": _nested(number % 2 + 1, site.title(), site),
        "tenant": None if number % 11 == 0 else _nested(number % 3 + 1, tenant, tenant.lower()),
        "role": _nested(number % 2 + 1, ROLES[number % 2].title(), ROLES[number % 2]),
        "platform": None if number % 4 == 0 else _nested(1, "Debian 13", "debian-13"),
        "primary_ip": ipv6,
        "primary_ip4": ipv4 if has_v4 else None,
        "primary_ip6": ipv6 if number % 2 or not has_v4 else None,
        "tags": [_nested(1, "Canary", "canary")] if number % 5 == 0 else [],
        "custom_fields": {
            "pool": POOLS[number % 2],
            "wave": number % 4,
            "frozen": number % 6 == 0,
            "groups": ["a", "b"] if number % 2 else ["b"],
            "spare_site": _nested(2, "Rome", "rome"),
            "policy": {"drain": {"limit": number % 3}},
            "hidden": "x",
            "bay": f"b{number % 5}",
            "note": "exempt from reboots" if number % 3 == 0 else "Exempt",
            "vendor": ("north", "south")[number % 2],
            "bought": f"2026-0{number % 8 + 1}-01",
            "peers": [_nested(number % 3 + 1, "Peer", "peer")],
        },
        "config_context": {"patching": {"window": f"day-{number % 7}"}},
        "last_updated": "2026-11-20T10:00:00.000000Z",
    }


def _nested(number: int, name: str, slug: str) -> dict[str, JSON]:
    return {"id": number, "url": "", "display": name, "name": name, "slug": slug, "description": ""}


def _address(number: int, address: str, family: int) -> dict[str, JSON]:
    return {"id": number, "url": "", "display": address, "family": {"value": family}, "address": address}
