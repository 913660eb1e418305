"""What may travel as JSON, and how the fault in what may not is named."""

import json
import time
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.db import Conn
from outbox.payload import BadPayload, clean, encode, encode_each

LOOP: list[Any] = []
LOOP += [LOOP, LOOP]
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([{"price": Decimal("1.5")}], "args[0].price: Decimal"),
        ([1, datetime(2026, 1, 1, tzinfo=UTC)], "args[1]: datetime"),
        ([date(2026, 1, 1)], "args[0]: date"),
        ([{"tags": {1, 2}}], "args[0].tags: set"),
        ([b"raw"], "args[0]: bytes"),
        ([float("nan")], "args[0]: nan"),
        ([[float("inf")]], "args[0][0]: inf"),
        ([(-float("inf"),)], "args[0][0]: -inf"),
        (["a\0b"], "args[0]: a NUL"),
        (["\ud800"], "args[0]: a lone surrogate"),
        ([{"a\0": 1}], "args[0].a"),
        ([{"\udfff": 1}], "args[0].\\udfff"),
        ([{(1, 2): 3}], "args[0]: a tuple cannot be a key"),
        ([{b"k": 3}], "args[0]: a bytes cannot be a key"),
        ([{float("nan"): 3}], "args[0].nan: nan"),
        ([object()], "args[0]: object"),
        ([lambda: 1], "args[0]: function"),
        ([1j], "args[0]: complex"),
        (LOOP, "nested deeper than 200"),
        (DEEP, "nested deeper than 200"),
        (["x" * 1_048_577], "args: 1,048,581 bytes"),
        (["é" * 600_000], "args: 1,200,004 bytes"),
    ],
)
def test_what_postgres_cannot_hold_is_refused_with_its_path(value: Any, place: str) -> None:
    with pytest.raises(BadPayload) as fault:
        encode(value, where="args")
    assert place in str(fault.value)
    assert len(str(fault.value).encode()) < 2_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, 2), "[1,2]"),
        ({1: "a", 2.5: "b", None: "d"}, '{"1":"a","2.5":"b","null":"d"}'),
        ({True: "c"}, '{"true":"c"}'),
        ("\\u0000 in words", '"\\\\u0000 in words"'),
        ("\U0001f600", '"\U0001f600"'),
        ({"": ""}, '{"":""}'),
        (-0.0, "-0.0"),
        (None, "null"),
    ],
)
def test_what_json_has_a_form_for_goes_through(value: Any, text: str) -> None:
    assert encode(value, where="args") == text


def test_twenty_megabytes_are_refused_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(BadPayload, match=r"20,000,004 bytes"):
        encode(["x" * 20_000_000], where="args")
    assert time.monotonic() - began < 1


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(json_like)
def test_whatever_is_let_through_comes_back_the_same(value: Any) -> None:
    with suppress(BadPayload):
        assert json.loads(encode(value, where="args")) == value


@given(st.lists(json_like | st.text(alphabet=st.characters()), min_size=1, max_size=4))
def test_many_are_encoded_as_each_of_them_is_or_have_to_be_looked_at(values: list[Any]) -> None:
    texts = []
    with suppress(BadPayload):
        texts = [encode(value, where="args") for value in values]
    assert encode_each(values) in ((None, texts) if "\\u0000" in "".join(texts) else (texts or None,))


@pytest.mark.parametrize("odd", ["\0", ["\0", 1], {"\0": 1}, "\ud800", float("nan"), b"x", {1}, DEEP, LOOP])
def test_one_that_cannot_be_encoded_has_all_of_them_looked_at(odd: Any) -> None:
    assert encode_each([1, odd, "x"]) is None


def test_what_looks_like_the_border_between_two_is_none() -> None:
    values = ["\\u0000", ',"\\u0000",', '","', [], ["]", ",", "[1,2]"]]
    assert encode_each(values) is None
    assert encode_each(values[2:]) == ['"\\",\\""', "[]", '["]",",","[1,2]"]']


def test_postgres_stores_whatever_is_let_through(conn: Conn) -> None:
    @given(st.lists(json_like | st.text(alphabet=st.characters()), max_size=3))
    def stored(value: list[Any]) -> None:
        try:
            text = encode(value, where="args")
        except BadPayload:
            return
        conn.execute("SELECT %s::jsonb", [text])

    stored()


@given(st.text(alphabet=st.characters()), st.integers(0, 50))
def test_a_cleaned_text_can_be_stored_and_fits(text: str, size: int) -> None:
    cleaned = clean(text, size)
    assert "\0" not in cleaned
    assert len(cleaned.encode()) <= size


def test_a_text_without_fault_stays_as_it_is() -> None:
    assert clean("naïve \U0001f600", 100) == "naïve \U0001f600"


def test_a_cut_never_splits_a_character() -> None:
    assert clean("éé", 3) == "é"
