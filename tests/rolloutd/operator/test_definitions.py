"""What an API server demands of the definitions and the policy, apart from their published schema.

A real one refuses a definition whose schema is not structural, or whose rules may cost too much.  Both are as
its documentation says (custom-resource-definitions, CEL in Kubernetes).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.rolloutd.operator.test_controller import DEPLOY

Schema = dict[str, Any]

DEFINITIONS = list(yaml.safe_load_all((DEPLOY / "crd.yaml").read_text()))
POLICY = next(
    each
    for each in yaml.safe_load_all((DEPLOY / "votes.yaml").read_text())
    if each["kind"] == "ValidatingAdmissionPolicy"
)

TYPES = {"object", "array", "string", "integer", "number", "boolean"}
COLUMN_TYPES = {"string": {"string"}, "integer": {"integer"}, "boolean": {"boolean"}, "date": {"string"}}
FORMATS = {"int32", "int64", "float", "double", "byte", "date", "date-time", "duration", "uuid"}
KEYWORDS = {
    *("type", "description", "properties", "required", "items", "enum", "format", "pattern", "default"),
    *("minLength", "maxLength", "maxItems", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    "x-kubernetes-validations",
}
"""Keywords of these schemas.  Any other, such as oneOf and nullable, has rules that are not checked here."""

BYTES_PER_CHARACTER = 4
MAX_RULE_COST = 10_000_000
"""Cost units of one rule by the server's estimate; comparing a text costs a tenth for each byte."""

CRD_FUNCTIONS = {"has"}
"""Functions of rules: Kubernetes 1.25 has them."""

POLICY_FUNCTIONS = {"group", "resource", "namespace", "name", "check", "allowed"}
"""Functions of the policy: the authorizer library of Kubernetes 1.30, in which policies became stable."""

REQUEST = {"request.operation", "request.userInfo.username", "request.namespace"}


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from nodes(below, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def schema_of(definition: Mapping[str, Any]) -> Schema:
    (version,) = definition["spec"]["versions"]
    found: Schema = version["schema"]["openAPIV3Schema"]
    return found


def problems(definition: Mapping[str, Any]) -> list[str]:
    """Return why a server would refuse the definition."""
    found = [f"{path}: {text}" for path, node in nodes(schema_of(definition)) for text in node_problems(node)]
    spec, names = definition["spec"], definition["spec"]["names"]
    if definition["metadata"]["name"] != f"{names['plural']}.{spec['group']}":
        found.append("metadata.name: not PLURAL.GROUP")
    for column in spec["versions"][0]["additionalPrinterColumns"]:
        if not column["jsonPath"].startswith(".metadata."):
            at = find(schema_of(definition), column["jsonPath"].lstrip("."))
            if at is None or at.get("type") not in COLUMN_TYPES[column["type"]]:
                found.append(f"column {column['name']}: no {column['type']} at {column['jsonPath']}")
    return found


def node_problems(node: Schema) -> Iterator[str]:
    kind, items = node.get("type"), node.get("items")
    if kind not in TYPES:
        yield "no type"
    if unknown := set(node) - KEYWORDS:
        yield f"keywords that are not checked: {sorted(unknown)}"
    if ("properties" in node and kind != "object") or (items is not None) != (kind == "array"):
        yield "properties of no object, or items of no array"
    if missing := set(node.get("required", ())) - set(node.get("properties", {})):
        yield f"required and without a schema: {sorted(missing)}"
    if node.get("format", "date") not in FORMATS:
        yield f"format {node['format']}: dropped by the server"
    if "pattern" in node and not re.fullmatch(r"\^[^(?]*\$", node["pattern"]):
        yield "pattern: neither anchored nor plain"
    if "default" in node:
        yield from default_problems(node)
    yield from list_problems(node)
    for rule in node.get("x-kubernetes-validations", ()):
        yield from rule_problems(node, rule)


def list_problems(node: Schema) -> Iterator[str]:
    is_list, items = node.get("type") == "array", node.get("items")
    list_type, keys = node.get("x-kubernetes-list-type"), node.get("x-kubernetes-list-map-keys")
    if list_type is not None and (not is_list or (keys is not None) != (list_type == "map")):
        yield "list-type and list-map-keys do not fit"
    for key in keys or ():
        key_type = items["properties"].get(key, {}).get("type") if items else None
        if key_type in (None, "object", "array") or key not in items["required"]:
            yield f"list-map-key {key}: not a required scalar"
    if is_list and "maxItems" not in node:
        yield "no maxItems"


def default_problems(node: Schema) -> Iterator[str]:
    import jsonschema  # its import takes a CPU second in each process that collects the tests

    try:
        jsonschema.validate(node["default"], node)
    except jsonschema.ValidationError as error:
        yield f"default: {error.message}"
    if node["type"] == "object" and set(node["default"]) - set(node["properties"]):
        yield "default: a field that would be pruned"


def rule_problems(node: Schema, rule: Mapping[str, str]) -> Iterator[str]:
    if set(rule) != {"rule", "message"} or not rule["rule"].strip() or "\n" in rule["message"]:
        yield "rule: a rule and a message of one line"
    if unknown := set(re.findall(r"(\w+)\(", rule["rule"])) - CRD_FUNCTIONS:
        yield f"rule: unknown functions {sorted(unknown)}"
    for path in re.findall(r"\b(?:self|oldSelf)\b((?:\.\w+)*)", rule["rule"]):
        below = find(node, path.lstrip("."))
        if below is None:
            yield f"rule: no field {path}"
        elif (cost := worst_size(below) / 10) > MAX_RULE_COST:
            yield f"rule: may cost {cost:.0f}"
    for path in re.findall(r"(?<!has\()\b(?:self|oldSelf)\.(\w+)", rule["rule"]):
        if path not in node.get("required", ()):
            yield f"rule: {path} is optional, and read without has()"


def find(schema: Schema, path: str) -> Schema | None:
    for name in filter(None, path.split(".")):
        schema = schema.get("properties", {}).get(name)
        if schema is None:
            return None
    return schema


def worst_size(node: Schema) -> float:
    """Return the most bytes of a value, infinity without a bound."""
    match node["type"]:
        case "string" if "enum" in node:
            return max(len(each) for each in node["enum"])
        case "string":
            return float(node.get("maxLength", math.inf)) * BYTES_PER_CHARACTER
        case "array":
            return float(node.get("maxItems", math.inf)) * worst_size(node["items"])
        case "object":
            return sum(len(name) + worst_size(below) for name, below in node["properties"].items())
        case _:
            return 20


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda each: each["spec"]["names"]["plural"])
def test_server_would_take_definition(definition: Mapping[str, Any]) -> None:
    assert problems(definition) == []


