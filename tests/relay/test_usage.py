"""What answers of every dialect tell of their prompt is read out of their ends."""

from __future__ import annotations

import msgspec
import pytest

from rackserve.relay.usage import HEAD_BYTES, TAIL_BYTES, Ends, usage_in

OPENAI = {"usage": {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}}
RESPONSES = {"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 5}}
MESSAGES = {"usage": {"input_tokens": 36, "cache_read_input_tokens": 64, "output_tokens": 5}}


@pytest.mark.parametrize("body", [OPENAI, RESPONSES, MESSAGES])
def test_every_dialect_tells_the_same(body: object) -> None:
    assert usage_in(msgspec.json.encode(body)) == (100, 64)
    assert usage_in(msgspec.json.format(msgspec.json.encode(body), indent=2)) == (100, 64)


def test_text_of_the_answer_cannot_pose_as_usage() -> None:
    forged = {"choices": [{"text": '"prompt_tokens": 1, "cached_tokens": 1'}]}
    assert usage_in(msgspec.json.encode(forged)) is None
    assert usage_in(msgspec.json.encode({**OPENAI, **forged})) == (100, 64)


@pytest.mark.parametrize(
    "tail", [b"", b'{"usage":{"prompt_tokens":100}}', b'{"usage":{"prompt_tokens":null,"cached_tokens":1}}']
)
def test_an_answer_that_tells_nothing_of_its_cache_has_no_usage(tail: bytes) -> None:
    assert usage_in(tail) is None


@pytest.mark.parametrize("size", [1, 7, 300, 100_000])
def test_usage_is_found_however_the_answer_is_cut(size: int) -> None:
    for text in (b"x" * 50_000 + msgspec.json.encode(OPENAI) + b"[DONE]", msgspec.json.encode(MESSAGES) + b"x" * 50_000):
        ends = Ends()
        for start in range(0, len(text), size):
            ends.add(text[start : start + size])
        usage = ends.usage
        assert usage is None or (usage.prompt_tokens, usage.cached_tokens) == (100, 64)
        assert usage is not None or text.startswith(b"{")  # an event at the beginning may come in pieces


def test_no_more_than_the_ends_is_kept() -> None:
    ends = Ends()
    for _ in range(100):
        ends.add(b"y" * 5000)
    assert len(ends._tail) <= TAIL_BYTES
    assert len(ends._head or b"") <= HEAD_BYTES


def test_the_share_of_a_prompt_is_at_most_all_of_it() -> None:
    usage = usage_in(b'"prompt_tokens":10,"cached_tokens":20')
    assert usage is not None
    assert usage.share == 1.0
