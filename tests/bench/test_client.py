from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.keys import CacheNamespace
from rackserve.base.units import to_ns
from rackserve.bench.client import Target, _Usage, replay_over_http
from rackserve.bench.closed_loop import Replay
from rackserve.bench.ideal import IdealCache
from rackserve.bench.metrics import summarize
from rackserve.bench.open_loop import OpenLoop
from rackserve.bench.plan import IdleCaps
from rackserve.bench.prompts import RequestMaker
from rackserve.bench.records import RequestRecord, RunInfo
from rackserve.bench.tally import Tally
from tests.bench.stub import NO_CAPS, Piece, Stub, end, figures, run, singles, text
from tests.bench.toys import VirtualLoop, request, session


def test_a_request_carries_tokens_the_session_and_a_forced_length() -> None:
    stub = Stub(lambda body, request: [0.5, text("a"), 0.5, text("b"), *end(8, 4, 4)])
    [record], _ = run(Replay([session("a", request(0, 1, (1, 2)))], 1), stub, api_key="k")
    body = json.loads(stub.requests[0].content)
    assert str(stub.requests[0].url) == "http://stub/v1/completions"
    assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"], body["stream"]) == (8, 4, True, True)
    assert body["stream_options"] == {"include_usage": True}
    headers = stub.requests[0].headers
    assert (headers["x-session-id"], headers["x-request-id"], headers["authorization"]) == ("a/0", "a/0/0/0", "Bearer k")
    assert (record.first_ns, record.last_ns, record.num_chunks) == (to_ns(0.5), to_ns(1), 2)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (8, 4, 4)


def test_equal_tokens_become_equal_text_for_text_and_chat_endpoints() -> None:
    plan = [session("a", request(0, 1, (1, 2)), request(1, 1, (1, 2, 3)))]
    chat = Stub(lambda body, request: [{"choices": [{"delta": {"reasoning_content": "x"}}]}, 0.1, text("y"), *end(8, 4)])
    records, _ = run(Replay(plan, 1), chat, endpoint="chat")
    bodies = [json.loads(request.content)["messages"][0]["content"] for request in chat.requests]
    assert chat.requests[0].url.path == "/v1/chat/completions"
    assert bodies[1].startswith(bodies[0])
    assert [record.num_chunks for record in records] == [2, 2]
    plain = Stub(lambda body, request: end(8, 4))
    run(Replay(plan, 1), plain, endpoint="completions")
    assert [json.loads(request.content)["prompt"] for request in plain.requests] == bodies


def test_chunks_are_not_taken_for_tokens() -> None:
    """30 tokens as 10 chunks of 3, one every 30 ms; then 30 tokens in one chunk at the end."""

    def answer(body: dict[str, Any], request: httpx.Request) -> Sequence[Piece]:
        if request.headers["x-session-id"] == "s000/0":
            return [piece for _ in range(10) for piece in (0.03, text("abc"))] + end(4, 30)
        return [0.3, text("abc" * 10), *end(4, 30)]

    records, _ = run(Replay(singles(2, outputs=30), 2), Stub(answer))
    summary = figures(records)
    assert summary.tpot_ms is not None
    assert summary.chunk_gap_ms is not None
    assert (summary.tpot_ms.count, summary.tpot_ms.p50) == (1, pytest.approx(270 / 29))
    assert summary.chunk_gap_ms.p50 == pytest.approx(30)
    assert summary.num_no_gap == 1


def test_tokens_are_counted_by_the_servers_usage() -> None:
    """15 spaces are 15 tokens, whatever a tokenizer would make of the text; token ids, where sent, are counted beside it."""
    spaces = [piece for _ in range(15) for piece in (0.01, text(" "))]
    ids = [piece for _ in range(7) for piece in (0.01, text("", token_ids=[1, 2]))]

    def answer(body: dict[str, Any], request: httpx.Request) -> Sequence[Piece]:
        return (spaces if request.headers["x-session-id"] == "s000/0" else ids) + end(4, 15)

    records, _ = run(Replay(singles(2, outputs=15), 2), Stub(answer))
    one, two = sorted(records, key=lambda record: record.id)
    assert (one.planned_output_tokens, one.output_tokens, one.received_tokens, one.num_chunks) == (15, 15, -1, 15)
    assert (two.output_tokens, two.received_tokens) == (15, 14)
    summary = figures(records)
    assert (summary.output_tokens, summary.num_received_mismatch) == (30, 1)


