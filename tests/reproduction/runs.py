"""Made-up results of simulations."""

from __future__ import annotations

import msgspec

from rackserve.simulated_rack import SimulatedFigures

RUN = SimulatedFigures(
    num_requests=1_000, num_failed=0, requests_per_s=10.0, hit_rate=0.96, tokens_per_request=1.5e5, uncached_per_request=6e3,
    ttft_p50_s=0.5, ttft_p90_s=1.0, interactivity_p90=400.0, total_per_gpu=1e6, idle_share=0.02, prefill_busy=0.9,
    decode_busy=0.9, line_error=0.01,
)  # fmt: skip


def run(**fields: float | None) -> SimulatedFigures:
    return msgspec.structs.replace(RUN, **fields)


RUNS = {
    "three-pinned": run(requests_per_s=5.0, hit_rate=0.92, ttft_p50_s=20.0),
    "three-pool": run(),
    "twelve-sticky": run(ttft_p90_s=0.9, idle_share=0.1),
    "twelve-least": run(ttft_p90_s=0.4, idle_share=0.01),
    "rubin-1": run(interactivity_p90=500.0, total_per_gpu=1e6),
    "rubin-2": run(interactivity_p90=300.0, total_per_gpu=2e6),
    "gb300-recipe-1": run(interactivity_p90=420.0, total_per_gpu=1e4),
    "gb300-recipe-2": run(interactivity_p90=200.0, total_per_gpu=9e5),
    "gb300-2": run(interactivity_p90=150.0, total_per_gpu=1e6),
}
