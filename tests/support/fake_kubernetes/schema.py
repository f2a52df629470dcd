"""Judges manifests by the published schema of the API, as a server with strict field validation does."""

from __future__ import annotations

import re
from typing import Any

from kubernetes_asyncio import client

from tests.support.fake_kubernetes.errors import ApiRefusal

JSON = Any

SCALARS = {"str": str, "int": int, "bool": bool, "float": (int, float)}
_CONTAINER = re.compile(r"^(list|dict)[\[(](?:str, )?(.+)[\])]$")


def validate_fields(kind: str, thing: JSON) -> None:
    """Raise a 400 for a field that the kind does not have or that it lacks."""
    _build(f"V1{kind}", thing, kind)


def _build(type_name: str, value: JSON, path: str) -> JSON:
    container = _CONTAINER.match(type_name)
    if container is not None:
        outer, inner = container.groups()
        _require(isinstance(value, list if outer == "list" else dict), f"{path}: not a {outer}")
        items = enumerate(value) if outer == "list" else value.items()
        return [_build(inner, item, f"{path}[{key}]") for key, item in items]
    model = getattr(client, type_name, None)
    if model is None:
        _require(isinstance(value, SCALARS.get(type_name, object)), f"{path}: not a {type_name}")
        return value
    _require(isinstance(value, dict), f"{path}: not an object")
    attributes = {name: attribute for attribute, name in model.attribute_map.items()}
    for name in value:
        _require(name in attributes, f'strict decoding error: unknown field "{path}.{name}"')
    types = model.openapi_types
    fields = {
        attributes[name]: _build(types[attributes[name]], item, f"{path}.{name}")
        for name, item in value.items()
        if item is not None
    }
    try:
        return model(**fields)
    except ValueError as error:
        raise ApiRefusal(400, f"{path}: {error}") from None


def _require(is_valid: bool, text: str) -> None:
    if not is_valid:
        raise ApiRefusal(400, text)
