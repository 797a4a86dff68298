"""What a body asks for: the same prompt has the same keys in every turn, dialect by dialect, and tenants share none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import RequestError
from rackserve.base.keys import Chain, common_blocks, count, extend_chain
from rackserve.relay.ledger import root_key
from rackserve.relay.prompts import Call, PromptReader
from rackserve.relay.rendering import DIALECTS, Rendering
from rackserve.text.tokenizer import pack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def read(reader: PromptReader, body: object, path: str = CHAT, **headers: str) -> Call:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return reader.read(path, msgspec.json.encode(body), names)


def by_text(block_tokens: int = 4) -> PromptReader:
    return PromptReader(block_tokens)


def shared(a: Chain, b: Chain) -> int:
    return common_blocks(a, 0, b, 0)


def turn(number: int) -> dict[str, object]:
    messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": f"message {at} " * 10} for at in range(number)]
    return {"model": "m", "stream": True, "messages": messages, "tools": [{"name": "t"}], "max_tokens": 7 + number}


def test_the_next_turn_of_a_chat_begins_with_the_keys_of_the_last() -> None:
    reader = by_text()
    first, second = read(reader, turn(3)), read(reader, turn(5))
    assert shared(first.chain, second.chain) >= count(first.chain) - 1
    assert count(second.chain) == second.tokens // 4
    assert (first.model, first.max_tokens, first.by_tokens) == ("m", 10, False)


@pytest.mark.parametrize("field", ["prompt", "input"])
def test_every_dialect_has_a_prompt(field: str) -> None:
    reader = by_text()
    a = read(reader, {"model": "m", field: "word " * 100})
    b = read(reader, {"model": "m", field: "word " * 100 + "more"})
    assert shared(a.chain, b.chain) >= count(a.chain) - 1 > 10


@pytest.mark.parametrize("field", ["tools", "system", "instructions"])
def test_what_comes_before_the_messages_decides_all_keys(field: str) -> None:
    reader = by_text()
    assert not shared(read(reader, turn(3)).chain, read(reader, {**turn(3), field: "something else, and long"}).chain)


def test_prompts_of_other_models_and_salts_share_nothing() -> None:
    reader = by_text()
    plain = read(reader, turn(3)).chain
    assert not shared(plain, read(reader, {**turn(3), "model": "other"}).chain)
    assert not shared(plain, read(reader, {**turn(3), "cache_salt": "s"}).chain)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.text("xy", max_size=80)), min_size=1, max_size=8))
def test_what_was_read_before_changes_no_key(prompts: list[tuple[str, str]]) -> None:
    reader = by_text(1)
    for session, prompt in prompts:
        body = {"prompt": prompt}
        assert read(reader, body, x_session_id=session).chain == read(by_text(1), body).chain


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({"x_session_id": "a"}, {}, "a"),
        ({"x_session_affinity": "b"}, {"prompt_cache_key": "z"}, "b"),
        ({"x_session_affinity": "b"}, {"session_id": "z"}, "z"),
        ({"x_correlation_id": "g"}, {}, "g"),
        ({}, {"metadata": {"user_id": "somebody in many conversations"}}, ""),
        ({"session_id": "c"}, {}, "c"),
        ({"thread_id": "d"}, {}, "d"),
        ({}, {"prompt_cache_key": "e"}, "e"),
        ({}, {"session_id": "f"}, "f"),
        ({}, {"session_id": 3}, ""),
        ({"x_session_id": "s" * 1000}, {}, "s" * 256),
    ],
)
def test_a_session_is_found_wherever_clients_put_it(headers: dict[str, str], body: dict[str, object], session: str) -> None:
    assert read(by_text(), body, **headers).session == session


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"model": "x"'])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        by_text().read(CHAT, raw, {})
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [{}, {"prompt": 3}, {"prompt": [[]]}, {"messages": None}, {"model": 4, "max_tokens": "x"}])
@pytest.mark.parametrize("tokenizer", ["", "numbers"])
def test_odd_fields_are_the_workers_to_judge(tokenizer: str, body: object) -> None:
    for path in DIALECTS:
        assert read(PromptReader(4, Rendering(tokenizer) if tokenizer else None), body, path).model == ""


IDS = list(range(1000, 1030))


def test_token_ids_and_their_text_have_the_keys_of_kv_events() -> None:
    reader = PromptReader(4, Rendering("numbers"))
    expected = extend_chain(b"", root_key(4), pack(IDS), 4)
    for prompt in (IDS, [IDS, [1]], " ".join(map(str, IDS)), [" ".join(map(str, IDS)), "1"]):
        call = read(reader, {"prompt": prompt}, COMPLETIONS)
        assert (call.chain, call.tokens, call.by_tokens) == (expected, len(IDS), True)


def test_salts_and_adapters_have_roots_of_their_own() -> None:
    reader = PromptReader(4, Rendering("numbers"))
    reader.adapters.add("tuned")
    for fields, root in (
        ({"cache_salt": "s"}, root_key(4, "s")),
        ({"model": "tuned"}, root_key(4, "", "tuned")),
        ({"model": "base"}, root_key(4)),
    ):
        assert read(reader, {"prompt": IDS, **fields}, COMPLETIONS).chain == extend_chain(b"", root, pack(IDS), 4)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "1 2"}]}, "no_template"),
        ("/v1/responses", {"model": "m", "input": "1 2 3"}, "no_template"),
        (COMPLETIONS, {"prompt": "not numbers"}, "refused"),
        (COMPLETIONS, {"prompt": [2**40]}, "refused"),
        (COMPLETIONS, {}, "refused"),
        (COMPLETIONS, {"prompt": "1 2", "truncate_prompt_tokens": 1}, "fields"),
    ],
)
def test_a_prompt_whose_ids_only_the_worker_knows_is_keyed_by_text_and_counted(path: str, body: object, reason: str) -> None:
    reader = PromptReader(1, Rendering("numbers"))
    assert not read(reader, body, path).by_tokens
    assert dict(reader.fallbacks) == {reason: 1}


def test_messages_name_their_session_in_metadata() -> None:
    assert read(by_text(), {"metadata": {"user_id": "u"}}, "/v1/messages").session == "u"
    assert read(by_text(), {"metadata": {"user_id": 3}}, "/v1/messages").session == ""


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_what_generates_nothing_says_nothing_of_caches(path: str) -> None:
    call = read(by_text(), {**turn(3), "prompt_cache_key": "s"}, path)
    assert (call.model, call.session, call.chain, call.tokens) == ("m", "s", b"", 0)
