"""URLs of plans: a password or a token in one is refused."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from rolloutd.plugin import field_types
from rolloutd.ports import WITHHELD
from rolloutd.secret_variables import storable_variables

TOKEN = "ghp_16C7e42F292c6912E7"


@pytest.mark.parametrize(
    "url",
    [
        f"https://{TOKEN}@git.example/r.git",
        f"HTTPS://{TOKEN}@git.example/r.git",
        f"https://x:{TOKEN}@git.example/r.git",
        f"https://:{TOKEN}@git.example/r.git",
        f"ssh://git:{TOKEN}@git.example/r.git",
    ],
)
def test_url_with_credentials_is_refused(url: str) -> None:
    kinds = [field_types.GitUrl] if url.startswith("ssh") else [field_types.GitUrl, field_types.HttpUrl]
    for kind in kinds:
        with pytest.raises(ValidationError, match="does not belong in a plan"):
            TypeAdapter(kind).validate_python(url)


QUERIES = [f"token={TOKEN}", f"a=1&private_token={TOKEN}", f"X-Amz-Signature={TOKEN}", f"apikey={TOKEN}#x"]


@pytest.mark.parametrize("query", QUERIES)
def test_url_with_credentials_in_query_is_refused(query: str) -> None:
    with pytest.raises(ValidationError, match="does not belong in a plan"):
        TypeAdapter(field_types.HttpUrl).validate_python(f"https://mirror.example/app.tar?{query}")
    kept = storable_variables({"mirror": f"https://mirror.example/app.tar?{query}", "n": 1})
    assert kept.keys() == {"n", WITHHELD}


@pytest.mark.parametrize("query", ["page=1", "token={{ vars.t }}", "tokens", "q=a#token=b"])
def test_url_without_credentials_in_query_is_accepted(query: str) -> None:
    url = f"https://mirror.example/app.tar?{query}"
    assert TypeAdapter(field_types.HttpUrl).validate_python(url) == url


@pytest.mark.parametrize(
    "url", ["https://git.example/r.git", "ssh://git@git.example/r.git", "git@git.example:r.git"]
)
def test_url_without_credentials_is_accepted(url: str) -> None:
    assert TypeAdapter(field_types.GitUrl).validate_python(url) == url
