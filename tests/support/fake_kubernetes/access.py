"""Who asks, and what they may: tokens, and rules as in a ClusterRole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.fake_kubernetes.errors import ApiRefusal
from tests.support.fake_kubernetes.objects import Objects, format_time

JSON = Any
Rules = Sequence[Mapping[str, Sequence[str]]]
"""The `rules` of a ClusterRole, and `namespaces` of a Role: apiGroups, resources, verbs; a star is all."""

ALL_RULES: Rules = ({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},)


@dataclass(frozen=True, slots=True)
class User:
    """Whom a token is of, for which audiences, and what they may."""

    name: str
    groups: Sequence[str] = ()
    audiences: Sequence[str] = ("rolloutd",)
    rules: Rules = ()


class Access:
    """The tokens that the server knows, and their rules."""

    def __init__(self, objects: Objects) -> None:
        self.tokens: dict[str, Rules] = {}
        self.service_accounts: dict[str, tuple[str, str, float]] = {}
        """Namespace, name and end of each token that a service account was given."""
        self.users: dict[str, User] = {}
        """The users of tokens that a TokenReview knows."""
        self._objects = objects
        self.anonymous: Rules | None = None
        """What those may who send no token at all, as kubectl where there is no TLS."""

    def rules_for(self, header: str | None) -> Rules:
        """Return the rules of whoever sent this header; raises a 401."""
        if header is None and self.anonymous is not None:
            return self.anonymous
        token = (header or "").removeprefix("Bearer ")
        namespace, name, until = self.service_accounts.get(token, ("", "", 0.0))
        if time.time() < until:
            return self._bound_rules("ServiceAccount", namespace, name)
        if token not in self.tokens:
            raise ApiRefusal(401, "Unauthorized")
        return self.tokens[token]

    def rules_of_user(self, name: str) -> Rules:
        """Return what a user may: by a token that a TokenReview knows, else by bindings."""
        known = next((user.rules for user in self.users.values() if user.name == name), None)
        return self._bound_rules("User", "", name) if known is None else known

    def issue_token(self, namespace: str, name: str, request: JSON) -> JSON:
        """Answer a TokenRequest for a service account."""
        self._objects.get("serviceaccounts", namespace, name)
        seconds = request["spec"].get("expirationSeconds") or 3600
        token = secrets.token_urlsafe(12)
        self.service_accounts[token] = (namespace, name, time.time() + seconds)
        return {**request, "status": {"token": token, "expirationTimestamp": format_time(seconds)}}

    def review_token(self, body: JSON) -> JSON:
        """Answer a TokenReview."""
        user = self.users.get(body["spec"]["token"])
        audiences = [] if user is None else [a for a in body["spec"]["audiences"] if a in user.audiences]
        if user is None or not audiences:
            return {**body, "status": {"authenticated": False, "error": "invalid bearer token"}}
        named = {"username": user.name, "uid": user.name, "groups": list(user.groups)}
        return {**body, "status": {"authenticated": True, "user": named, "audiences": audiences}}

    def review_subject(self, body: JSON) -> JSON:
        """Answer a SubjectAccessReview."""
        return review(self.rules_of_user(body["spec"]["user"]), body)

    def _bound_rules(self, kind: str, namespace: str, name: str) -> Rules:
        """Return what bindings give a subject: a service account, or a user without a namespace."""
        found: list[Mapping[str, Sequence[str]]] = []
        for binding in (*self._objects.all("clusterrolebindings"), *self._objects.all("rolebindings")):
            subjects = [
                (each["kind"], each.get("namespace", ""), each["name"]) for each in binding["subjects"]
            ]
            if (kind, namespace, name) not in subjects:
                continue
            within, ref = binding["metadata"].get("namespace", ""), binding["roleRef"]
            resource, place = ("roles", within) if ref["kind"] == "Role" else ("clusterroles", "")
            rules = self._objects.get(resource, place, ref["name"])["rules"]
            found += [{**rule, "namespaces": [within]} if within else rule for rule in rules]
        return found


def allows(rules: Rules, verb: str, group: str, resource: str, namespace: str = "") -> bool:
    """Say whether the rules allow a verb; a subresource is written `pods/eviction`."""
    return any(
        _in(verb, rule["verbs"])
        and _in(group, rule["apiGroups"])
        and _in(resource, rule["resources"])
        and _in(namespace, rule.get("namespaces", ["*"]))
        for rule in rules
    )


def review(rules: Rules, body: JSON) -> JSON:
    """Answer a SelfSubjectAccessReview."""
    asked = body["spec"]["resourceAttributes"]
    part = f"/{asked['subresource']}" if asked.get("subresource") else ""
    resource, within = asked["resource"] + part, asked.get("namespace", "")
    granted = allows(rules, asked["verb"], asked.get("group", ""), resource, within)
    return {**body, "status": {"allowed": granted, "reason": "" if granted else "no rule allows it"}}


def _in(value: str, allowed: Sequence[str]) -> bool:
    return "*" in allowed or value in allowed
