"""Load generators against a rack of known pace: do they measure what `rackserve bench` does? Minutes each, so on demand."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.cases import Case, Pins, Rack, Site, Suite, SuiteError
from conformance.homes import ROOT
from rackserve.base.units import NS_PER_MS, NS_PER_S
from rackserve.bench.metrics import tpot_ms
from rackserve.bench.records import RequestRecord, read_recording
from rackserve.model.files import open_model

REQUESTS = 15
CONCURRENCY = 1
"""More would meet in the queue, by chance: then a time to first token is one of two, and medians jump."""

INPUT = 1_000
OUTPUT = 25
SHARE = 0.05
"""By which a figure of theirs may differ from ours."""


def run_aiperf(site: Site) -> list[Case]:
    """As many requests of the same lengths by both, one after the other; the figures that both report."""
    rack = site.rack("paced")
    words: list[str | Path] = ["profile", "-m", rack.model, "--url", rack.url, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", open_model("embedded").path, "--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS)]
    words += ["--isl", str(INPUT), "--osl", str(OUTPUT), "--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    words += ["--ui-type", "none", "--output-artifact-dir", "theirs"]
    done = site.run([site.programs / "aiperf", *words], AIPERF_SERVICE_REGISTRATION_TIMEOUT="120", HOME=str(site.scratch))
    found = list(site.scratch.rglob("profile_export_aiperf.json"))
    if done.returncode or not found:
        raise SuiteError(f"aiperf ended with {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    theirs = json.loads(found[0].read_text())
    ours = _bench(site, rack)
    sides = {
        "input tokens": (theirs["input_sequence_length"]["avg"], statistics.mean(each.prompt_tokens for each in ours)),
        "output tokens": (theirs["output_sequence_length"]["avg"], statistics.mean(each.output_tokens for each in ours)),
        "median time to first token (ms)": (
            theirs["time_to_first_token"]["p50"],
            statistics.median((each.first_ns - each.sent_ns) / NS_PER_MS for each in ours),
        ),
        "median time per token (ms)": (
            theirs["inter_token_latency"]["p50"],
            statistics.median(time for each in ours if (time := tpot_ms(each)) is not None),
        ),
        "output tokens a second": (theirs["output_token_throughput"]["avg"], _throughput(ours)),
    }
    return [_agree(what, *figures) for what, figures in sides.items()]


def _agree(what: str, theirs: float, ours: float) -> Case:
    """A case that tells both figures, however it went."""
    near = abs(theirs - ours) <= SHARE * ours
    return Case(f"{what}: within {SHARE:.0%} of ours", "passed" if near else "failed", f"theirs {theirs:.4g}, ours {ours:.4g}")


def _bench(site: Site, rack: Rack) -> Sequence[RequestRecord]:
    """One-turn sessions of those lengths, replayed by `rackserve bench`."""
    folder = site.scratch / "trace"
    folder.mkdir()
    blocks = INPUT // 50
    for number in range(REQUESTS):
        ids = list(range(number * blocks + 1, (number + 1) * blocks + 1))
        request: dict[str, Any] = {
            "t": 0.0, "type": "s", "model": "m", "in": INPUT, "out": OUTPUT, "hash_ids": ids, "input_types": ["text"],
            "output_types": ["text"], "stop": "end_turn", "api_time": 1.0, "think_time": 0.0,
        }  # fmt: skip
        session = {"id": f"s{number}", "models": ["m"], "block_size": 50, "hash_id_scope": "local", "tool_tokens": 0,
                   "system_tokens": 0, "requests": [request]}  # fmt: skip
        (folder / f"s{number:03}.json").write_text(json.dumps(session))
    words = ["bench", "--url", rack.url, "--endpoint", "chat", "--trace", str(folder), "--scale", "1", "--time-scale", "1"]
    words += ["--concurrency", str(CONCURRENCY), "--out", "ours"]
    done = site.run([sys.executable, "-m", "rackserve", *words])
    if done.returncode:
        raise SuiteError(f"rackserve bench: {done.stderr[-500:]}")
    records = read_recording(site.scratch / "ours" / "live-bench.jsonl").requests
    if len(records) != REQUESTS or any(each.error for each in records):
        raise SuiteError(f"rackserve bench: {[each.error for each in records]}")
    return records


def _throughput(records: Sequence[RequestRecord]) -> float:
    """From the first sending to the last end."""
    took = max(each.ended_ns for each in records) - min(each.sent_ns for each in records)
    return sum(each.output_tokens for each in records) * NS_PER_S / took


def run_agentx(site: Site) -> list[Case]:
    """`benchmarks/agentx_agreement.py`, whose claims are the cases."""
    script = ROOT / "benchmarks" / "agentx_agreement.py"
    done = site.run([sys.executable, script, "--quick", "--json", "--harness", site.programs / "agentx"])
    try:
        result = json.loads(done.stdout)
    except ValueError:
        raise SuiteError(f"{script.name}: {done.stderr[-500:]}") from None
    medians = {each["what"]: statistics.median(each["values"]) for each in result["figures"]}
    return [
        Case(each["text"], "passed" if each["holds"] else "failed", _figures(each["text"], medians))
        for each in result["claims"]
    ]


def _figures(claim: str, medians: Mapping[str, float]) -> str:
    """Those that a claim is about: their names begin with words of it."""
    return "; ".join(f"{what} {value:.4g}" for what, value in medians.items() if what.split(" p")[0].split(",")[0] in claim)


SUITES = (
    Suite("aiperf", "NVIDIA's load generator", run_aiperf, Pins("pip", ("aiperf==0.13.0",), "aiperf"), 600.0, on_demand=True),
    Suite(
        "agentx", "the harness of AgentX, beside bench --agentx", run_agentx,
        Pins("pip", ("agentx-harness==1.0.12",), "agentx"), 900.0, on_demand=True,
    ),
)  # fmt: skip
