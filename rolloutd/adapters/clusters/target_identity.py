"""Identities of clusters by what their kubeconfigs reach, because a Secret may be of another cluster.

A kubeconfig from a Secret names no file and starts no program of this machine.
"""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from rolloutd.adapters.kubernetes.api_errors import (
    ApiError,
    ClusterUnreachable,
    malformed_answers,
    require_text,
)
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.ports import JSON

KUBE_SYSTEM = api_path("namespaces", "kube-system")
"""The namespace whose uid is a cluster's identity: it lasts as long as the cluster."""

ASKED_AT_ONCE = 20
"""Clusters that are asked at once: one that does not answer takes its connection's five seconds."""

REFRESH_LIMIT_S = 15.0
"""How long a refresh of the inventory waits for them; who is late is asked again at the next one."""

INLINE = {
    "cluster": {"server", "certificate-authority-data", "insecure-skip-tls-verify", "tls-server-name"},
    "user": {"client-certificate-data", "client-key-data", "token", "username", "password"},
}
"""Fields that a kubeconfig of a Secret may have: others name files and programs."""


class TargetIdentities:
    """The clusters that the kubeconfig Secrets of a management cluster reach, read again each time."""

    def __init__(self, management: Cluster) -> None:
        self._management = management
        self._slots = asyncio.Semaphore(ASKED_AT_ONCE)
        self._latest: dict[str, str] = {}

    async def read_all(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return the identities by `NAMESPACE/NAME`; a cluster that does not answer keeps its latest one."""
        asking = [asyncio.create_task(self._refresh(name)) for name in names]
        if asking:
            _, late = await asyncio.wait(asking, timeout=REFRESH_LIMIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return self._latest

    async def _refresh(self, name: str) -> None:
        try:
            async with self._slots:
                self._latest[name] = await self.read(name)
        except (ApiError, ClusterUnreachable):
            return  # a run of it waits, and says why

    async def read(self, name: str, secret: str = "") -> str:
        """Return the identity of what a Secret reaches now; raises ApiError, ClusterUnreachable."""
        namespace, _, cluster = name.partition("/")
        secret = secret or f"{cluster}-kubeconfig"
        found = await self._management.get(api_path("secrets", secret, namespace=namespace))
        with malformed_answers():
            text = base64.b64decode(found["data"]["value"]).decode()
            document = _parse_inline(f"secret {namespace}/{secret}", text)
        with tempfile.TemporaryDirectory(prefix="rolloutd-") as directory:
            with malformed_answers():
                _write_data(document, Path(directory))
            path = Path(directory) / "kubeconfig"
            path.touch(0o600)
            path.write_text(yaml.safe_dump(document))
            target = Cluster(cluster, path)
            try:
                return await read_identity(target)
            finally:
                await target.close()


async def read_identity(cluster: Cluster) -> str:
    """Return the uid of the cluster's namespace kube-system; raises ApiError, ClusterUnreachable."""
    found = await cluster.get(KUBE_SYSTEM)
    with malformed_answers():
        return require_text(found["metadata"]["uid"])


def _parse_inline(subject: str, text: str) -> JSON:
    """Return a kubeconfig; raises ApiError for one that names a file or a program."""
    try:
        document: JSON = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ApiError(422, "Invalid", f"{subject}: its kubeconfig is no YAML") from None
    for kind, allowed in INLINE.items():
        for each in document[f"{kind}s"]:
            if foreign := sorted(each[kind].keys() - allowed):
                raise ApiError(422, "Invalid", f"{subject}: {foreign[0]} is not taken from a kubeconfig")
    return document


def _write_data(document: JSON, directory: Path) -> None:
    """Put certificates and keys into files of the directory: the library would keep its own for ever."""
    for kind in INLINE:
        for number, each in enumerate(document[f"{kind}s"]):
            for name in [name for name in each[kind] if name.endswith("-data")]:
                path = directory / f"{kind}-{number}-{name}"
                path.touch(0o600)
                path.write_bytes(base64.b64decode(each[kind].pop(name)))
                each[kind][name.removesuffix("-data")] = str(path)
