"""A GGUF file of a Llama model, turned into a Hugging Face folder: config.json, bf16 safetensors, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rackserve.base.errors import FileFormatError
from rackserve.model.config import LlamaConfig
from rackserve.model.loader.blocks import BLOCK_BYTES, BLOCKS_FILE

CONTROL_TOKEN = 3
USER_TOKEN = 4

TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) as the work goes on."""


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `source` to the existing `folder`. FileFormatError if it is no Llama with a gpt2 tokenizer."""
    try:
        reader = GGUFReader(str(source))
    except (OSError, ValueError, IndexError) as error:
        raise FileFormatError(f"{source}: not a readable GGUF file ({error}); fetch it again") from error
    meta = _Metadata(source, reader)
    config = _config(meta, {tensor.name for tensor in reader.tensors})
    tensors = {}
    for done, (name, tensor) in enumerate(_tensors(source, reader, config)):
        tensors[name] = tensor
        progress("dequantise", done + 1, len(reader.tensors))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    save_numpy(_blocks(reader, config), str(folder / BLOCKS_FILE))
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    bos, eos = meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]
    build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config.to_hf() | {"bos_token_id": bos, "eos_token_id": eos, "dtype": "bfloat16"})
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
            "chat_template": meta.get("tokenizer.chat_template", None),
        },
    )


class _Metadata:
    """The key-value part of the file; a missing key is a FileFormatError."""

    __slots__ = ("_reader", "_source")

    def __init__(self, source: Path, reader: GGUFReader) -> None:
        self._source = source
        self._reader = reader

    def get(self, key: str, default: object) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise self.error(f"metadata key {key} is missing")
        return value

    def require(self, key: str, wanted: str) -> None:
        if self[key] != wanted:
            raise self.error(f"{key} is {self[key]!r}, only {wanted!r} is supported")

    def error(self, problem: str) -> FileFormatError:
        return FileFormatError(f"{self._source}: {problem}; use another model file")


def _config(meta: _Metadata, names: set[str]) -> LlamaConfig:
    meta.require("general.architecture", "llama")
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        ffn_size=meta["llama.feed_forward_length"],
        num_layers=meta["llama.block_count"],
        num_heads=heads,
        num_kv_heads=meta.get("llama.attention.head_count_kv", heads),
        head_dim=meta.get("llama.rope.dimension_count", hidden // heads),
        max_positions=meta["llama.context_length"],
        rope_theta=float(meta.get("llama.rope.freq_base", 10_000.0)),
        norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        tied="output.weight" not in names,
    )


def _tensors(source: Path, reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights as bf16 under their Hugging Face names."""
    for entry in reader.tensors:
        name = entry.name.removesuffix(".weight")
        try:
            values = dequantize(entry.data, entry.tensor_type).astype(np.float32)
        except (NotImplementedError, ValueError) as error:
            raise FileFormatError(f"{source}: tensor {entry.name} has format {entry.tensor_type.name}: {error}") from error
        if name in OUTER_TENSORS:
            target = OUTER_TENSORS[name]
        elif name.startswith("blk.") and name.split(".", 2)[2] in TENSORS:
            _, layer, part = name.split(".", 2)
            target = f"model.layers.{layer}.{TENSORS[part]}"
            if part in ("attn_q", "attn_k"):
                values = unpermute(values, config.num_heads if part == "attn_q" else config.num_kv_heads)
        else:
            raise FileFormatError(f"{source}: tensor {entry.name} belongs to no Llama model; use another model file")
        yield f"{target}.weight", torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _blocks(reader: GGUFReader, config: LlamaConfig) -> dict[str, np.ndarray]:
    """The quantised matrices as they are in the file: uint8 [rows, groups, bytes of a block], under name and kind."""
    found = {}
    for entry in reader.tensors:
        kind = entry.tensor_type.name.lower()
        if kind not in BLOCK_BYTES:
            continue
        name = entry.name.removesuffix(".weight")
        rows = np.array(entry.data).reshape(entry.data.shape[0], -1)
        if name in OUTER_TENSORS:
            target = OUTER_TENSORS[name]
        else:
            _, layer, part = name.split(".", 2)
            target = f"model.layers.{layer}.{TENSORS[part]}"
            if part in ("attn_q", "attn_k"):
                rows = unpermute(rows, config.num_heads if part == "attn_q" else config.num_kv_heads)
        found[f"{target}.{kind}"] = np.ascontiguousarray(rows).reshape(len(rows), -1, BLOCK_BYTES[kind])
    return found


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix from GGUF's order (rotation pairs adjacent) to halves: [heads * d, in], same shape."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build_tokenizer(meta: _Metadata) -> Tokenizer:
    """The byte-pair tokenizer in the file's metadata: digits one by one, then byte level."""
    meta.require("tokenizer.ggml.model", "gpt2")
    meta.require("tokenizer.ggml.pre", "smollm")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    named = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL_TOKEN, USER_TOKEN)]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in named if kind == CONTROL_TOKEN]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == USER_TOKEN])
    return tokenizer


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
