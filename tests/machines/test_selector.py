"""Selectors match as `kubectl -l` does, and errors name the position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines.model.selector import MAX_SELECTOR_LENGTH, SelectorError, parse_selector

WORKER = {"role": "worker", "site": "ams", "cores": "64", "empty": "", "example.com/gpu": "a100"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("   ", True),
        ("role", True),
        ("nothing", False),
        ("!nothing", True),
        ("! nothing", True),
        ("!role", False),
        ("role=worker", True),
        ("role==worker", True),
        ("role = worker", True),
        ("role=master", False),
        ("role!=master", True),
        ("role!=worker", False),
        ("nothing!=x", True),
        ("nothing=", False),
        ("empty=", True),
        ("empty==,role", True),
        ("site in (ams,fra)", True),
        ("site in(ams)", True),
        ("site in (fra)", False),
        ("nothing in (a)", False),
        ("empty in (,a)", True),
        ("empty in (a,)", True),
        ("site notin (fra,lon)", True),
        ("site notin (ams)", False),
        ("nothing notin (a)", True),
        ("cores>32", True),
        ("cores>64", False),
        ("cores<65", True),
        ("role>1", False),
        ("nothing<1", False),
        ("example.com/gpu=a100", True),
        ("role=worker,site in (ams,fra)", True),
        ("role=worker,site in (ams,fra),!empty", False),
        ("role,\n\tsite", True),
    ],
)
def test_matches_as_kubernetes_does(text: str, expected: bool) -> None:
    assert parse_selector(text).matches(WORKER) is expected


def test_operator_words_are_good_keys_and_values() -> None:
    assert parse_selector("in in (in,notin)").matches({"in": "notin"})
    assert parse_selector("notin=in").matches({"notin": "in"})


@pytest.mark.parametrize(
    ("text", "position"),
    [
        (",", 0),
        ("a,", 2),
        ("a,,b", 2),
        ("=a", 0),
        ("a b", 2),
        ("a=b c", 4),
        ("!a=b", 2),
        ("!!a", 1),
        ("a in", 4),
        ("a in ()", 6),
        ("a in (b", 7),
        ("a in (b c)", 8),
        ("a in b", 5),
        ("a=(b)", 2),
        ("a==!b", 3),
        ("a>x", 2),
        ("a>", 2),
        ("a<99999999999999999999", 2),
        ("a>-5", 2),
        ("-a=b", 0),
        ("a=-b", 2),
        ("/a", 0),
        ("A.b/c", 0),
        ("x/y/z", 0),
        ("é", 0),
        ("a=b\x00", 2),
        (f"{'k' * 64}=v", 0),
        (f"k={'v' * 64}", 2),
        ("a" * (MAX_SELECTOR_LENGTH + 1), MAX_SELECTOR_LENGTH),
    ],
)
def test_error_has_position_and_allowed_tokens(text: str, position: int) -> None:
    with pytest.raises(SelectorError) as raised:
        parse_selector(text)
    assert raised.value.position == position
    assert raised.value.found
    assert raised.value.allowed


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("a=1,b=2", "b == 2 , a = 1"),
        ("a in (x,y)", "a in (y, x, y)"),
        ("a in (x)", "a=x"),
        ("a notin (x)", "a!=x"),
        ("a>007", "a>7"),
        ("a,a", "a"),
    ],
)
def test_one_meaning_has_one_canonical_text(left: str, right: str) -> None:
    assert parse_selector(left).canonical() == parse_selector(right).canonical()


NAMES = st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,6}[A-Za-z0-9])?", fullmatch=True)
SETS = st.lists(NAMES | st.just(""), min_size=1, max_size=3).filter(lambda values: values != [""])
REQUIREMENTS = st.one_of(
    NAMES,
    NAMES.map("!{}".format),
    st.tuples(NAMES, st.sampled_from(["=", "==", "!=", " = "]), NAMES | st.just("")).map("".join),
    st.tuples(NAMES, st.sampled_from([" in ", " notin "]), SETS).map(
        lambda t: f"{t[0]}{t[1]}({','.join(t[2])})"
    ),
    st.tuples(NAMES, st.sampled_from(["<", ">"]), st.integers(0, 99)).map(lambda t: f"{t[0]}{t[1]}{t[2]}"),
)


@given(st.lists(REQUIREMENTS, max_size=5).map(",".join), st.dictionaries(NAMES, NAMES, max_size=4))
def test_the_canonical_text_means_the_same(text: str, labels: dict[str, str]) -> None:
    selector = parse_selector(text)
    again = parse_selector(selector.canonical())
    assert again.canonical() == selector.canonical()
    assert again.matches(labels) is selector.matches(labels)


@given(st.text(alphabet="ab1-/.,()=!<> \tin\x00é", max_size=24))
def test_any_text_is_a_selector_or_a_selector_error(text: str) -> None:
    try:
        parse_selector(text)
    except SelectorError as error:
        assert 0 <= error.position <= len(text)  # noqa: PT017  # both answers are right, only other errors are not