def test_a_stall_is_seen_from_the_planned_time_although_the_client_sends_late() -> None:
    """10 requests/s for 20 s over 4 connections; the server stalls from 5 s to 10 s."""

    def answer(body: dict[str, Any], request: httpx.Request) -> Sequence[Piece]:
        now = asyncio.get_running_loop().time()
        wait = 10 - now if 5 <= now < 10 else 0.01
        return [wait, text("a"), 0.01, text("b"), *end(4, 4)]

    plan = OpenLoop(singles(200, every_s=0.1))
    records, took = run(plan, Stub(answer), max_connections=4)
    summary = figures(records)
    assert summary.num_done == 200
    assert took < 21
    assert summary.e2e_ms is not None
    assert summary.e2e_from_due_ms is not None
    assert summary.send_delay_ms is not None
    assert summary.e2e_ms.p90 < 100, "from the real sending the stall is hardly seen"
    assert 4_500 < summary.e2e_from_due_ms.p99 < 5_100
    assert 4_000 < summary.send_delay_ms.p99 < 5_000
    assert not summary.valid
    assert "send delay" in summary.invalid_reasons[0]


def test_failures_of_every_kind_are_records_and_the_run_ends_in_bounded_time() -> None:
    good = [0.1, text("a"), 0.1, text("b"), *end(4, 4)]
    answers: dict[str, list[Piece]] = {
        "s000/0": [httpx.ConnectError("refused")],
        "s001/0": [1e9],  # hangs
        "s002/0": [0.1, text("a")],  # ends without finish
        "s003/0": [0.1, text("a", finish_reason="length")],  # no usage
        "s004/0": [0.1, {"error": {"message": "lost", "code": "unavailable"}}],
        "s005/0": [0.1, "data: {oops\n\n"],
        "s006/0": [0.1, text("a"), httpx.ReadError("reset")],
        "s007/0": [RuntimeError("surprise")],
    }
    stub = Stub(
        lambda body, request: answers.get(request.headers["x-session-id"], good),
        status=lambda number: {8: 500, 9: 400}.get(number, 200),
    )
    records, took = run(Replay(singles(12), 12), stub, request_deadline_s=30)
    kinds = {record.session[:4]: record.error for record in records}
    assert kinds == {
        "s000": "connect", "s001": "timeout", "s002": "incomplete", "s003": "no_usage", "s004": "unavailable",
        "s005": "bad_response", "s006": "transport", "s007": "client_error", "s008": "http_500", "s009": "context_overflow",
        "s010": "", "s011": "",
    }  # fmt: skip
    assert took == pytest.approx(30, abs=0.1)
    summary = figures(records)
    assert (summary.num_sent, summary.num_done, summary.num_failed) == (12, 2, 10)
    assert summary.exit_code == 1
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.max == pytest.approx(100), "latency over successes only"


def test_a_turn_that_fails_in_mid_session_does_not_keep_the_run_from_ending() -> None:
    turns = [session("a", *(request(n * 2, 1, (1,)) for n in range(5)))]
    stub = Stub(lambda body, request: [0.1, text("a"), 0.1, text("b"), *end(4, 4)], status=lambda n: 400 if n == 2 else 200)
    records, _ = run(Replay(turns, 1), stub)
    assert [record.error for record in records] == ["", "", "context_overflow", "", ""]


def test_when_everything_fails_there_is_still_a_summary() -> None:
    records, _ = run(Replay(singles(10), 3), Stub(lambda body, request: [], status=lambda number: 503))
    summary = figures(records)
    assert (summary.num_sent, summary.failures, summary.valid) == (10, {"http_503": 10}, False)


def test_a_run_with_a_limit_ends_on_time_and_shows_what_it_cut() -> None:
    """8 sessions of 1..20 turns, 2 at a time; the limit cuts those still running."""
    lengths = [1, 3, 5, 8, 11, 14, 17, 20]
    sessions = [session(f"s{n}", *(request(2 * t, 1, (t,)) for t in range(length))) for n, length in enumerate(lengths)]
    stub = Stub(lambda body, request: [0.5, text("a"), 1.0, text("b"), *end(4, 4)])
    plan = Replay(sessions, 2, caps=NO_CAPS)
    records, took = run(plan, stub, run_deadline_s=60.2)
    summary = figures(records, plan)
    assert took == pytest.approx(60.2)
    assert summary.num_unfinished == sum(record.error == "unfinished" for record in records) == 2
    assert summary.num_sent == summary.num_done + summary.num_failed + summary.num_unfinished == len(stub.requests)
    assert summary.num_failed == 0


