from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rackserve.model.attention import Span
from rackserve.model.config import LlamaConfig
from rackserve.model.kv_arena import KvArena
from rackserve.model.layout import KvDtype, kv_layout
from rackserve.model.llama import Llama, LlamaWeights, load_weights
from tests.model import tiny

BF16_BOUND = 0.15
"""How far rounding keys and values to bf16 may move a logit of 10 to 35; measured: 0.084."""


def build(weights: LlamaWeights, dtype: KvDtype, num_blocks: int = 24) -> Llama:
    config: LlamaConfig = weights.config
    memory = bytearray(num_blocks * kv_layout(config, 16, dtype).block_bytes)
    return Llama(weights, KvArena(memoryview(memory), config, num_blocks, 16, dtype))


@torch.inference_mode()
def logits_of(llama: Llama, ids: list[int], wanted: list[int]) -> Tensor:
    hidden = llama.forward(torch.tensor(ids), [Span(range(24), 0, len(ids))])
    return llama.logits(hidden, torch.tensor(wanted))


@torch.inference_mode()
def test_all_logits_are_those_of_a_textbook_llama(tiny_weights: LlamaWeights) -> None:
    ids = [(7 * at * at + 3) % 96 for at in range(150)]
    ours = logits_of(build(tiny_weights, "fp32"), ids, list(range(150)))
    torch.testing.assert_close(ours, tiny.naive_logits(tiny.random_weights(), ids).float(), rtol=1e-4, atol=1e-3)


def test_an_untied_head_is_used(tmp_path: Path) -> None:
    config = msgspec.structs.replace(tiny.CONFIG, tied=False)
    tensors = tiny.random_weights()
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    weights = load_weights(tiny.write_folder(tmp_path, tensors, config), config)
    ours = logits_of(build(weights, "fp32"), [5, 6, 7], [0, 2])
    torch.testing.assert_close(ours, -tiny.naive_logits(tensors, [5, 6, 7])[[0, 2]].float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 2e-3), ("bf16", BF16_BOUND)])
@pytest.mark.parametrize("name", ["fact", "code", "chat", "long"])
def test_the_embedded_model_computes_what_transformers_computes(
    smollm2_weights: LlamaWeights, golden: dict[str, Any], name: str, dtype: KvDtype, bound: float
) -> None:
    prompt = golden[name]
    found = logits_of(build(smollm2_weights, dtype), prompt["ids"], [entry["at"] for entry in prompt["positions"]])
    for row, entry in zip(found, prompt["positions"], strict=True):
        torch.testing.assert_close(row[entry["ids"]], torch.tensor(entry["logits"]), rtol=0, atol=bound)
        # Where the best are well apart, they must also be the best here.
        if entry["logits"][0] - entry["logits"][1] > 2 * bound:
            assert int(row.argmax()) == entry["ids"][0]


@torch.inference_mode()
def test_rows_of_the_embedded_models_products_do_not_depend_on_each_other(smollm2_weights: LlamaWeights) -> None:
    layer = smollm2_weights.layers[7]
    generator = torch.Generator().manual_seed(1)
    mm = smollm2_weights.products.mm
    for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down, smollm2_weights.head):
        rows = torch.randn(75, len(matrix), generator=generator)
        whole = mm(rows, matrix)
        for first, count in ((0, 3), (7, 4), (3, 6), (21, 20), (1, 37), (5, 70)):
            found = mm(rows[first : first + count], matrix)
            assert torch.equal(found, whole[first : first + count]), (tuple(matrix.shape), first, count)


def test_the_bits_of_a_logit_do_not_depend_on_sizes_no_vector_divides(tmp_path: Path) -> None:
    config = msgspec.structs.replace(tiny.CONFIG, hidden_size=37, ffn_size=43)
    weights = load_weights(tiny.write_folder(tmp_path, config=config), config)
    ids = [(11 * at * at + 5) % 96 for at in range(70)]
    whole = logits_of(build(weights, "fp32"), ids, list(range(70)))
    for count in (1, 2, 3, 6, 17, 40, 69):
        assert torch.equal(logits_of(build(weights, "fp32"), ids[:count], list(range(count))), whole[:count]), count
