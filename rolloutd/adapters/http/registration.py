"""Registration of the check `http`."""

from __future__ import annotations

from rolloutd.plugin import (
    ABSENT,
    CheckParams,
    Duration,
    Field,
    Params,
    PositiveDuration,
    Registration,
    TemplateText,
    duration_field,
)
from rolloutd.plugin.field_types import HttpUrl, Pattern


class TlsParams(Params):
    """How the server of an https URL is identified."""

    verify: bool = Field(
        default=True, description="Verify the certificate by the authorities of the daemon's machine."
    )
    server_name: TemplateText = Field(
        default=ABSENT,
        description="Name in the certificate, if the URL has an address; also sent as SNI.",
    )


class HttpCheckParams(CheckParams):
    """A URL answers with the expected status and body."""

    url: HttpUrl = Field(description="URL of a GET request, http or https; redirects are not followed.")
    status: int = Field(default=200, ge=100, le=599, description="Status of the response.")
    body: Pattern = Field(
        default=ABSENT,
        description="RE2 regular expression that matches the first 64 KiB of the body.",
    )
    tls: TlsParams = Field(default=TlsParams(), description="How the server is identified.")
    within: Duration = duration_field("0s", "How long the answer may take to become right; 0s asks once.")
    timeout: PositiveDuration = duration_field("10s", "Limit of one try.")


CHECK = Registration("rolloutd.adapters.http.check:HttpCheck", HttpCheckParams)