def test_an_interrupted_run_ends_at_once_and_keeps_what_is_done() -> None:
    stub = Stub(lambda body, request: [0.5, text("a"), 0.5, text("b"), *end(4, 4)])
    loop, maker = VirtualLoop(), RequestMaker(CacheNamespace("m", "r", 4, "l"))
    plan = Replay([session("a", *(request(100 * turn, 1, (turn,)) for turn in range(9)))], 1, caps=NO_CAPS)

    async def replay(at_s: float) -> list[RequestRecord]:
        interrupt = asyncio.Event()
        loop.call_later(at_s, interrupt.set)
        return await replay_over_http(
            plan, maker, IdealCache(4), Target("http://stub", "m"), transport=stub, now=loop.now_ns, interrupt=interrupt
        )

    try:
        records = loop.run_until_complete(replay(200.7))
        assert loop.time() == pytest.approx(200.7)
    finally:
        loop.close()
    assert [record.error for record in records] == ["", "", "unfinished"]
    summary = summarize(RunInfo("x", "live", 1, 1, interrupted=True), records)
    assert (summary.num_done, summary.num_unfinished, summary.valid) == (2, 1, False)
    assert summary.invalid_reasons == ("the run was interrupted",)


def test_an_interruption_in_a_pause_does_not_wait_for_the_next_turn() -> None:
    stub = Stub(lambda body, request: [0.5, text("a"), 0.5, text("b"), *end(4, 4)])
    loop, maker = VirtualLoop(), RequestMaker(CacheNamespace("m", "r", 4, "l"))
    plan = Replay([session("a", request(0), request(1_000))], 1, caps=NO_CAPS)

    async def replay() -> list[RequestRecord]:
        interrupt = asyncio.Event()
        loop.call_later(3.0, interrupt.set)
        where = Target("http://stub", "m")
        return await replay_over_http(plan, maker, IdealCache(4), where, transport=stub, now=loop.now_ns, interrupt=interrupt)

    try:
        assert [record.error for record in loop.run_until_complete(replay())] == [""]
        assert loop.time() == pytest.approx(3.0)
    finally:
        loop.close()


def test_the_thin_tail_is_outside_the_steady_window() -> None:
    lengths = [2, 2, 20]
    sessions = [session(f"s{n}", *(request(2 * t, 1, (t,)) for t in range(length))) for n, length in enumerate(lengths)]
    stub = Stub(lambda body, request: [0.5, text("a"), 0.5, text("b"), *end(4, 4)])
    plan = Replay(sessions, 2, caps=NO_CAPS)
    records, _ = run(plan, stub)
    summary = figures(records, plan)
    assert summary.steady_throughput is not None
    assert summary.steady_s == pytest.approx(3)
    assert summary.steady_throughput.output > 1.2 * summary.throughput.output


def test_topped_up_sessions_do_not_hit_their_earlier_plays() -> None:
    stub = Stub(lambda body, request: [0.5, text("a"), 0.5, text("b"), *end(4, 4)])
    records, _ = run(Replay([session("a", request(0, 1, (1, 2)))], 1, recycle=True), stub, run_deadline_s=5.5)
    assert [record.id for record in records] == [f"a/{play}/0/0" for play in range(6)]
    prompts = {tuple(json.loads(request.content)["prompt"]) for request in stub.requests}
    assert len(prompts) == 6
    assert all(record.ideal_cached_tokens == record.trace_block_hits == 0 for record in records)


def test_each_session_tree_is_pinned_to_a_data_parallel_rank_in_turn() -> None:
    sessions = [session(f"s{n}", request(0, 1), request(5, 1)) for n in range(5)]
    stub = Stub(lambda body, request: [0.5, text("a"), 0.5, text("b"), *end(4, 4)])
    run(Replay(sessions, 2), stub, dp_ranks=3, headers={"x-tenant": "t"})
    ranks: dict[str, set[str]] = {}
    for sent in stub.requests:
        ranks.setdefault(sent.headers["x-session-id"], set()).add(sent.headers["x-data-parallel-rank"])
        assert sent.headers["x-tenant"] == "t"
    assert ranks == {f"s{n}/0": {str(n % 3)} for n in range(5)}
    plain = Stub(lambda body, request: [0.5, text("a"), 0.5, text("b"), *end(4, 4)])
    run(Replay(singles(1), 1), plain)
    assert "x-data-parallel-rank" not in plain.requests[0].headers


