"""JSON is followed while it is written: the same verdict as the parser of the standard library."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.output.json_value import MAX_DEPTH, JsonValue

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    value=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), ascii_only=st.booleans(), behind=st.text(max_size=3)
)
def test_whole_values_end_where_they_end(value: Any, ascii_only: bool, behind: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    whole = JsonValue()
    assert whole.push(text + behind) == len(text)
    assert (whole.done, whole.failed) == (True, False)
    single = JsonValue()
    for letter in text[:-1]:
        assert single.push(letter) == 1
        assert not single.done
    assert single.push(text[-1]) == 1
    assert single.done


@settings(deadline=None)
@given(text=st.text(alphabet='{}[]:,"\\ut0123456789eE+-.rufalsn \n', max_size=24))
def test_what_fails_is_no_json_and_what_is_done_is(text: str) -> None:
    value = JsonValue()
    text = "{" + text
    end = value.push(text)
    if value.done:
        json.loads(text[:end])
    elif value.failed:
        with pytest.raises(ValueError, match=r".*"):
            json.loads(text)
    else:
        assert end == len(text)


@pytest.mark.parametrize("text", ["[" * MAX_DEPTH + "]" * MAX_DEPTH, '{"a":' * MAX_DEPTH + "0" + "}" * MAX_DEPTH])
def test_depth(text: str) -> None:
    value = JsonValue()
    value.push(text)
    assert value.done
    deeper = JsonValue()
    deeper.push("[" + text + "]")
    assert deeper.failed
