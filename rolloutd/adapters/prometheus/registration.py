"""Registrations of the adapters of Prometheus."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from rolloutd.plugin import (
    ABSENT,
    CheckParams,
    Duration,
    Field,
    FilePath,
    Params,
    PositiveDuration,
    Registration,
    SettingsSection,
    TemplateText,
    duration_field,
)
from rolloutd.plugin.field_types import InvalidValue, ShortName

COMPARISON = r"^(==|!=|>=|<=|>|<) *-?[0-9]+(\.[0-9]+)?$"


def _require_http_url(text: str) -> str:
    scheme, _, rest = text.partition("://")
    if scheme not in ("http", "https") or not rest or "@" in rest or "?" in rest:
        raise InvalidValue(
            "this is not the address of a Prometheus", "https://HOST[:PORT][/PREFIX], without a password"
        )
    return text.rstrip("/")


class ServerParams(Params):
    """One Prometheus, or a server with its query API."""

    url: Annotated[str, Field(max_length=1000), AfterValidator(_require_http_url)] = Field(
        description="Address, such as https://prometheus.example; `/api/v1/query` is added."
    )
    token_file: FilePath = Field(
        default=ABSENT, description="File with a bearer token; only the daemon reads it, at each query."
    )


class QueryParams(Params):
    """An instant query whose result is one number."""

    query: TemplateText = Field(
        description="Instant query with one result; filled in for each node. An empty result is unknown."
    )
    server: ShortName = Field(
        default=ABSENT, description="Server of the settings; the only one there if not given."
    )


class PrometheusProbeParams(QueryParams):
    """A metric is traffic: a result greater than `max` makes the node busy."""

    max: float = Field(default=0.0, ge=0, strict=False, description="Greatest result that counts as idle.")
    timeout: PositiveDuration = duration_field("10s", "Limit of one probe; after it the result is unknown.")


class PrometheusCheckParams(QueryParams, CheckParams):
    """A metric is within its limit, or not worse than before the change."""

    exclusive = ("ratio", "difference")

    max: float = Field(default=ABSENT, strict=False, description="Greatest result that passes in any case.")
    ratio: float = Field(
        default=ABSENT,
        gt=0,
        strict=False,
        description="Above `max`: greatest result, as a multiple of that before the isolation.",
    )
    difference: float = Field(
        default=ABSENT,
        ge=0,
        strict=False,
        description="Above `max`: how much greater than before the isolation the result may be.",
    )
    inconclusive: Literal["fail", "pass"] = Field(
        default="fail", description="What a query means that has no result until its limit."
    )
    within: Duration = duration_field("1m", "How long the result may take to become right.")
    timeout: PositiveDuration = duration_field("10s", "Limit of one query.")

    @model_validator(mode="after")
    def _require_limit(self) -> PrometheusCheckParams:
        given = self.model_fields_set
        compares = not given.isdisjoint(self.exclusive)
        if "max" not in given and not compares:
            raise InvalidValue("the check has no limit", "max, ratio or difference")
        if compares and not self.baseline:
            raise InvalidValue("a comparison needs the value before", "`baseline: true` on the same item")
        return self


class PrometheusObserverParams(QueryParams):
    """Sees a node as up or down as the monitoring does."""

    up: Annotated[str, Field(max_length=40, pattern=COMPARISON)] = Field(
        default="== 1", description="The result of a node that is up, such as `== 1` or `> 0`."
    )


PROBE = Registration("rolloutd.adapters.prometheus.check:PrometheusTrafficProbe", PrometheusProbeParams)
OBSERVER = Registration("rolloutd.adapters.prometheus.observer:PrometheusObserver", PrometheusObserverParams)
SETTINGS = SettingsSection(ServerParams, "Prometheus servers by name, which plans and observers query.")
CHECK = Registration("rolloutd.adapters.prometheus.check:PrometheusCheck", PrometheusCheckParams)
