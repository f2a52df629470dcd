"""Who asks, and what they may: tokens, and rules as in a ClusterRole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.fake_kubernetes.errors import ApiRefusal

JSON = Any
Rules = Sequence[Mapping[str, Sequence[str]]]
"""The `rules` of a ClusterRole: apiGroups, resources, verbs; a star is everything."""

ALL_RULES: Rules = ({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},)


class Access:
    """The tokens that the server knows, and their rules."""

    def __init__(self) -> None:
        self.tokens: dict[str, Rules] = {}
        self.anonymous: Rules | None = None
        """What those may who send no token at all, as kubectl where there is no TLS."""

    def rules_for(self, header: str | None) -> Rules:
        """Return the rules of whoever sent this header; raises a 401."""
        if header is None and self.anonymous is not None:
            return self.anonymous
        token = (header or "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise ApiRefusal(401, "Unauthorized")
        return self.tokens[token]


def allows(rules: Rules, verb: str, group: str, resource: str) -> bool:
    """Say whether the rules allow a verb; a subresource is written `pods/eviction`."""
    return any(
        _in(verb, rule["verbs"]) and _in(group, rule["apiGroups"]) and _in(resource, rule["resources"])
        for rule in rules
    )


def review(rules: Rules, body: JSON) -> JSON:
    """Answer a SelfSubjectAccessReview."""
    asked = body["spec"]["resourceAttributes"]
    part = f"/{asked['subresource']}" if asked.get("subresource") else ""
    granted = allows(rules, asked["verb"], asked.get("group", ""), asked["resource"] + part)
    return {**body, "status": {"allowed": granted, "reason": "" if granted else "no rule allows it"}}


def _in(value: str, allowed: Sequence[str]) -> bool:
    return "*" in allowed or value in allowed
