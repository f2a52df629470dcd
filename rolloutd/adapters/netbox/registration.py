"""Registrations of the NetBox inventory and its webhook receiver.

The server ignores a filter name that it does not know and answers with all objects, so only names that were
tried on a real server are allowed.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, PlainValidator, model_validator

from rolloutd.plugin import ABSENT, Field, FilePath, LabelKey, Params, Registration
from rolloutd.plugin.addresses import parse_loopback
from rolloutd.plugin.field_types import MAX_ITEMS, InvalidValue, ShortName, with_json_schema

_COMMON_FILTERS = frozenset(
    (
        *("tag", "tag__n", "tenant", "tenant__n", "tenant_group", "role", "role__n", "site", "site__n"),
        *("status", "status__n", "platform", "platform__n", "cluster_id", "id", "q", "last_updated__gte"),
        *("name", "name__n", "name__ic", "name__ie", "name__isw"),
        *("has_primary_ip", "primary_ip4", "primary_ip4_id"),
    )
)
FILTERS: dict[str, frozenset[str]] = {
    "devices": _COMMON_FILTERS | {"device_type", "manufacturer", "rack_id"},
    "virtual_machines": _COMMON_FILTERS | {"cluster", "cluster_type"},
}
"""Filter names that the server knows, by kind of object."""

BOOLEAN_FILTERS = frozenset({"has_primary_ip"})

CUSTOM_FILTER = re.compile(r"cf_((?:[a-z0-9]|_(?!_))+)(__(?:n|lt|lte|gt|gte|ic|ie|isw))?", re.ASCII)
"""A filter on a custom field: its name and lookup, which are checked against the server."""

TEXT_PATHS = ("tenant", "site", "rack", "role", "platform", "status", "cluster", "device_type")
"""Fields of an object that are one text: a slug, a name or a status."""

_LABEL_PATH = re.compile(
    rf"(?:{'|'.join(TEXT_PATHS)})|tags\.[-\w]+|(?:custom_fields|config_context)(?:\.[-\w]+)+", re.ASCII
)


def _require_server_url(text: str) -> str:
    scheme, _, rest = text.partition("://")
    is_api = text.rstrip("/").endswith(("/api", "/graphql"))
    if scheme not in ("http", "https") or not rest.strip("/") or set("@?# ") & set(rest) or is_api:
        raise InvalidValue(
            "this is not the address of a NetBox", "https://HOST[:PORT][/PREFIX], without /api and password"
        )
    return text.rstrip("/")


def _require_filter_name(name: str) -> str:
    if CUSTOM_FILTER.fullmatch(name) or any(name in names for names in FILTERS.values()):
        return name
    known = sorted(set().union(*FILTERS.values()))
    raise InvalidValue(
        "NetBox ignores an unknown filter and answers with everything", f"cf_NAME, {', '.join(known)}"
    )


def _require_label_path(path: str) -> str:
    if _LABEL_PATH.fullmatch(path):
        return path
    raise InvalidValue(
        "this is not a field of NetBox that can be a label",
        f"{', '.join(TEXT_PATHS)}, tags.SLUG, custom_fields.NAME or config_context.KEY, with dots for keys"
        " in them",
    )


ServerUrl = Annotated[str, Field(max_length=1000), AfterValidator(_require_server_url)]
FilterName = Annotated[str, Field(max_length=100), AfterValidator(_require_filter_name)]
FieldPath = Annotated[str, Field(max_length=200), AfterValidator(_require_label_path)]
FilterText = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S")]
FilterValue = FilterText | bool | int | Annotated[list[FilterText | int], Field(min_length=1, max_length=200)]
Loopback = Annotated[
    str,
    PlainValidator(
        lambda value: parse_loopback(
            value, "webhooks are received on this machine alone; let a proxy forward them"
        )
    ),
    with_json_schema(type="string", minLength=1),
]


class NetboxWebhookParams(Params):
    """Where NetBox's webhooks arrive; each only causes an earlier refresh."""

    exclusive = ("listen", "path")

    secret_file: FilePath = Field(
        description="File with the webhook's secret; a message without a valid signature is refused."
    )
    listen: Loopback = Field(
        default=ABSENT, description="Loopback address and port, such as 127.0.0.1:9478; or `path`."
    )
    path: FilePath = Field(default=ABSENT, description="Unix socket for a proxy; its mode is 0660.")
    group: ShortName = Field(
        default=ABSENT,
        description="Group of the proxy, which may connect to `path`; it gives no other right.",
    )

    @model_validator(mode="after")
    def _require_address(self) -> Self:
        given = self.model_fields_set
        if given.isdisjoint(self.exclusive):
            raise InvalidValue("the receiver has no address", "`listen` or `path`")
        if "group" in given and "path" not in given:
            raise InvalidValue("there is no Unix socket for the group", "`path` too", at=("group",))
        return self


