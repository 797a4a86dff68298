from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.api.answer import AnswerReader
from rackserve.api.endpoint import IGNORED
from rackserve.api.journal import RefusalLog
from rackserve.api.limits import Limits
from rackserve.base.request import Request
from tests.api.rig import Rig, Script, events, finishes, joined, run, text
from tests.text.small_model import EOS, byte_ids

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
PATHS = (PLAIN, CHAT)


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {**prompt, **fields}


def said(choice: dict[str, Any]) -> str:
    value: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return value


async def stream(rig: Rig, path: str, **fields: Any) -> list[Any]:
    response = await rig.post(path, body(path, stream=True, **fields))
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return events(response.content)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("groups", [(1,), (4,), (99,)])
@pytest.mark.parametrize("cached", [0, 4])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_is_one_last_chunk_and_the_same_on_all_paths(path: str, groups: tuple[int, ...], cached: int, n: int) -> None:
    async def scene() -> None:
        rig = Rig(text("Hello there", groups=groups, cached=cached))
        plain = (await rig.post(path, body(path, n=n))).json()
        asked = await stream(rig, path, n=n, stream_options={"include_usage": True})
        assert asked[-1] == "[DONE]" and asked[-2]["choices"] == []
        assert asked[-2]["usage"] == plain["usage"]
        assert all("usage" in chunk and chunk["usage"] is None and chunk["choices"] for chunk in asked[:-2])
        for fields in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
            chunks = await stream(rig, path, n=n, **fields)
            assert chunks[-1] == "[DONE]" and not any("usage" in chunk for chunk in chunks[:-1])
        usage = plain["usage"]
        assert usage["prompt_tokens"] == rig.frontend.submitted[0].num_tokens
        assert usage["completion_tokens"] == 12 * n
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}

    run(scene())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "reason", "count"), [({}, "stop", 6), ({"max_tokens": 3}, "length", 3), ({"stop": "l"}, "stop", 3)]
)
def test_each_way_to_end_has_its_reason_and_count(path: str, fields: dict[str, Any], reason: str, count: int) -> None:
    async def scene() -> None:
        for groups in ((1,), (4,)):
            rig = Rig(text("Hello", groups=groups, cached=1))
            plain = (await rig.post(path, body(path, **fields))).json()
            chunks = await stream(rig, path, stream_options={"include_usage": True}, **fields)
            assert plain["choices"][0]["finish_reason"] == reason and finishes(chunks) == [reason]
            assert said(plain["choices"][0]) == joined(chunks)
            assert plain["usage"] == chunks[-2]["usage"]
            assert plain["usage"]["completion_tokens"] == count
            assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}

    run(scene())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stops", [["DEFGHIJ"], ["DEFG", "EF"]])
def test_a_stop_string_over_tokens_never_reaches_the_client(path: str, stops: list[str]) -> None:
    async def scene() -> None:
        for groups in itertools.product((1, 2, 3), repeat=3):
            rig = Rig(text("ABCDEFGHIJK", groups=groups))
            chunks = await stream(rig, path, stop=stops)
            assert (joined(chunks), finishes(chunks)) == ("ABC", ["stop"])
            assert said((await rig.post(path, body(path, stop=stops))).json()["choices"][0]) == "ABC"
            assert len(rig.frontend.cancelled) <= 2 and len(set(rig.frontend.cancelled)) == len(rig.frontend.cancelled)

    run(scene())


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 330), min_size=1, max_size=16),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.lists(st.sampled_from(["a", "th", "é", "at"]), max_size=2),
    st.sampled_from(PATHS),
    st.booleans(),
)
def test_the_plain_answer_is_the_joined_stream_for_any_cut(
    ids: list[int], groups: list[int], stops: list[str], path: str, logprobs: bool
) -> None:
    async def scene() -> None:
        script = Script(ids=(*ids, EOS), groups=tuple(groups), logprobs=logprobs)
        whole = msgspec.structs.replace(script, groups=(99,))
        fields: dict[str, Any] = {"stop": stops, "stream_options": {"include_usage": True}}
        chunks = await stream(Rig(script), path, **fields)
        plain = (await Rig(whole).post(path, body(path, stop=stops))).json()
        assert joined(chunks) == said(plain["choices"][0])
        assert finishes(chunks) == [plain["choices"][0]["finish_reason"]]
        assert chunks[-2]["usage"] == plain["usage"]
        parts = [choice["logprobs"] for chunk in chunks[:-2] for choice in chunk["choices"] if choice["logprobs"]]
        key = "content" if path == CHAT else "tokens"
        entries = [entry for part in parts for entry in part[key]]
        assert entries == ((plain["choices"][0]["logprobs"] or {}).get(key) or [])

    run(scene())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_chunk_holds_half_a_character(size: int) -> None:
    answer = "ď€🦙👩‍👩‍👧"

    async def scene() -> None:
        rig = Rig(text(answer, groups=(size,), logprobs=True))
        response = await rig.post(CHAT, body(CHAT, stream=True, logprobs=True, top_logprobs=2))
        assert "\ufffd" not in response.text and "\\ufffd" not in response.text
        chunks = events(response.content)
        assert joined(chunks) == answer
        parts = [choice["logprobs"]["content"] for chunk in chunks[:-1] for choice in chunk["choices"] if choice["logprobs"]]
        entries = [entry for part in parts for entry in part]
        assert len(entries) == len(answer.encode()) + 1
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == answer
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

    run(scene())


