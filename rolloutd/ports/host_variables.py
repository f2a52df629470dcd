"""Host variables that Ansible must take as text, never as a template.

They have the form that ansible-inventory prints: `{"__ansible_unsafe": TEXT}`, at any depth.  So a run's
inventory, the database and a merge of sources need no second list of what is trusted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from rolloutd.ports.types import JSON

UNSAFE_KEY = "__ansible_unsafe"
"""Ansible's key of a text that it does not render."""

MAX_DEPTH = 32
"""Nesting of a variable: far above what people write, far below what ends Python's recursion."""

GROUPS = "group_names"
"""Key of a connection with the node's groups, as Ansible names it; no variable of a run."""

IMPLICIT_GROUPS = frozenset({"all", "ungrouped"})
"""Groups that Ansible makes itself: a host of such a name would be taken for the group."""

ADDRESS_VARIABLES = ("ansible_host", "ansible_ssh_host")

_PORTS = frozenset({"ansible_port", "ansible_ssh_port"})
_USERS = frozenset({"ansible_user", "ansible_ssh_user"})
_PASSWORDS = frozenset(
    f"ansible_{name}" for name in ("password", "ssh_pass", "ssh_password", "become_pass", "become_password")
)

_IDS = frozenset({"provider_id", "machine_id", "cluster_id", "host_key"})
"""Variables that say which machine a node is; see ports/nodes.py."""

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,127}\$?")
"""A user of Linux, of a domain, or of a Windows domain."""

_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""A name of a group, which ansible-core before 2.19 would render as it does other texts."""

_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069]")

_RESERVED_PREFIX = "__ansible_"
"""Keys that Ansible's decoder reads as types, such as a vaulted value."""

_TYPE_KEYS = frozenset({UNSAFE_KEY, "__ansible_vault"})
"""Keys of which ansible-inventory prints a text each; it prints what a plugin gives under them too."""

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?"
)
"""A name of DNS; the underscore is not one of DNS, but names of machines have it."""

_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
"""An interface's name or number, as Linux limits it, behind the % of a link-local address."""


class InvalidVariable(ValueError):
    """A variable of a source that cannot reach Ansible; the text names the variable."""


def require_typed(variables: Mapping[str, JSON]) -> None:
    """Raise InvalidVariable for what a source that is not Ansible's own may not say of a connection.

    ssh takes an address that begins with `-` for an option, and other variables of Ansible name programs that
    it starts here.
    """
    for name in ADDRESS_VARIABLES:
        _require_address(name, variables.get(name))
    groups = variables.get(GROUPS, [])
    if not (isinstance(groups, list | tuple) and all(_GROUP.fullmatch(str(group)) for group in groups)):
        raise InvalidVariable(f"{GROUPS} {str(groups)[:60]!r} are not names of groups")
    for name, value in variables.items():
        if name in _PORTS and not _is_port(plain_value(value)):
            raise InvalidVariable(f"{name} {str(plain_value(value))[:60]!r} is not a port")
        if name in _USERS and not _USER.fullmatch(str(plain_value(value))):
            raise InvalidVariable(f"{name} {str(plain_value(value))[:60]!r} is not the name of a user")
        if name in _IDS:
            require_plain_text(name, str(plain_value(value)))
        if name.startswith("ansible_") and name not in {*ADDRESS_VARIABLES, *_PORTS, *_USERS, *_PASSWORDS}:
            raise InvalidVariable(f"{name[:60]} is for Ansible's own inventories")


def require_utf8(name: str, value: JSON) -> None:
    """Raise InvalidVariable for a text, or a key, that nothing can write."""
    texts = (name, *value) if isinstance(value, Mapping) else (name, value)
    try:
        "".join(text for text in texts if isinstance(text, str)).encode()
    except UnicodeEncodeError:
        raise InvalidVariable(f"{name[:60]!r} has a text that is not UTF-8") from None


def require_plain_text(name: str, text: str) -> None:
    """Raise InvalidVariable for a text with characters that control a terminal or its writing direction."""
    if found := _CONTROL.search(text):
        raise InvalidVariable(f"{name} has the control character {found[0]!r}")


