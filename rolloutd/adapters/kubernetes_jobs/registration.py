"""Registration of the runner of Kubernetes Jobs."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import model_validator

from rolloutd.plugin import ABSENT, Field, FilePath, Params, Registration
from rolloutd.plugin.addresses import ListenAddress
from rolloutd.plugin.field_types import InvalidValue, Namespace

Text = Annotated[str, Field(min_length=1, max_length=1000)]


class Trees(Params):
    """Where pods fetch the source tree of their run from the daemon."""

    listen: ListenAddress = Field(description="Address and port at which the daemon serves trees.")
    url: Text = Field(default=ABSENT, description="How pods reach it; `http://` and `listen` if not given.")
    cert: FilePath = Field(default=ABSENT, description="Certificate with its chain, PEM.")
    key: FilePath = Field(default=ABSENT, description="Its private key, PEM.")
    ca: FilePath = Field(
        default=ABSENT,
        description="Certificates of its authority, for pods; those of the image if not given.",
    )

    @model_validator(mode="after")
    def _require_pair(self) -> Self:
        if ("cert" in self.model_fields_set) != ("key" in self.model_fields_set):
            raise InvalidValue("a certificate and its key belong together", "`cert` and `key`, or neither")
        return self


class KubernetesRunnerParams(Params):
    """Playbooks run as Jobs of a Kubernetes cluster near the nodes."""

    kubeconfig: FilePath = Field(description="How the cluster is reached, as kubectl takes it.")
    context: Text = Field(
        default=ABSENT, description="Context of the kubeconfig; its current one if not given."
    )
    namespace: Namespace = Field(
        default="rolloutd-runs",
        description="Namespace of the Jobs, for rolloutd alone: who may create pods there reads its Secrets.",
    )
    image: Text = Field(description="Image with rolloutd and Ansible, by digest: that of the release.")
    python: Text = Field(
        default="/opt/rolloutd/bin/python", description="Python of the image that has rolloutd."
    )
    user: int = Field(default=ABSENT, ge=1, description="User id in the pod; the image's own if not given.")
    memory: Text = Field(default="512Mi", description="Memory of a pod, with its files.")
    trees: Trees = Field(description="Where pods fetch the source tree of their run from the daemon.")


RUNNER = Registration("rolloutd.adapters.kubernetes_jobs.runner:make_runner", KubernetesRunnerParams)