def by_choice(*scripts: Script) -> Any:
    """A script for each choice, by the number at the end of the request's id."""

    def script(request: Request) -> Script:
        return scripts[int(request.id.rsplit("-", 1)[1])]

    return script


@pytest.mark.parametrize("path", PATHS)
def test_each_of_n_choices_gets_its_tokens_and_one_finish(path: str) -> None:
    async def scene() -> None:
        rig = Rig(by_choice(text("ab"), text("cdefg"), text("hijklmnop")))
        chunks = await stream(rig, path, n=3, max_tokens=6, stream_options={"include_usage": True})
        assert [joined(chunks, index) for index in range(3)] == ["ab", "cdefg", "hijklm"]
        assert [finishes(chunks, index) for index in range(3)] == [["stop"], ["stop"], ["length"]]
        usage = chunks[-2]["usage"]
        assert usage["completion_tokens"] == 3 + 6 + 6
        assert usage["prompt_tokens"] == rig.frontend.submitted[0].num_tokens
        assert len({request.sampling.seed for request in rig.frontend.submitted}) == 3
        plain = (await rig.post(path, body(path, n=3, max_tokens=6))).json()
        assert [said(choice) for choice in plain["choices"]] == ["ab", "cdefg", "hijklm"]
        assert plain["usage"] == usage

    run(scene())