class NetboxInventoryParams(Params):
    """Nodes from NetBox: devices, virtual machines or both."""

    name: ShortName = Field(default="netbox", description="Name of this source in rolloutd; unique.")
    url: ServerUrl = Field(description="Address of NetBox, such as https://netbox.example, without /api.")
    token_file: FilePath = Field(
        description="File with an API token, v1 or v2, that may only read; read at each refresh."
    )
    ca_file: FilePath = Field(
        default=ABSENT,
        description="Authorities of the server's certificate (PEM); those of the daemon's machine if not"
        " given.",
    )
    objects: Annotated[list[Literal["devices", "virtual_machines"]], Field(min_length=1, max_length=2)] = (
        Field(default=["devices", "virtual_machines"], description="Kinds of objects that are nodes.")
    )
    filter: dict[FilterName, FilterValue] = Field(
        default={"status": "active"},
        max_length=MAX_ITEMS,
        description="NetBox's own filters, for all kinds. A list means any of its values, but all of them"
        " for `tag`.",
        json_schema_extra={"default": {"status": "active"}},
    )
    labels: dict[LabelKey, FieldPath] = Field(
        default={path: path for path in ("site", "rack", "role", "platform", "status")} | {"team": "tenant"},
        max_length=MAX_ITEMS,
        description="Labels of the fleet, each with the field that gives its value: `tenant`, `site`, `rack`,"
        " `role`, `platform`, `status`, `cluster`, `device_type`, `tags.SLUG`, `custom_fields.NAME` or"
        " `config_context.KEY`, with dots for keys in them.",
    )
    address: Literal["ipv4", "ipv6", "none"] = Field(
        default="ipv4",
        description="The primary address that becomes `ansible_host`; the other family if there is only"
        " that. An earlier source's own value wins.",
    )
    provider_id: FieldPath = Field(
        default=ABSENT,
        description="Field with the cloud's id of the node, by which sources recognise the same node.",
    )
    webhook: NetboxWebhookParams = Field(
        default=ABSENT, description="Receiver of webhooks, which cause an earlier refresh; none by default."
    )

    @model_validator(mode="after")
    def _require_boolean(self) -> Self:
        for name in BOOLEAN_FILTERS & self.filter.keys():
            if not isinstance(self.filter[name], bool) and self.filter[name] not in ("true", "false"):
                raise InvalidValue(
                    f"{name} is true or false, and NetBox ignores any other value", "true, false"
                )
        return self

    @model_validator(mode="after")
    def _require_filters_of_all_objects(self) -> Self:
        for name in self.filter:
            for kind in self.objects:
                if not CUSTOM_FILTER.fullmatch(name) and name not in FILTERS[kind]:
                    raise InvalidValue(
                        f"{kind} have no filter {name}, and NetBox would answer with all of them",
                        f"`objects` without {kind}, or another filter",
                    )
        return self


INVENTORY = Registration("rolloutd.adapters.netbox.factory:make_inventory", NetboxInventoryParams)
WATCH = Registration("rolloutd.adapters.netbox.factory:make_watch")
