"""Registration of the check `http`."""

from __future__ import annotations

from rolloutd import plugin
from rolloutd.plugin.field_types import HttpUrl, Pattern


class TlsParams(plugin.Params):
    """How the server of an https URL is identified."""

    verify: bool = plugin.Field(
        default=True, description="Verify the certificate by the authorities of the daemon's machine."
    )
    server_name: plugin.TemplateText = plugin.Field(
        default=plugin.ABSENT,
        description="Name in the certificate, if the URL has an address; also sent as SNI.",
    )


class HttpCheckParams(plugin.CheckParams):
    """A URL answers with the expected status and body."""

    url: HttpUrl = plugin.Field(
        description="URL of a GET request, http or https; redirects are not followed."
    )
    status: int = plugin.Field(default=200, ge=100, le=599, description="Status of the response.")
    body: Pattern = plugin.Field(
        default=plugin.ABSENT,
        description="RE2 regular expression that matches the first 64 KiB of the body.",
    )
    tls: TlsParams = plugin.Field(default=TlsParams(), description="How the server is identified.")
    within: plugin.Duration = plugin.duration_field(
        "0s", "How long the answer may take to become right; 0s asks once."
    )
    timeout: plugin.PositiveDuration = plugin.duration_field("10s", "Limit of one try.")


CHECK = plugin.Registration("rolloutd.adapters.http.check:HttpCheck", HttpCheckParams)