def test_several_prompts_are_answered_in_order() -> None:
    async def scene() -> None:
        rig = Rig(by_choice(text("a"), text("b")))
        answer = (await rig.post(PLAIN, {"prompt": ["one", "two"]})).json()
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "a"), (1, "b")]
        assert answer["usage"]["prompt_tokens"] == sum(request.num_tokens for request in rig.frontend.submitted)

    run(scene())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("made", [b"", b"ab"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_cancels_all_it_asked_for_once(path: str, streamed: bool, made: bytes, n: int) -> None:
    async def scene() -> None:
        rig = Rig(Script(ids=tuple(byte_ids(made)), hold=True))
        async with rig.raw(path, body(path, stream=streamed, n=n)) as client:
            await rig.frontend.held.wait()
            while len(rig.frontend.submitted) < n:
                await asyncio.sleep(0)
            if streamed and made:
                await client.read_until(b'"a"')
            client.gone.set()
            while rig.gateway.num_open:
                await asyncio.sleep(0)
        assert sorted(rig.frontend.cancelled) == sorted(request.id for request in rig.frontend.submitted)
        assert len(rig.frontend.cancelled) == n and b"DONE" not in client.body
        assert rig.metric("rackserve_clients_gone_total") == 1

    run(scene())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("code", "status"), [("overloaded", 429), ("unavailable", 503), ("timeout", 504), ("broken", 500)])
def test_a_refusal_before_the_first_token_is_an_http_error(path: str, streamed: bool, code: str, status: int) -> None:
    async def scene() -> None:
        rig = Rig(Script(error=code))
        rig.app = RefusalLog(rig.app, rig.metrics.error_sent)  # type: ignore[assignment]
        response = await rig.post(path, body(path, stream=streamed))
        assert response.status_code == status and response.json()["error"]["code"] == code
        assert ("retry-after" in response.headers) is (status in (429, 503))
        assert rig.metric("rackserve_error_responses_total", status=str(status)) == 1
        assert rig.frontend.cancelled == []

    run(scene())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_in_mid_stream_is_one_error_event_and_no_finish(path: str, n: int) -> None:
    async def scene() -> None:
        good = Script(ids=tuple(byte_ids("abcdef")), hold=True)
        rig = Rig(by_choice(Script(ids=tuple(byte_ids("abc")), error="unavailable"), good))
        chunks = await stream(rig, path, n=n, stream_options={"include_usage": True})
        assert chunks[-1]["error"]["code"] == "unavailable" and set(chunks[-1]) == {"error"}
        assert joined(chunks[:-1]) == "abc" and finishes(chunks[:-1]) == []
        assert not any("error" in chunk for chunk in chunks[:-1])
        assert rig.metric("rackserve_error_responses_total", status="stream") == 1
        assert len(rig.frontend.cancelled) == n - 1 and rig.gateway.num_open == 0
        plain = await rig.post(path, body(path))
        assert plain.status_code == 503 and plain.json()["error"]["code"] == "unavailable"

    run(scene())


def test_a_request_cancelled_by_the_rack_is_no_finished_answer() -> None:
    async def scene() -> None:
        rig = Rig(text("ab", finish="cancelled"))
        assert (await rig.post(PLAIN, body(PLAIN))).status_code == 503
        assert "error" in (await stream(rig, PLAIN))[-1]

    run(scene())


def test_a_bug_is_told_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("secret")

    async def scene() -> None:
        monkeypatch.setattr(AnswerReader, "read", fails)
        response = await Rig(text("ab")).post(PLAIN, body(PLAIN))
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "internal error; see the server's log"

    run(scene())


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *[(PLAIN, {"prompt": prompt}, "prompt") for prompt in ("", [], [""], [[]], None, 5)],
        (CHAT, {"messages": []}, "messages"),
        *[(path, body(path, max_tokens=value), "max_tokens") for path in PATHS for value in (0, -1, 1.5, "x")],
        (PLAIN, body(PLAIN, echo=True, max_tokens=-1), "max_tokens"),
        (PLAIN, body(PLAIN, suffix="x"), "suffix"),
        (PLAIN, {"prompt": [1, 10**6]}, "prompt"),
    ],
)
def test_a_bad_request_names_its_field_and_hurts_nobody(path: str, fields: dict[str, Any], param: str) -> None:
    async def scene() -> None:
        rig = Rig(text("fine"))
        for streamed in (False, True):
            response = await rig.post(path, {**fields, "stream": streamed})
            assert response.status_code == 400 and response.json()["error"]["param"] == param
        assert rig.frontend.submitted == []
        assert said((await rig.post(path, body(path))).json()["choices"][0]) == "fine"

    run(scene())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": "a", "temperature": NaN}'])
def test_a_body_that_is_no_json_object_is_400(raw: bytes) -> None:
    async def scene() -> None:
        response = await Rig(text("x")).post(PLAIN, raw=raw)
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"

    run(scene())


@pytest.mark.parametrize("depth", [600, 900, 5000])
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/messages/count_tokens"])
def test_a_body_nested_too_deeply_to_be_read_is_refused(path: str, depth: int) -> None:
    nested = b'{"a":' * depth + b"{}" + b"}" * depth
    tool = b'{"name": "f", "input_schema": %b, "function": {"name": "f", "parameters": %b}}' % (nested, nested)
    raw = b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [%b]}' % tool

    async def scene() -> None:
        response = await Rig(text("x")).post(path, raw=raw)
        assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"

    run(scene())


@pytest.mark.parametrize(("asked", "made", "clamps"), [(24, 24, 0), (25, 24, 1), (60, 24, 1), (None, 24, 0), (5, 5, 0)])
def test_max_tokens_is_an_upper_bound(asked: int | None, made: int, clamps: int) -> None:
    async def scene() -> None:
        rig = Rig(Script(ids=(5,) * 100), max_model_len=64)
        answer = (await rig.post(PLAIN, {"prompt": [6] * 40, "max_tokens": asked})).json()
        assert answer["usage"]["completion_tokens"] == made
        assert answer["choices"][0]["finish_reason"] == "length"
        assert rig.metric("rackserve_max_tokens_clamped_total") == clamps

    run(scene())


