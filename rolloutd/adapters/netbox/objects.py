"""Objects of NetBox, and the nodes made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rolloutd.adapters.netbox.registration import TEXT_PATHS
from rolloutd.errors import SourceFailed
from rolloutd.ports import JSON, MAX_LABEL_LENGTH, PROVIDER_ID, STATUS, DiscoveredNode

T = TypeVar("T")

MAX_SHOWN_CHARS = 60
"""Characters of an object's name that an error shows."""

CUSTOM_FIELDS, CONFIG_CONTEXT, TAGS = "custom_fields", "config_context", "tags"

OBJECT_TYPES = {"devices": "dcim.device", "virtual_machines": "virtualization.virtualmachine"}
"""What NetBox calls each kind of object in custom fields and webhooks."""

_KEY_OF_NESTED = {"rack": "name", "cluster": "name"}
"""What identifies a nested object to users; its slug unless it has none."""


class NoLabel(ValueError):
    """A value of an object is no label."""


@dataclass(frozen=True, slots=True)
class NetboxObject:
    """A device or a virtual machine: `values` has the fields of `TEXT_PATHS` that were read."""

    kind: str
    id: int
    name: str | None
    values: Mapping[str, str | None] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    custom_fields: Mapping[str, JSON] = field(default_factory=dict)
    config_context: Mapping[str, JSON] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mapper:
    """How objects become nodes: the labels by path, the preferred address, the path of the provider's id."""

    source: str
    labels: Mapping[str, str]
    address: str = "ipv4"
    provider_id: str | None = None

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self.labels.values()) | ({self.provider_id} if self.provider_id else set())

    @property
    def fields(self) -> frozenset[str]:
        """The fields of an object that are read, besides id, name and addresses."""
        return frozenset(path.partition(".")[0] for path in self.paths) | {STATUS}

    def to_nodes(self, objects: Iterable[NetboxObject]) -> tuple[list[DiscoveredNode], dict[str, str]]:
        """Return the nodes of named objects, and by name why some are left out.

        Raises SourceFailed if all are.
        """
        nodes: list[DiscoveredNode] = []
        left_out: dict[str, str] = {}
        for each in (each for each in objects if each.name):
            try:
                nodes.append(self.to_node(each))
            except NoLabel as error:
                left_out[str(each.name)] = f"{self.source}: {error}; name another field in `labels`"
        if left_out and not nodes:
            raise SourceFailed(next(iter(left_out.values())))
        return nodes, left_out

    def to_node(self, found: NetboxObject) -> DiscoveredNode:
        labels = {label: self._text(found, path) for label, path in self.labels.items()}
        connection: dict[str, JSON] = {STATUS: found.values[STATUS]}
        families = {"ipv4": ("ipv4", "ipv6"), "ipv6": ("ipv6", "ipv4")}.get(self.address, ())
        addresses = [found.addresses[family] for family in families if family in found.addresses]
        if addresses:
            connection["ansible_host"] = addresses[0]
        provider_id = self._text(found, self.provider_id) if self.provider_id else None
        if provider_id:
            connection[PROVIDER_ID] = provider_id
        present = {label: text for label, text in labels.items() if text is not None}
        own_id = f"{found.kind}/{found.id}"
        return DiscoveredNode(str(found.name), self.source, labels=present, connection=connection, id=own_id)

    def _text(self, found: NetboxObject, path: str) -> str | None:
        value = _value_at(found, path)
        match value:
            case None | "":
                return None
            case bool():
                return "true" if value else "false"
            case str() | int() | float() if len(str(value)) <= MAX_LABEL_LENGTH:
                return str(value)
        name = str(found.name)[:MAX_SHOWN_CHARS]
        raise NoLabel(f"{path} of {name} is not one text of at most {MAX_LABEL_LENGTH} characters")


def _value_at(found: NetboxObject, path: str) -> JSON:
    first, *keys = path.split(".")
    if first == TAGS:
        return True if ".".join(keys) in found.tags else None
    if first not in (CUSTOM_FIELDS, CONFIG_CONTEXT):
        return found.values.get(first)
    value: JSON = found.custom_fields if first == CUSTOM_FIELDS else found.config_context
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def from_rest(kind: str, record: Mapping[str, JSON], object_fields: frozenset[str]) -> NetboxObject:
    """Return an object of a list; a custom field of `object_fields` becomes its id."""
    custom = {
        name: _id_of(value) if name in object_fields else value
        for name, value in (record.get(CUSTOM_FIELDS) or {}).items()
    }
    values = {
        name: _nested(record.get(name), "value" if name == STATUS else _KEY_OF_NESTED.get(name, "slug"))
        for name in TEXT_PATHS
    }
    addresses = {
        family: str(address).partition("/")[0]
        for family, key in (("ipv4", "primary_ip4"), ("ipv6", "primary_ip6"))
        if (address := _nested(record.get(key), "address"))
    }
    return NetboxObject(
        kind,
        int(record["id"]),
        record["name"],
        values,
        frozenset(str(tag["slug"]) for tag in record.get(TAGS) or ()),
        custom,
        record.get(CONFIG_CONTEXT) or {},
        addresses,
    )


def kind_fields(kind: str, fields: Iterable[str]) -> list[str]:
    """Return those of the fields that this kind of object has, sorted."""
    missing = {"virtual_machines": {"rack", "device_type"}}.get(kind, set())
    return sorted(set(fields) - missing)


def read_shape(convert: Callable[[], T], source: str) -> T:
    """Return the converted answer; raises SourceFailed if it has not the shape of NetBox's."""
    try:
        return convert()
    # ArithmeticError: json reads `Infinity`, which has no whole number.
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise SourceFailed(
            f"{source}: its answer is not that of a NetBox ({type(error).__name__}); check `url`"
        ) from error


def _nested(value: JSON, key: str) -> str | None:
    return None if value is None else str(value[key])


def _id_of(value: JSON) -> JSON:
    if isinstance(value, list):
        return [_id_of(each) for each in value]
    return value["id"] if isinstance(value, Mapping) else value
