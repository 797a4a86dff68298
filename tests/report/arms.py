"""Arms for the tests of report: runs with made-up but consistent times."""

from __future__ import annotations

from rackserve.base.events import Event, PrefillAdmitted, RequestEnded, RequestPlaced, StepDone
from rackserve.base.ids import Rank
from rackserve.base.rng import Stream
from rackserve.base.units import to_ns
from rackserve.bench.metrics import summarize
from rackserve.bench.rack import summarize_rack
from rackserve.bench.records import RequestRecord, RunInfo, recorded
from rackserve.report.compare import Arm


def arm(
    label: str, host: str = "live", *, slow: float = 1.0, num_failed: int = 0, num: int = 40, step_error: float | None = None
) -> Arm:
    """A run of `num` requests whose answers take `slow` times as long as they might."""
    draws = Stream("arm", label)
    records: list[RequestRecord] = []
    events: list[tuple[int, str, Event]] = []
    for number in range(num):
        sent = to_ns(number * 0.1 * slow)
        first = sent + to_ns((0.02 + 0.1 * draws.unit()) * slow)
        last = first + to_ns((0.1 + 0.2 * draws.unit()) * slow)
        prompt, cached = draws.between(600, 900), draws.between(300, 590)
        error = "timeout" if number < num_failed else ""
        records.append(
            RequestRecord(
                f"{label}/{number}", f"s{number % 6}", sent, sent, last, prompt, 16, first, last, prompt, cached, 16,
                num_chunks=16, ideal_cached_tokens=590, trace_blocks=10, trace_block_hits=9, error=error,
            )
        )  # fmt: skip
        prefill = Rank("prefill0", draws.below(2))
        events.append((sent, "router", RequestPlaced(f"{label}/{number}", 1, prefill, Rank("decode0"), cached, 0, 0)))
        events.append((first, "prefill0", PrefillAdmitted(f"{label}/{number}", 1, prefill, prompt, cached - 40, 40, 0)))
        step = StepDone(prefill, number, prompt - cached, 0, 0, 1, 1, first - sent)
        events.append((first, "prefill0", step))
        events.append((last, "decode0", StepDone(Rank("decode0"), number, 1, 0, 0, 2, 2, last - first)))
        ended = RequestEnded(f"{label}/{number}", "finished", "length", 1, prompt, cached, 16, first - sent, last - sent)
        events.append((last, "frontend", ended))
    run = RunInfo(label, host, 6, 3, step_error=step_error, config={"route.policy": label})
    kept = recorded(events)
    summary = summarize(run, records)
    return Arm(summary, tuple(records), summarize_rack(kept, to_ns(summary.duration_s)), kept)
