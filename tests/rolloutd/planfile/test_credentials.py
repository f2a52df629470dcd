"""URLs of plans: a password or a token in one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from rolloutd import planfile
from rolloutd.configuration.secret_variables import storable_variables
from rolloutd.errors import InvalidFile
from rolloutd.plugin import field_types
from rolloutd.ports import WITHHELD
from rolloutd.settings import load
from rolloutd.texts.secret_urls import has_secret, without_secret
from tests.rolloutd.control_environment import PLAN, URL

TOKEN = "16C7e42F292c6912E7"


@pytest.mark.parametrize(
    "url",
    [
        f"https://{TOKEN}@git.example/r.git",
        f"HTTPS://{TOKEN}@git.example/r.git",
        f"https://x:{TOKEN}@git.example/r.git",
        f"https://:{TOKEN}@git.example/r.git",
        f"ssh://git:{TOKEN}@git.example/r.git",
        f"https://@{TOKEN}@git.example/r.git",
        f"https://ops:a/{TOKEN}@git.example/r.git",
        f"https://ops%3A{TOKEN}%40git.example/r.git",
        f"git://{TOKEN}@git.example/r.git",
        f"https://git.example/r.git#access_token={TOKEN}",
        f"https://git.example/r.git?%74oken={TOKEN}",
        f"https://git.example/ghp_{TOKEN}/r.git",
        f"https://git.example/r.git?glpat-{TOKEN}",
        f"ghp_{TOKEN}@git.example:r.git",
    ],
)
def test_url_with_credentials_is_refused(url: str) -> None:
    kinds = (
        [field_types.GitUrl, field_types.HttpUrl] if url.lower().startswith("http") else [field_types.GitUrl]
    )
    for kind in kinds:
        with pytest.raises(ValidationError, match="does not belong in a plan"):
            TypeAdapter(kind).validate_python(url)
    assert TOKEN not in without_secret(url) or "://" not in url
    assert "://" not in url or storable_variables({"mirror": url}).keys() == {WITHHELD}


QUERIES = [
    f"token={TOKEN}",
    f"a=1&private_token={TOKEN}",
    f"X-Amz-Signature={TOKEN}",
    f"apikey={TOKEN}#x",
    f"sig={TOKEN}",
    f"a=1;auth={TOKEN}",
]


@pytest.mark.parametrize("query", QUERIES)
def test_url_with_credentials_in_query_is_refused(query: str) -> None:
    with pytest.raises(ValidationError, match="does not belong in a plan"):
        TypeAdapter(field_types.HttpUrl).validate_python(f"https://mirror.example/app.tar?{query}")
    kept = storable_variables({"mirror": f"https://mirror.example/app.tar?{query}", "n": 1})
    assert kept.keys() == {"n", WITHHELD}


@pytest.mark.parametrize(
    "query", ["page=1", "token={{ vars.t }}", "tokens", "q=a#token", "author=x", "a=@b:c"]
)
def test_url_without_credentials_in_query_is_accepted(query: str) -> None:
    url = f"https://mirror.example/app.tar?{query}"
    assert TypeAdapter(field_types.HttpUrl).validate_python(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "https://git.example/r.git",
        "https://git.example:8443/@scope/r.git",
        "https://[2001:db8::1]:8443/@scope/r.git",
        "ssh://git@git.example/r.git",
        "ssh://git@git.example:2222/r.git",
        "git@git.example:r.git",
    ],
)
def test_url_without_credentials_is_accepted(url: str) -> None:
    assert TypeAdapter(field_types.GitUrl).validate_python(url) == url


@pytest.mark.parametrize(
    "text",
    ["://", "://x:", "://?token", "eyJ", "a://@", "?a=", "%25"],
    ids=lambda text: text.replace("/", ""),
)
def test_long_text_is_examined_in_linear_time(text: str) -> None:
    has_secret(text * 200_000)  # in quadratic time it would take hours


@pytest.mark.parametrize("kind", ["git", "http"])
def test_diagnostic_does_not_repeat_the_secret(kind: str) -> None:
    url = f"https://ops:{TOKEN}@git.example/r.git"
    text = PLAN.replace(URL, url)
    if kind == "http":
        text = PLAN.replace("reachable: {}", f"http: {{url: '{url}'}}")
    with pytest.raises(InvalidFile) as invalid:
        planfile.read(text.encode(), "plan.yaml")
    assert "does not belong in a plan" in str(invalid.value.diagnostics)
    assert TOKEN not in str(invalid.value) + str(invalid.value.diagnostics)


@pytest.mark.parametrize(
    "settings",
    [
        {"prometheus": {"main": {"url": "URL"}}},
        {"inventory": {"sources": [{"netbox": {"url": "URL", "token_file": "/t"}}]}},
        {"inventories": "URL"},
        {"socket": {"url": "URL"}},
    ],
    ids=str,
)
def test_mistake_in_settings_shows_no_secret(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A reload shows it to all users, as a condition of the daemon."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings).replace("URL", f"https://ops:{TOKEN}@host.example/x"))
    with pytest.raises(InvalidFile) as invalid:
        load(path)
    assert TOKEN not in str(invalid.value) + str(invalid.value.diagnostics)
