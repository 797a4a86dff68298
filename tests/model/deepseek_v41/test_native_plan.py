"""The plan holds the checkpoint's numbers and refuses what the kernels do not know."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import v41_packing
from rackserve.kernels.cpu.v41 import NUMBERS, SIZES
from rackserve.model.deepseek_v41.native_plan import make_plan, packed
from rackserve.model.deepseek_v41.weights import Matrix, Packed, load_weights
from tests.model.deepseek_v41.golden import BLOCK_TOKENS, CONFIG, FILES, LAYOUT

WEIGHTS = load_weights(FILES.path, CONFIG, memory="stored")


def test_every_size_is_given_and_sources_lie_where_the_layout_has_them() -> None:
    plan = make_plan(CONFIG, WEIGHTS, BLOCK_TOKENS, round_inputs=False)
    assert set(plan.sizes) == {*SIZES, *NUMBERS} - {"max_rows", "experts"}
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


def test_a_scale_that_codes_cannot_be_read_with_makes_floats() -> None:
    codes = torch.ones(32, 32).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 140, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = packed(Matrix(Packed(codes, scale), "stored"))
    assert (found.kind, found.quantised) == (v41_packing.FLOAT, True)
    assert set(found.codes.view("f4").tolist()) == {2.0**13}


@pytest.mark.parametrize(("field", "value"), [("hc_mult", 2), ("vocab_size", 500), ("dspark_markov_rank", 24)])
def test_sizes_that_the_kernels_do_not_know_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}.*runner.kernels to torch"):
        make_plan(structs.replace(CONFIG, **{field: value}), WEIGHTS, BLOCK_TOKENS, round_inputs=False)
