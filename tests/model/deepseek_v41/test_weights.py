"""Weights are the checkpoint's numbers exactly, however they are held, cut or laid out in the file."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rackserve.base.errors import ConfigError
from rackserve.model.deepseek_v41.inventory import inventory
from rackserve.model.deepseek_v41.options import WeightMemory
from rackserve.model.deepseek_v41.weights import Packed, Weights, load_weights
from rackserve.model.loader.folder import SINGLE_NAME
from rackserve.model.parallel import Share

from .safetensors_files import GOLDEN, golden_config, golden_tensors, write_shards, write_tensors

CONFIG = golden_config()
TENSORS = inventory(CONFIG)
TABLES = ("embed", "mtp.2.markov_head.embed")
MATRICES = [
    name.removesuffix(".weight")
    for name, spec in TENSORS.items()
    if name.endswith(".weight") and len(spec.shape) == 2 and not name.endswith("embed.weight")
]
VECTORS = [
    name.removesuffix(".weight")
    for name, spec in TENSORS.items()
    if not name.endswith(".scale") and (len(spec.shape) == 1 or not name.endswith(".weight"))
]


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    return load_file(GOLDEN / SINGLE_NAME)


@pytest.fixture(scope="module")
def whole() -> Weights:
    return load_weights(GOLDEN, CONFIG)


def e2m1(code: int) -> float:
    """The number of a 4-bit code: sign, 2 bits of exponent, 1 of mantissa; bias 1."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if code & 8 else size


def dequantised(stored: dict[str, Tensor], name: str) -> Tensor:
    """A matrix by torch's own casts, each scale repeated over the numbers it belongs to."""
    weight, scale = stored[f"{name}.weight"], stored.get(f"{name}.scale")
    if scale is None:
        return weight.float()
    if weight.dtype != torch.int8:
        return weight.float() * scale.float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    codes = weight.view(torch.uint8).numpy()
    numbers = np.array([[e2m1(code & 15), e2m1(code >> 4)] for code in range(256)], np.float32)[codes]
    return torch.from_numpy(numbers.reshape(len(codes), -1)) * scale.float().repeat_interleave(32, 1)


@pytest.mark.parametrize("memory", ["widened", "stored"])
def test_every_matrix_is_the_stored_one_turned_round(memory: WeightMemory, stored: dict[str, Tensor]) -> None:
    weights = load_weights(GOLDEN, CONFIG, memory=memory)
    for name in MATRICES:
        matrix, expected = weights.matrix(name), dequantised(stored, name)
        right = matrix.right()
        assert right.dtype == torch.float32 and right.is_contiguous(), name
        assert torch.equal(right, expected.t()) and matrix.shape == tuple(expected.shape), name
        assert matrix.quantised == (f"{name}.scale" in stored), name


def test_every_vector_and_table_is_the_stored_one(whole: Weights, stored: dict[str, Tensor]) -> None:
    for name in VECTORS:
        expected = stored[name if name in stored else f"{name}.weight"].float()
        assert whole.vector(name).dtype == torch.float32 and torch.equal(whole.vector(name), expected), name
    assert {"layers.3.engram.q_weight", "layers.3.hc_attn_fn", "layers.3.ffn.gate.bias", "layers.3.attn_norm"} <= set(VECTORS)
    ids = torch.tensor([[0, 511], [7, 7]])
    for name in TABLES:
        assert torch.equal(whole.rows(name, ids), stored[f"{name}.weight"][ids].float())
        assert whole.num_rows(name) == 512


def test_every_loaded_tensor_has_one_way_to_be_read(whole: Weights) -> None:
    loaded = {name.removesuffix(".weight") for name, spec in TENSORS.items() if not spec.table and not name.endswith(".scale")}
    assert loaded == {*MATRICES, *VECTORS, *TABLES} and all(map(whole.has, loaded))
    for absent in ("layers.1.engram.embed", "layers.0.attn.wq_a.scale", "layers.0.attn.wq_a.weight", "layers.9.attn_norm"):
        assert not whole.has(absent)
    with pytest.raises(KeyError):
        whole.matrix("embed")