def _unbound(schema: Schema) -> None:
    del schema["properties"]["spec"]["properties"]["plan"]["maxLength"]


def _misspell(schema: Schema) -> None:
    schema["properties"]["spec"]["x-kubernetes-validations"][1]["rule"] = "has(self.plam)"


def _read_optional(schema: Schema) -> None:
    schema["properties"]["spec"]["x-kubernetes-validations"][1]["rule"] = "self.plan != ''"


def _untype(schema: Schema) -> None:
    del schema["properties"]["status"]["properties"]["state"]["type"]


def _prune(schema: Schema) -> None:
    schema["properties"]["status"]["default"] = {"seen": False}


def _loosen_key(schema: Schema) -> None:
    schema["properties"]["status"]["properties"]["conditions"]["items"]["required"].remove("type")


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (_unbound, "may cost inf"),
        (_misspell, "no field .plam"),
        (_read_optional, "without has"),
        (_untype, "no type"),
        (_prune, "would be pruned"),
        (_loosen_key, "not a required scalar"),
    ],
)
def test_planted_mistake_is_reported(plant: Callable[[Schema], None], problem: str) -> None:
    definition = copy.deepcopy(DEFINITIONS[0])
    plant(schema_of(definition))
    assert problem in "\n".join(problems(definition))


def test_policy_reads_fields_and_functions_that_exist() -> None:
    vote = schema_of(DEFINITIONS[1])
    assert set(POLICY["spec"]) == {"failurePolicy", "matchConstraints", "validations"}
    for validation in POLICY["spec"]["validations"]:
        assert set(validation) == {"expression", "message"}
        expression = re.sub(r"'[^']*'", "''", validation["expression"])
        assert set(re.findall(r"(\w+)\(", expression)) <= POLICY_FUNCTIONS
        assert set(re.findall(r"\brequest(?:\.\w+)+", expression)) <= REQUEST
        for path in re.findall(r"\b(?:object|oldObject)\.((?:\w+\.)*\w+)", expression):
            at = find(vote, path)
            assert at is not None, path
            # The schema is checked before policies are, so a required field is there.
            parent, _, name = path.rpartition(".")
            assert name in (find(vote, parent) or {})["required"], path


def test_policy_lets_metadata_of_vote_change() -> None:
    # Who deletes in the foreground makes the garbage collector update the vote, to remove a finalizer.
    first, *others = [each["expression"] for each in POLICY["spec"]["validations"]]
    assert first == "request.operation == 'CREATE' || object.spec == oldObject.spec"
    assert [each.startswith("request.operation != 'CREATE' || ") for each in others] == [True, True]
