"""Factories of the NetBox adapters: a source and its webhook receiver share the changed objects."""

from __future__ import annotations

from typing import cast

from rolloutd.adapters.netbox.inventory import NetboxInventory
from rolloutd.adapters.netbox.webhook import WebhookReceiver
from rolloutd.ports import AdapterContext

ADAPTER_KIND = "netbox"


class NetboxSources:
    def __init__(self) -> None:
        self.by_name: dict[str, NetboxInventory] = {}

    async def close(self) -> None:
        """Do nothing: each refresh closes its own connections."""


def make_inventory(context: AdapterContext) -> NetboxInventory:
    sources = cast(NetboxSources, context.shared.setdefault(ADAPTER_KIND, NetboxSources()))
    return sources.by_name.setdefault(context.params["name"], NetboxInventory(context.params))


def make_watch(context: AdapterContext) -> WebhookReceiver:
    return WebhookReceiver(make_inventory(context), context.params.get("webhook"), context.clock)
