"""Measured times per output token of engines that mix prefill and decode, beside the cost model's.

The table is that of AIConfigurator (`silicon_sample.csv`): one row per model, system, engine, parallelism and load.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from rackserve.architectures import architecture_named
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.base.topology import Role
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.load import decode_load, prefill_load
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.hardware import chips
from rackserve.validation.agreement import Agreement, agreement
from rackserve.validation.mixed_time import MixedTime
from rackserve.validation.silicon_ttft import closed_loop_ttft

MODELS = {
    ("deepseek-ai/DeepSeek-R1", "fp8"): "deepseek-v3",
    ("deepseek-ai/DeepSeek-V3", "fp8"): "deepseek-v3",
    ("Qwen/Qwen3-32B", ""): "qwen3-32b",
    ("meta-llama/Llama-3.1-8B-Instruct", ""): "llama-3.1-8b",
}
"""Models, in the precision of their checkpoint, of which the cost model has the sizes."""

CHIPS = {
    "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200", "gb300": "gb300",
}  # fmt: skip
MOST_CHIPS = 16
"""Rows of one engine over more chips than that are disaggregated ones under a wrong name."""

COLUMNS = ("model_path", "system", "precision", "mode", "backend", "isl", "osl", "batch_size", "tp_size",
           "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms")  # fmt: skip

Outcome = Literal[
    "used", "another mode", "another model or precision", "another chip", "parallelism that does not add up", "no time given"
]


class SiliconGroup(msgspec.Struct, frozen=True):
    """One model on one chip under one engine: times per output token by decode steps alone, and with prompts mixed in.

    ttft   times to first token of a closed loop of as many requests as the batch is large (see `silicon_ttft`)

    No coefficient was ever fitted to any of these models, so none of this is calibrated.
    """

    model: str
    chip: str
    engine: str
    decode: Agreement
    mixed: Agreement
    ttft: Agreement


class Silicon(msgspec.Struct, frozen=True):
    """All groups, and how many rows were used or left out why."""

    groups: tuple[SiliconGroup, ...]
    outcomes: dict[str, int]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of the table, plain or gzip. FileFormatError names what is missing."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: cannot be read ({error}); give AIConfigurator's silicon_sample.csv") from None
    rows = list(csv.DictReader(io.StringIO(text)))
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise FileFormatError(f"{path}: has no column {missing[0]} or no row; give AIConfigurator's silicon_sample.csv")
    return rows


def compare_silicon(path: Path) -> Silicon:
    """Times per output token of the table's rows against the cost model's."""
    outcomes: Counter[str] = Counter()
    pairs: dict[tuple[str, str, str], list[tuple[float, float, float, float, float]]] = {}
    for number, row in enumerate(read_rows(path), 2):
        outcome = _outcome(row)
        outcomes[outcome] += 1
        if outcome != "used":
            continue
        key = (MODELS[row["model_path"], row["precision"]], CHIPS[row["system"]], row["backend"])
        try:
            tpots, measured = _tpot_ms(row, key[0], key[1]), (float(row["silicon_tpot_ms"]), float(row["silicon_ttft_ms"]))
            pairs.setdefault(key, []).append((*tpots, _ttft_ms(row, key[0], key[1]), *measured))
        except (ValueError, ZeroDivisionError, ConfigError) as error:
            raise FileFormatError(f"{path}:{number}: {error}; correct or remove this row") from None
    groups = []
    for key, found in sorted(pairs.items()):
        decode, mixed, ttft, tpot_measured, ttft_measured = zip(*found, strict=True)
        groups.append(
            SiliconGroup(
                *key, agreement(decode, tpot_measured), agreement(mixed, tpot_measured), agreement(ttft, ttft_measured)
            )
        )
    return Silicon(tuple(groups), dict(outcomes))


def _outcome(row: dict[str, str]) -> Outcome:
    if row["mode"] != "agg":
        return "another mode"
    if (row["model_path"], row["precision"]) not in MODELS:
        return "another model or precision"
    if row["system"] not in CHIPS:
        return "another chip"
    if not (float(row["silicon_tpot_ms"] or 0) > 0 and float(row["silicon_ttft_ms"] or 0) > 0):
        return "no time given"
    tp, ranks = _parallel(row)
    experts = MODELS[row["model_path"], row["precision"]] == "deepseek-v3"
    if tp * ranks > MOST_CHIPS or (experts and tp * ranks != int(row["moe_tp_size"]) * int(row["moe_ep_size"])):
        return "parallelism that does not add up"
    return "used"


def _parallel(row: dict[str, str]) -> tuple[int, int]:
    """(chips of a rank, ranks)"""
    return max(1, int(row["tp_size"] or 1)), max(1, int(row["attention_dp_size"] or 1))


def _tpot_ms(row: dict[str, str], model: str, chip_name: str) -> tuple[float, float]:
    """Milliseconds per output token: of decode steps alone, and with the prompts that come in between.

    A rank decodes its share of the batch at half its output. For each step, batch / output tokens prompts come in; their
    operators' time is added, without the base of a step of their own.
    """
    tp, ranks = _parallel(row)
    chip = chips()[chip_name]

    def step(role: Role) -> StepModel:
        kernels = kernel_sets()[chip.kernels]
        return StepModel(Setup(architecture=architecture_named(model), chip=chip, kernels=kernels, role=role, tp=tp, ep=ranks))

    batch, prompt, output = max(1.0, int(row["batch_size"]) / ranks), int(row["isl"]), int(row["osl"])
    decode = step("decode").seconds([decode_load(batch, batch * (prompt + output / 2), 1)])
    terms = step("prefill").terms([prefill_load(prompt)])
    prefill = sum(term.seconds for term in terms if term.name != "step base")
    return decode * 1e3, (decode + batch / output * prefill) * 1e3


def _ttft_ms(row: dict[str, str], model: str, chip_name: str) -> float:
    """Milliseconds to the first token in a closed loop of one rank, the others being alike."""
    tp, ranks = _parallel(row)
    time = MixedTime(architecture_named(model), chip_name, tp=tp, ep=ranks)
    return 1e3 * closed_loop_ttft(time, max(1, int(row["batch_size"]) // ranks), int(row["isl"]), int(row["osl"]))