@pytest.mark.parametrize(("length", "status"), [(63, 200), (64, 400), (65, 400)])
def test_a_prompt_that_fills_the_context_is_refused(length: int, status: int) -> None:
    async def scene() -> None:
        response = await Rig(Script(ids=(5,) * 100), max_model_len=64).post(PLAIN, {"prompt": [6] * length})
        assert response.status_code == status
        if status == 400:
            assert response.json()["error"]["code"] == "context_length_exceeded"

    run(scene())


def test_unknown_fields_pass_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        rig = Rig(text("x"))
        for _ in range(2):
            assert (await rig.post(PLAIN, body(PLAIN, temprature=0))).status_code == 200
        assert rig.metric("rackserve_unknown_fields_total") == 2

    run(scene())
    assert [record.message for record in caplog.records].count("unknown request field 'temprature' has no effect") == 1


def test_limits_are_checked_before_the_work() -> None:
    async def scene() -> None:
        rig = Rig(text("x"), limits=Limits(body_bytes=1000, messages=3))
        assert (await rig.post(PLAIN, body(PLAIN, prompt="a" * 1000))).status_code == 413
        response = await rig.post(CHAT, {"messages": [{"role": "user", "content": ""}] * 4})
        assert response.status_code == 400 and response.json()["error"]["param"] == "messages"

    run(scene())


@pytest.mark.parametrize(("draining", "code"), [(True, "draining"), (False, "unavailable")])
def test_a_server_that_takes_no_work_says_when_to_come_back(draining: bool, code: str) -> None:
    async def scene() -> None:
        rig = Rig(text("x"))
        rig.state.ready, rig.state.draining = draining, draining
        response = await rig.post(CHAT, body(CHAT))
        assert response.status_code == 503 and "retry-after" in response.headers
        assert response.json()["error"]["code"] == code and rig.frontend.submitted == []

    run(scene())


def test_a_shut_down_ends_open_streams_with_an_error() -> None:
    async def scene() -> None:
        rig = Rig(Script(ids=tuple(byte_ids("ab")), hold=True))
        async with rig.raw(CHAT, body(CHAT, stream=True)) as client:
            await client.read_until(b'"b"')
            rig.gateway.close("going down")
            await client.ended.wait()
        assert events(client.body)[-1]["error"]["message"] == "going down"

    run(scene())


def test_the_session_of_the_client_reaches_the_rack() -> None:
    async def scene() -> None:
        rig = Rig(text("x"))
        await rig.post(CHAT, body(CHAT), headers={"X-Session-Affinity": "agent-7"})
        assert rig.frontend.submitted[0].session == "agent-7"

    run(scene())


@pytest.mark.parametrize("streamed", [False, True])
def test_what_had_no_effect_is_told_in_a_header_that_no_name_can_break(streamed: bool) -> None:
    async def scene() -> None:
        rig = Rig(text("fine"))
        tools = [{"type": "web\r\nset-cookie: a=b\u00e9"}]
        response = await rig.post(CHAT, body(CHAT, tools=tools, store=True, stream=streamed))
        told = response.headers[IGNORED]
        assert response.status_code == 200 and told.split(", ") == ["store", "tools[0]:web??set-cookie: a=b?"]
        assert "set-cookie" not in response.headers
        assert IGNORED not in (await rig.post(CHAT, body(CHAT, stream=streamed))).headers

    run(scene())


def test_where_prompts_leave_those_of_their_session_is_counted_and_going_on_is_not() -> None:
    """A session whose third and fourth prompts change a code near their beginning; one whose prompts only grow."""

    async def scene() -> None:
        rig = Rig(text("x"))
        for session, prompt in [("a", "0123"), ("a", "0123456"), ("a", "01X3456"), ("a", "01Y3456"), ("b", "0"), ("b", "01")]:
            body = {"prompt": prompt, "session_id": session}
            assert (await rig.post("/v1/completions", body)).status_code == 200
        assert rig.metric("rackserve_prompt_left_at_tokens_count") == 2
        assert rig.metric("rackserve_prompt_left_at_tokens_sum") == 4

    run(scene())
