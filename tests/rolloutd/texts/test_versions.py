"""What people call the content of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.texts.versions import version_of

COMMIT = "3f2a9c1d4b5e" + "0" * 28
DIGEST = "sha256:" + "9ab04c7e1122" + "f" * 52
BRANCH = {"kind": "git", "pin": COMMIT, "ref": "main", "ref_kind": "branch"}
TAG = {"kind": "git", "pin": COMMIT, "ref": "v1.4.2", "ref_kind": "tag"}
PLAYBOOK = {"playbook": "site.yml", "vars": {"version": "9", "app": {"digest": "x"}}, "timeout": 60}


@pytest.mark.parametrize(
    ("stage", "source", "text", "pin"),
    [
        (PLAYBOOK, BRANCH, "3f2a9c1d4b5e", COMMIT),
        (PLAYBOOK, TAG, "v1.4.2", COMMIT),
        (PLAYBOOK, {"kind": "tree", "pin": "e" * 64}, "e" * 12, "e" * 64),
        ({"flux": {"kustomization": "apps", "values": {"version": {"label": "x"}}}}, TAG, "v1.4.2", COMMIT),
        ({"flux": {"oci": {"url": "oci://r/apps", "digest": DIGEST}}}, TAG, "9ab04c7e1122", DIGEST),
        ({"flux": {"oci": {"digest": DIGEST, "version": "6.1.0"}}}, TAG, "6.1.0", DIGEST),
        ({"clusterapi": {"version": "v1.31.4"}}, BRANCH, "v1.31.4", "v1.31.4"),
        ({"clusterapi": {"version": "{{ node.labels.k8s }}"}}, TAG, "v1.4.2", COMMIT),
    ],
)
def test_version_is_what_people_call_it(stage: Any, source: Any, text: str, pin: str) -> None:
    assert version_of({"spec": {"maintain": [stage]}}, source) == (text, pin)
