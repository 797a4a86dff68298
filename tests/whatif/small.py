"""A rack and sessions so small that a run takes a fraction of a second."""

from __future__ import annotations

from rackserve.simulated_rack import SimulatedFigures, SimulatedSetup
from rackserve.whatif.runs import ResultRow, SessionSample, Workload

SETUP = SimulatedSetup(
    chip="vr", prefill_groups=2, concurrency=30, decode_ranks=2, decode_width=24, settle_s=5, window_s=150, batch=2
)
WORKLOAD = Workload(4)


def row(
    setup: SimulatedSetup, tokens: int = 1_000, tpot: float = 10.0, ttft: float = 0.5, busy: float = 0.5, sessions: int = 4
) -> ResultRow:
    """A made-up result: every session sends ten requests of `tokens` in all."""
    samples = {
        f"s{number}": SessionSample(10, 6 * tokens // 10, 3 * tokens // 10, tokens // 10, (ttft,) * 10, (tpot,) * 10)
        for number in range(sessions)
    }
    figures = SimulatedFigures(
        num_requests=10 * sessions, num_failed=0, requests_per_s=10 * sessions / setup.window_s, hit_rate=2 / 3,
        tokens_per_request=tokens / 10, uncached_per_request=3 * tokens / 100, ttft_p50_s=ttft, ttft_p90_s=ttft,
        interactivity_p90=1_000 / tpot, total_per_gpu=tokens * sessions / setup.window_s / setup.num_gpus, idle_share=0.0,
        prefill_busy=busy, decode_busy=1.0, line_error=0.02, num_sessions=2, decode_batch=3.0,
    )  # fmt: skip
    return ResultRow(setup, WORKLOAD, "0", figures, (0.0, 0.0, 0.0), samples)
