"""What the adapters of AWX and NetBox quote of a server's refusal."""

from __future__ import annotations

from rolloutd.adapters.json_api import MAX_DETAIL_LENGTH, describe_refusal

TOKEN = "s3cret-token"


def test_token_at_the_cut_is_hidden() -> None:
    text = "x" * (MAX_DETAIL_LENGTH - 6) + TOKEN
    assert TOKEN[:4] not in describe_refusal({"detail": text}, "error", TOKEN)


def test_other_key_and_fields_are_quoted() -> None:
    assert describe_refusal({"error": "no.", "host": "a"}, "error", TOKEN) == " (no)"
    assert describe_refusal({"tag": ["bad choice"]}, "exception", TOKEN) == " (tag: bad choice)"
    assert describe_refusal(["x"], "error", TOKEN) == ""


def test_field_with_one_text_is_quoted_whole() -> None:
    awx = {"msg": "You do not have permission"}
    netbox = {"name": "Not found.", "tag": ["bad choice", "other"], "site": []}
    assert describe_refusal(awx, "error", TOKEN) == " (msg: You do not have permission)"
    assert describe_refusal(netbox, "exception", TOKEN) == " (name: Not found.; tag: bad choice; site: [])"