def without_templates(variables: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the variables with each text marked as no template; raises InvalidVariable."""
    _require_free_names(variables)
    return {
        name: value if name == GROUPS else _marked(name, value, MAX_DEPTH)
        for name, value in variables.items()
    }


def require_readable(variables: Mapping[str, JSON]) -> None:
    """Raise InvalidVariable for what Ansible cannot read of an own source's variables.

    It would read all variables of the node in another way then, in which each text is a template.
    """
    for name in ADDRESS_VARIABLES:
        if unsafe_text(variables.get(name)) is not None:
            _require_address(name, variables[name])
    _require_free_names(variables)
    for name, value in variables.items():
        _require_readable(name, value, MAX_DEPTH)


def plain_variables(variables: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the variables as texts, for readers that render nothing."""
    return {name: plain_value(value) for name, value in variables.items()}


def plain_value(value: JSON) -> JSON:
    if isinstance(value, Mapping):
        text = unsafe_text(value)
        return {key: plain_value(each) for key, each in value.items()} if text is None else text
    return [plain_value(each) for each in value] if isinstance(value, list) else value


def unsafe_text(value: Any) -> str | None:
    """Return the text of a value that is marked as no template; None for every other value."""
    if isinstance(value, Mapping) and len(value) == 1:
        text = value.get(UNSAFE_KEY)
        return text if isinstance(text, str) else None
    return None


def marked_as(given: JSON, text: str) -> JSON:
    """Return a text that was made of a variable: no template if the variable is none."""
    return text if unsafe_text(given) is None else {UNSAFE_KEY: text}


def is_marked_form(variables: Mapping[str, JSON], marked: Mapping[str, JSON]) -> bool:
    """Return whether `marked` is what without_templates() makes of such variables, at less cost."""
    if len(variables) != len(marked):
        return False
    for name, value in variables.items():  # no generator: a fleet has a million variables
        if name not in marked:
            return False
        if not (value == marked[name] if name == GROUPS else _is_marked_form(value, marked[name])):
            return False
    return True


def _is_marked_form(value: JSON, marked: JSON) -> bool:
    """Return whether _marked() has made `marked` of such a value; no deeper than what it has made."""
    if isinstance(value, str):
        return unsafe_text(marked) == value
    if isinstance(value, list | tuple):
        if not isinstance(marked, list) or len(value) != len(marked):
            return False
        return all(map(_is_marked_form, value, marked))
    if not isinstance(value, Mapping):
        return bool(value == marked)
    if (text := unsafe_text(value)) is not None:
        return unsafe_text(marked) == text
    if not isinstance(marked, Mapping) or len(value) != len(marked):
        return False
    return all(key in marked and _is_marked_form(each, marked[key]) for key, each in value.items())


def _marked(name: str, value: JSON, depth: int) -> JSON:
    require_utf8(name, value)
    if depth == 0:
        raise InvalidVariable(f"{name} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return {UNSAFE_KEY: value}
    if isinstance(value, list | tuple):
        return [_marked(name, each, depth - 1) for each in value]
    if not isinstance(value, Mapping):
        _require_json(name, value)
        return value
    if (text := unsafe_text(value)) is not None:
        require_utf8(name, text)
        return value
    _require_text_keys(name, value)
    if reserved := [key for key in value if str(key).startswith(_RESERVED_PREFIX)]:
        raise InvalidVariable(f"{name} has the key {str(reserved[0])[:60]!r}, which Ansible reserves")
    return {key: _marked(name, each, depth - 1) for key, each in value.items()}


def _require_readable(name: str, value: JSON, depth: int) -> None:
    require_utf8(name, value)
    if depth == 0:
        raise InvalidVariable(f"{name} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list | tuple):
        for each in value:
            _require_readable(name, each, depth - 1)
    elif not isinstance(value, Mapping):
        _require_json(name, value)
    else:
        _require_text_keys(name, value)
        for key in _TYPE_KEYS & value.keys():
            if len(value) > 1 or not isinstance(value[key], str):
                raise InvalidVariable(f"{name} has the key {key!r}, which Ansible reserves")
        for each in value.values():
            _require_readable(name, each, depth - 1)


def _require_json(name: str, value: JSON) -> None:
    """Raise InvalidVariable for what neither a run's file nor the database can have, such as YAML's .nan."""
    if not (value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))):
        raise InvalidVariable(f"{name[:60]} {str(value)[:60]!r} is not a value of JSON")


def _require_text_keys(name: str, value: Mapping[JSON, JSON]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise InvalidVariable(f"{name[:60]} has the key {str(key)[:60]!r}, which is not a text")


def _require_free_names(variables: Mapping[str, JSON]) -> None:
    """Raise InvalidVariable for a variable's name by which Ansible would read all variables as one value."""
    if reserved := _TYPE_KEYS & variables.keys():
        raise InvalidVariable(f"a variable is named {min(reserved)!r}, which Ansible reserves")


def _is_port(value: JSON) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", str(value)) is not None and 0 < int(str(value)) < 65536


def _require_address(name: str, value: JSON) -> None:
    address = plain_value(value)
    if address is not None and not (isinstance(address, str) and _is_address(address)):
        raise InvalidVariable(f"{name} {str(address)[:60]!r} is not an IP address or a host name")


def _is_address(text: str) -> bool:
    _, has_zone, zone = text.partition("%")
    if has_zone and not _ZONE.fullmatch(zone):  # Python takes any text for one
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST_NAME.fullmatch(text) is not None
    return True
