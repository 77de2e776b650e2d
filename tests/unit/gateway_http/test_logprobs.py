"""Log probabilities in OpenAI's shapes."""

from __future__ import annotations

import json
import math

import pytest

from services.common.errors import QuireError, Reason
from services.gateway.events import ScoredToken
from services.gateway.http.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs

MINUS_INFINITY = float("-inf")


def token(
    text: bytes, logprob: float | None = -0.5, token_id: int = 0, top: tuple[ScoredToken, ...] = ()
) -> ScoredToken:
    return ScoredToken(token_id, text, logprob, 1, top)


def test_minus_infinity_stays_valid_json() -> None:
    """B8: strongly banned alternatives, in all three shapes."""
    one = token(b"a", MINUS_INFINITY, 1, (token(b"b", MINUS_INFINITY, 2),))
    for rendered in (chat_logprobs([one]), CompletionLogprobs().render([one]), prompt_logprobs([one])):
        assert "-9999.0" in json.dumps(rendered, allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, None])
def test_what_is_not_a_number_is_an_error(value: float | None) -> None:
    """B3, B8: never a null or a NaN in an answer."""
    with pytest.raises(QuireError) as caught:
        chat_logprobs([token(b"a", value)])
    assert caught.value.reason is Reason.NOT_FINITE


def test_alternatives_of_equal_text_stay_apart() -> None:
    """B8: asked for 4 alternatives, exactly 4 come, and the chosen token besides."""
    top = tuple(token(text, -1.0 - at, at) for at, text in enumerate([b"x", b"x", b"\xe2", b"\xe2\x82"]))
    [alternatives] = CompletionLogprobs().render([token(b"y", -9.0, 50, top)])["top_logprobs"]
    assert alternatives == {"x": -1.0, "token_id:1": -2.0, "bytes:\\xe2": -3.0, "bytes:\\xe2\\x82": -4.0, "y": -9.0}
    assert list(alternatives) == ["x", "token_id:1", "bytes:\\xe2", "bytes:\\xe2\\x82", "y"]


def test_the_chosen_token_is_not_repeated_among_its_alternatives() -> None:
    chosen = token(b"x", -1.0, 5)
    [alternatives] = CompletionLogprobs().render([token(b"x", -1.0, 5, (chosen, token(b"z", -2.0, 6)))])["top_logprobs"]
    assert alternatives == {"x": -1.0, "z": -2.0}


def test_chat_tokens_carry_their_bytes() -> None:
    """A1: parts of a character are told exactly, as bytes."""
    parts = [token(bytes([byte])) for byte in "€".encode()]
    content = chat_logprobs(parts)["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "€"
    assert all(one["top_logprobs"] == [] for one in content)


def test_offsets_count_characters_and_go_on_between_chunks() -> None:
    """Several tokens may make one character; offsets are where each token's character begins."""
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], b"bc", "€!".encode()[:2], "€!".encode()[2:], b"d"]
    text = b"".join(pieces).decode()
    logprobs = CompletionLogprobs()
    offsets = [
        offset
        for cut in (pieces[:2], pieces[2:5], pieces[5:])
        for offset in logprobs.render([token(piece) for piece in cut])["text_offset"]
    ]
    assert offsets == [0, 1, 1, 2, 4, 4, 6]
    assert text[offsets[3] :] == "bc€!d"
    assert text[offsets[6] :] == "d"


def test_the_first_prompt_token_has_no_value() -> None:
    first = token(b"a", None, 1)
    second = token(b"b", -0.5, 2, (token(b"c", -0.25, 3),))
    assert prompt_logprobs([first, second]) == [
        None,
        {
            "2": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "3": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
        },
    ]
