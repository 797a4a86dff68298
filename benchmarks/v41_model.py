"""A DeepSeek-V4.1 checkpoint of 130 million random weights in the released layout, and sequences that run through a model."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rackserve.base.step import Step, StepItem, StepResult
from rackserve.kernels.cpu.v41_tuning import ALL_ON, Tuning
from rackserve.model.deepseek_v41.config import DeepseekV41Config, read_config
from rackserve.model.deepseek_v41.engram.ngrams import column_primes
from rackserve.model.deepseek_v41.engram.vocabulary import MAP_FILE
from rackserve.model.deepseek_v41.inventory import TensorSpec, inventory
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.rounding import pack_fp4
from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
from rackserve.model.files import ModelFiles, open_model
from rackserve.model.loader.folder import SINGLE_NAME
from rackserve.model.parallel import Collectives
from rackserve.model.runner import Kernels

BLOCK_TOKENS = 32

TEXT = {
    "vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "head_dim": 128,
    "qk_rope_head_dim": 32, "q_lora_rank": 256, "o_groups": 4, "o_lora_rank": 128, "moe_intermediate_size": 256,
    "n_routed_experts": 16, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20, "sliding_window": 64, "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 5, 8], "index_source_layer_ids": [2, 5, 8, 10], "index_n_heads": 8, "index_head_dim": 64,
    "index_topk": 64, "candidate_source_layer_id": 8, "candidate_topk_blocks": 32, "candidate_block_size": 8,
    "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 512},
    "max_position_embeddings": 8192, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "engram_layer_ids": [1, 5],
    "engram_num_embeddings": [1, 1], "engram_max_ngram_size": 4, "engram_vocab_size": 2000, "engram_n_heads": 4,
    "engram_head_dim": 64, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 12000, "num_nextn_predict_layers": 3,
    "dspark_block_size": 5, "dspark_noise_token_id": 16000, "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 64, "dspark_n_routed_experts": 6, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
"""About the released model's proportions, a tenth of its width; experts are few, and each takes part in more rows."""


def write_model(folder: Path, seed: int) -> ModelFiles:
    """The model of `seed` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = column_primes(_config(folder, TEXT)).sum(1).tolist()
    config = _config(folder, {**TEXT, "engram_num_embeddings": rows})
    generator = torch.Generator().manual_seed(seed)
    compressed = np.random.default_rng(seed).integers(0, config.engram_compressed_vocab_size, config.vocab_size, np.int32)
    np.save(folder / MAP_FILE, compressed)
    specs = inventory(config)
    made = {name: content for name in specs for name, content in _tensors(name, specs, generator)}
    header, at = {}, 0
    for name, content in made.items():
        spec = specs[name]
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / SINGLE_NAME).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for content in made.values():
            file.write(content)
    return open_model(str(folder))


def _config(folder: Path, text: dict[str, object]) -> DeepseekV41Config:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v41", "eos_token_id": 1, "bos_token_id": 0, "text_config": text}))
    return read_config(path)


def _tensors(name: str, specs: dict[str, TensorSpec], generator: torch.Generator) -> Iterator[tuple[str, bytes]]:
    """A tensor and its scales: numbers that keep a normal row's size, norms near 1."""
    spec, scale = specs[name], f"{name.removesuffix('weight')}scale"
    if spec.dtype == "F8_E8M0":
        return
    rows, width = spec.shape[0], spec.shape[-1] * (2 if spec.dtype == "I8" else 1)
    numbers = torch.randn(*spec.shape[:-1], width, generator=generator)
    if len(spec.shape) == 1 or "k_weight" in name or "q_weight" in name:
        numbers = 1 + numbers / 10 if "norm" in name or "_weight" in name or name.endswith("_scale") else numbers / 10
    elif not name.endswith("embed.weight"):
        numbers = numbers / width**0.5
    if spec.dtype == "F8_E4M3" and not spec.table:
        tiles = numbers.view(rows // 32, 32, width // 32, 32)
        exponent = (tiles.abs().amax((1, 3)) / 448).log2().ceil().int()
        yield name, _raw((tiles / 2.0 ** exponent[:, None, :, None]).view(rows, width).to(torch.float8_e4m3fn))
        yield scale, _raw((exponent + 127).to(torch.uint8))
    elif spec.dtype == "F8_E4M3":
        yield name, _raw((numbers * 100).clamp(-448, 448).to(torch.float8_e4m3fn))
        yield scale, bytes([127 - 7]) * (specs[scale].shape[0] * specs[scale].shape[1])
    elif spec.dtype == "I8":
        packed = pack_fp4(numbers)
        yield name, _raw(packed[:, : width // 2])
        yield scale, _raw(packed[:, width // 2 :])
    else:
        yield name, _raw(numbers.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32))


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Sequences:
    """`batch` sequences of `context` tokens, and room for `extra` more each, on one runner."""

    def __init__(
        self,
        files: ModelFiles,
        kernels: Kernels,
        batch: int,
        context: int,
        options: RunnerOptions | None = None,
        extra: int = 512,
        collectives: Collectives | None = None,
        tuning: Tuning = ALL_ON,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> None:
        config = files.deepseek_v41
        self.context, self._vocab = context, config.vocab_size
        self._each = -(-(context + extra) // BLOCK_TOKENS)
        self._room = self._each * BLOCK_TOKENS - config.dspark_block_size - 1
        layout, blocks = kv_layout(config, BLOCK_TOKENS), batch * self._each
        memory = memoryview(bytearray(blocks * layout.block_bytes))
        options = options or RunnerOptions()
        self.runner = DeepseekV41Runner(
            files,
            memory,
            blocks,
            BLOCK_TOKENS,
            options,
            collectives,
            kernels=kernels,
            threads=threads,
            cores=cores,
            tuning=tuning,
        )
        self._ends: dict[int, int] = {}
        self._made: dict[int, int] = {}

    def prefill(self, sequence: int, chunk: int = 256) -> None:
        """Compute the prompt of `sequence`; its blocks are the same every time."""
        ids = array("i", (3 + (at * 7_919 + sequence * 104_729) % (self._vocab - 3) for at in range(self.context)))
        table = tuple(range(sequence * self._each, (sequence + 1) * self._each))
        for start in range(0, self.context, chunk):
            end = min(start + chunk, self.context)
            blocks = table if start == 0 else ()
            item = StepItem(sequence, start, end - start, ids[start:end].tobytes(), blocks, end == self.context)
            self.runner.run(Step(0, (item,), (sequence,) if start == 0 and sequence in self._ends else ()))
        self._ends[sequence], self._made[sequence] = self.context, 1

    def decode(self, batch: int, num_draft: int = 0) -> int:
        """One step of sequences 0 .. batch - 1; those without room start over. Returns how many tokens it made."""
        for number in range(batch):
            if self._ends[number] >= self._room:
                self.prefill(number)
        items = tuple(
            StepItem(number, self._ends[number], 1, b"", (), True, output_index=self._made[number], num_draft=num_draft)
            for number in range(batch)
        )
        return self._count(self.runner.run(Step(0, items)), range(batch))

    def _count(self, result: StepResult, numbers: Sequence[int]) -> int:
        for number, item in zip(numbers, result.items, strict=True):
            self._ends[number] += len(item.tokens)
            self._made[number] += len(item.tokens)
        return sum(len(item.tokens) for item in result.items)
