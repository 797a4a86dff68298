"""The plan holds the checkpoint's numbers and refuses what the kernels do not know."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from msgspec import structs

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import v41_packing
from rackserve.kernels.cpu.v41 import NUMBERS, SIZES
from rackserve.kernels.cpu.v41_tuning import ALL_ON
from rackserve.model.deepseek_v41.native_plan import make_plan, packed
from rackserve.model.deepseek_v41.weights import Matrix, Packed, load_weights
from tests.model.deepseek_v41.golden import BLOCK_TOKENS, CONFIG, FILES, LAYOUT

WEIGHTS = load_weights(FILES.path, CONFIG, memory="stored")


def test_every_size_is_given_and_sources_lie_where_the_layout_has_them() -> None:
    plan = make_plan(CONFIG, WEIGHTS, BLOCK_TOKENS, round_inputs=False)
    given_by_the_step = {"max_rows", "experts", *asdict(ALL_ON)}
    assert set(plan.sizes) == {*SIZES, *NUMBERS} - given_by_the_step
    places, at = {}, 0
    for group in LAYOUT.groups:
        places[group.name] = at
        at += group.bytes_per_slot
    for source, compressor in zip(CONFIG.kv_source_layer_ids, plan.compressors, strict=True):
        assert (compressor.main, compressor.index) == (places[f"main.{source}"], places[f"index.{source}"])


def test_matrices_keep_the_format_they_are_stored_in() -> None:
    kinds = {
        "layers.0.attn.wq_a": v41_packing.F8,
        "layers.0.ffn.experts.3.w2": v41_packing.F4,
        "layers.0.ffn.gate": v41_packing.B16,
    }
    for name, kind in kinds.items():
        assert packed(WEIGHTS.matrix(name)).kind == kind


@pytest.mark.parametrize(
    ("number", "exponent", "kind"),
    [(1.0, 140, v41_packing.B16), (2.0**-9, 127, v41_packing.B16), (2.0**-9, 0, v41_packing.FLOAT)],
)
def test_codes_that_are_not_read_well_are_widened_and_not_rounded(number: float, exponent: int, kind: int) -> None:
    codes = torch.full((32, 32), number).to(torch.float8_e4m3fn)
    stored = Packed(codes, torch.full((1, 1), exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    found = packed(Matrix(stored, "stored"))
    assert (found.kind, found.quantised) == (kind, True)
    bits = torch.from_numpy(found.codes)
    numbers = bits.view(torch.bfloat16).float() if kind == v41_packing.B16 else bits.view(torch.float32)
    assert torch.equal(numbers.sort().values, stored.widen().flatten().sort().values)


@pytest.mark.parametrize(("field", "value"), [("hc_mult", 2), ("vocab_size", 500), ("dspark_markov_rank", 24)])
def test_sizes_that_the_kernels_do_not_know_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}.*runner.kernels to torch"):
        make_plan(structs.replace(CONFIG, **{field: value}), WEIGHTS, BLOCK_TOKENS, round_inputs=False)