def test_the_time_limit_counts_from_the_end_of_warming_up() -> None:
    turns = session("a", *(request(20 * n, 1, (n,)) for n in range(30)))
    stub = Stub(lambda body, request: [2.0, text("a"), 1.0, text("b"), *end(4, body["max_tokens"])])
    plan = Replay([turns], 1, caps=IdleCaps(to_ns(5), to_ns(5)), start_window=(0.5, 0.5), warmup_requests=4)
    records, took = run(plan, stub, run_deadline_s=20)
    warm = [record for record in records if record.warmup]
    assert (len(warm), plan.measured_from_ns) == (5, to_ns(15))
    assert took == pytest.approx(35)
    assert {record.planned_output_tokens for record in warm} == {1}
    summary = figures(records, plan)
    assert (summary.num_warmup, summary.num_sent) == (5, len(records) - 5)


def test_a_failed_warm_up_ends_the_run_with_all_records() -> None:
    turns = session("a", *(request(20 * n, 1, (n,)) for n in range(30)))
    plan = Replay([turns], 1, start_window=(0.5, 0.5), warmup_requests=4)
    records, _ = run(
        plan, Stub(lambda body, request: [], status=lambda number: 500 if number == 2 else 200), request_deadline_s=5
    )
    assert [record.error for record in records] == ["incomplete"]
    assert plan.aborted


def test_an_overflow_is_known_by_its_message_too() -> None:
    class Strict(Stub):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            message = "This model's maximum context length is 8 tokens, however you requested 12"
            return httpx.Response(400, json={"error": {"message": message, "code": 400, "type": "BadRequestError"}})

    [record], _ = run(Replay(singles(1), 1), Strict(lambda body, request: []))
    assert record.error == "context_overflow"


def test_a_tally_follows_the_run() -> None:
    tally = Tally()
    stub = Stub(lambda body, request: [0.5, text("a"), 0.5, text("b"), *end(8, 4, 2)], status=lambda n: 500 if n == 1 else 200)
    records, _ = run(Replay(singles(4), 4), stub, tally=tally)
    assert (tally.sent, tally.finished, tally.failed, tally.in_flight) == (4, 3, 1, 0)
    assert (tally.prompt_tokens, tally.cached_tokens, tally.output_tokens) == (24, 6, 12)
    assert tally.load() is not None
    assert len(records) == 4


@pytest.mark.parametrize("slow", [False, True])
def test_a_client_whose_own_loop_is_slow_says_that_it_was_the_bottleneck(slow: bool) -> None:
    """A token every 10 ms; the slow client's loop is held up for 30 ms in every 40."""
    loop, maker, tally = VirtualLoop(), RequestMaker(CacheNamespace("m", "r", 4, "l")), Tally()
    stub = Stub(lambda body, request: [piece for _ in range(200) for piece in (0.01, text("a"))] + end(4, 200))

    async def hog() -> None:
        while slow:
            loop.block(0.03)
            await asyncio.sleep(0.01)

    async def replay() -> list[RequestRecord]:
        beside = asyncio.create_task(hog())
        plan, where = Replay(singles(3, outputs=200), 3), Target("http://stub", "m")
        records = await replay_over_http(plan, maker, IdealCache(4), where, tally=tally, transport=stub, now=loop.now_ns)
        beside.cancel()
        return records

    try:
        records = loop.run_until_complete(replay())
    finally:
        loop.close()
    summary = summarize(RunInfo("x", "live", 3, 1, client=tally.load()), records)
    late = [warning for warning in summary.warnings if "the client was the bottleneck: it woke up to" in warning]
    assert len(late) == slow
    assert summary.tpot_ms is not None and (summary.tpot_ms.p50 > 15) is slow, "what it says of the server is not true then"


def test_senseless_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="completions-tokens, completions or chat"):
        Target("http://x", "m", endpoint="embeddings")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="request_deadline_s"):
        Target("http://x", "m", request_deadline_s=0)
    assert Target("http://x:1/", "m").path == "http://x:1/v1/completions"


@pytest.mark.parametrize("usage", [{"prompt_tokens": -1}, {"prompt_tokens": 1, "completion_tokens": 10**30}])
def test_usage_that_cannot_be_is_a_bad_response(usage: dict[str, int]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(usage), type=_Usage)