def test_fp8_numbers_and_scales_are_those_of_their_formats() -> None:
    weight = torch.arange(256, dtype=torch.uint8).repeat(4).view(32, 32).view(torch.float8_e4m3fn)
    for byte in (0, 1, 100, 127, 130, 246):
        wide = Packed(weight, torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)).widen()
        for code, number in enumerate(wide.flatten()[:256].tolist()):
            sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
            if (exponent, mantissa) == (15, 7):
                assert np.isnan(number)
                continue
            size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            assert number == float(np.float32((-size if sign else size) * 2.0 ** (byte - 127))), (byte, code)


def test_an_fp4_byte_holds_its_first_number_in_its_low_half() -> None:
    weight = torch.full((1, 16), 0x92 - 256, dtype=torch.int8)
    scale = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert Packed(weight, scale).widen().tolist() == [[2.0, -1.0] * 16]


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("memory", ["widened", "stored"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 4), (2, 2)])
def test_the_shares_of_a_group_put_together_are_the_whole(tp: int, ep: int, memory: WeightMemory, whole: Weights) -> None:
    group = [[load_weights(GOLDEN, CONFIG, Share(t, tp, e, ep), memory) for t in range(tp)] for e in range(ep)]
    for name in MATRICES:
        spec = TENSORS[f"{name}.weight"]
        holders = [rank for rank in group if rank[0].has(name)]
        if spec.num_experts:
            assert [group.index(rank) for rank in holders] == [spec.expert * ep // spec.num_experts], name
        else:
            assert len(holders) == ep, name
        for rank in holders:
            parts = [device.matrix(name).right() for device in rank]
            shapes = [device.matrix(name).shape for device in rank]
            assert [part.shape for part in parts] == [shape[::-1] for shape in shapes], name
            if spec.cut == "whole":
                assert all(torch.equal(part, whole.matrix(name).right()) for part in parts), name
            else:
                joined = torch.cat(parts, dim=1 if spec.cut == "rows" else 0)  # a right side is turned round
                assert torch.equal(joined, whole.matrix(name).right()) and len(set(shapes)) == 1, name


def test_vectors_are_whole_but_for_sinks_and_rows_are_local() -> None:
    whole, parts = load_weights(GOLDEN, CONFIG), [load_weights(GOLDEN, CONFIG, Share(t, 2)) for t in range(2)]
    for name in VECTORS:
        found = [part.vector(name) for part in parts]
        if name.endswith("attn_sink"):
            assert torch.equal(torch.cat(found), whole.vector(name))
        else:
            assert all(torch.equal(part, whole.vector(name)) for part in found), name
    for name in TABLES:
        assert [part.num_rows(name) for part in parts] == [256, 256]
        assert torch.equal(parts[1].rows(name, torch.tensor([3])), whole.rows(name, torch.tensor([259])))


def test_a_group_that_the_model_cannot_be_cut_for_is_refused_before_the_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor parallel 4"):
        load_weights(tmp_path, CONFIG, Share(0, 4))


# ---------------------------------------------------------------- files


def test_whole_rows_stay_on_the_pages_of_the_file() -> None:
    name = "layers.3.attn.wq_b"
    weights = load_weights(GOLDEN, CONFIG, Share(1, 2), "stored")
    held = weights.matrix(name)._packed
    start = np.frombuffer(weights.checkpoint.view(f"{name}.weight"), np.uint8).ctypes.data
    assert held is not None and held.weight.data_ptr() == start + held.weight.numel()  # the second half of the rows


def test_nothing_read_from_a_map_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(GOLDEN, CONFIG)


@pytest.mark.parametrize("pad", [1, 2, 3])
def test_tensors_may_lie_at_any_offset(pad: int, tmp_path: Path, whole: Weights) -> None:
    tensors = golden_tensors()
    write_tensors(tmp_path / SINGLE_NAME, dict(sorted(tensors.items())), pad)
    weights = load_weights(tmp_path, CONFIG)
    assert any(weights.checkpoint.location(name)[1] % 4 for name, (dtype, _, _) in tensors.items() if dtype == "F32")
    assert all(torch.equal(weights.vector(name), whole.vector(name)) for name in VECTORS)
    assert all(torch.equal(weights.matrix(name).right(), whole.matrix(name).right()) for name in MATRICES)


def test_shards_hold_the_same_weights(tmp_path: Path, whole: Weights) -> None:
    write_shards(tmp_path, 4)
    weights = load_weights(tmp_path, CONFIG, memory="stored")
    assert all(torch.equal(weights.matrix(name).right(), whole.matrix(name).right()) for name in MATRICES)
