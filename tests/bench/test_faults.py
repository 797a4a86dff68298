"""What other benchmarks got wrong, tried on ours: whole runs against a stub server, and simulated ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec
import pytest

from rackserve.assemble import RackConfig
from rackserve.base.events import AttemptRetried
from rackserve.base.topology import Topology
from rackserve.bench.closed_loop import Replay
from rackserve.bench.metrics import bench_serve_keys, result_json, summarize
from rackserve.bench.open_loop import OpenLoop
from rackserve.bench.rack import summarize_rack
from rackserve.bench.records import Recording, RunInfo
from rackserve.bench.scale import ScaledTrace
from rackserve.bench.session import Session
from rackserve.digest_model import digest_layout
from rackserve.replay import ASSUMED_COSTS, ReplaySpec, replay_simulated
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.store import LinkCost
from tests.bench.stub import Piece, Stub, end, figures, run, singles, text
from tests.bench.toys import request, session

GOOD: list[Piece] = [0.1, text("a"), 0.1, text("b"), *end(4, 4)]


def test_a_broken_server_does_not_look_fast() -> None:
    """Of 100 requests 30 fail at once, 10 hang, 5 end without a finish; one turn in mid-session is over the limit."""

    def status(number: int) -> int:
        return 500 if number % 10 in (0, 3, 6) else 400 if number == 55 else 200

    def answer(body: dict[str, Any], request: httpx.Request) -> Sequence[Piece]:
        number = len(stub.requests) - 1
        return [1e9] if number % 10 == 8 else [0.1, text("a")] if number % 20 == 9 else GOOD

    stub = Stub(answer, status)
    sessions = [session(f"s{n}", *(request(turn, 1, (n, turn)) for turn in range(20))) for n in range(5)]
    records, took = run(Replay(sessions, 5), stub, request_deadline_s=30)
    summary = figures(records)
    assert len(records) == len(stub.requests) == summary.num_sent == 100
    assert summary.failures == {"context_overflow": 1, "http_500": 30, "incomplete": 5, "timeout": 10}
    assert (summary.num_done, summary.num_failed, summary.num_unfinished) == (54, 46, 0)
    assert not summary.valid and summary.exit_code == 1
    assert any("46 of 100 requests failed" in reason for reason in summary.invalid_reasons)
    assert summary.e2e_ms is not None and summary.e2e_ms.max == pytest.approx(200), "latency over successes only"
    assert took < 10 * 30 + 100, "each hanging request costs its deadline and no more"


@pytest.mark.parametrize("hit", [0, 50, 97])
def test_output_speed_does_not_grow_with_the_hit_rate(hit: int) -> None:
    """The same work a second at three hit rates: only cached input differs, and it stands apart."""
    computed = 3
    prompt = round(computed / (1 - hit / 100))

    def answer(body: dict[str, Any], request: httpx.Request) -> Sequence[Piece]:
        return [0.5, text("a"), 0.5, text("b"), *end(prompt, 4, prompt - computed)]

    records, _ = run(Replay(singles(20), 4), Stub(answer))
    summary = figures(records)
    assert summary.hit_rate == pytest.approx(hit / 100)
    assert summary.throughput.output == pytest.approx(16) and summary.throughput.uncached_input == pytest.approx(12)
    assert summary.throughput.cached_input == pytest.approx((prompt - computed) * 4)
    assert bench_serve_keys(summary)["output_throughput"] == pytest.approx(16)
    assert summary.ideal_hit_rate == 0, "what an unbounded cache would have hit is shown beside it"


# ---------------------------------------------------------------- too small a KV space


def growing(count: int, turns: int, blocks: int) -> tuple[Session, ...]:
    """Sessions whose prompts grow by `blocks` blocks of 16 tokens a turn."""
    return tuple(
        msgspec.structs.replace(
            session(
                f"s{n}",
                *(
                    msgspec.structs.replace(
                        request(turn, 0.1, tuple(range(n * 1_000, n * 1_000 + blocks * (turn + 1))), outputs=60),
                        input_tokens=16 * blocks * (turn + 1),
                    )
                    for turn in range(turns)
                ),
            ),
            block_tokens=16,
        )
        for n in range(count)
    )


def simulated(sessions: tuple[Session, ...], decode_blocks: int) -> Recording:
    """All sessions at once on one prefill and one decode rank."""
    topology = Topology(prefill_workers=1, decode_workers=1, prefill_blocks=40, decode_blocks=decode_blocks, segment_blocks=16)
    config = RackConfig(topology=topology, scheduler=SchedulerConfig(max_batched_tokens=64, max_sequences=16))
    num_requests = sum(each.num_requests for each in sessions)
    spec = ReplaySpec("x", ScaledTrace(sessions, num_requests, 0, 0, 0), len(sessions), 1.0)
    return replay_simulated(spec, config, digest_layout(16), ASSUMED_COSTS, LinkCost(2_000_000, 1e9))


def test_room_for_one_and_a_half_requests_serves_ten_growing_sessions() -> None:
    """The last turn takes 16 blocks; 24 are there."""
    sessions = growing(10, 4, 3)
    recording = simulated(sessions, 24)
    assert len(recording.requests) == 40 and not any(record.error for record in recording.requests)
    assert any(isinstance(item.event, AttemptRetried) for item in recording.events), "they did get into each other's way"


def test_sessions_that_outgrow_the_space_are_refused_where_they_do_and_the_run_ends() -> None:
    recording = simulated(growing(3, 6, 3), 13)
    errors = [[record.error for record in recording.requests if record.session == f"s{n}/0"] for n in range(3)]
    assert errors == [["", "", "", "too_large", "too_large", "too_large"]] * 3
    late = [record for record in recording.requests if record.error]
    assert all(record.num_chunks == 0 and record.attempts == 1 for record in late), "at entry, not after work"


# ---------------------------------------------------------------- no traffic


def numbers(value: object) -> Iterator[float]:
    """Every number in a decoded document."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, int | float):
        yield value


def test_no_traffic_gives_zeros_and_absent_averages_and_never_nan() -> None:
    summary = summarize(RunInfo("x", "live", 0, 4), [])
    assert (summary.num_sent, summary.requests_per_s, summary.duration_s) == (0, 0.0, 0.0)
    assert (summary.hit_rate, summary.ttft_ms, summary.interactivity_p90, summary.slices) == (None, None, None, None)
    assert not summary.valid
    found = list(numbers(msgspec.json.decode(result_json(summary))))
    assert found and all(map(math.isfinite, found))
    rack = summarize_rack([], 0)
    assert (rack.balance, rack.lockstep_idle_share) == (None, None)


def test_a_lull_in_the_middle_is_zeros_and_what_follows_is_counted_again() -> None:
    """Load for 5 s, none for 5 s, load for 5 s."""
    times = [at / 2 for at in (*range(10), *range(20, 30))]
    sessions = [session(f"s{n:02}", request(at, 0.1, (n,))) for n, at in enumerate(times)]
    records, _ = run(OpenLoop(sessions), Stub(lambda body, request: [0.1, text("a"), 0.1, text("b"), *end(4, 4)]))
    summary = figures(records)
    assert summary.slices is not None
    assert [round(value) for value in summary.slices.output] == [8] * 5 + [0] * 5 + [8] * 5
    assert all(map(math.isfinite, numbers(msgspec.json.decode(result_json(summary)))))
