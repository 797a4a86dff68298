"""The shape of a Llama-family model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from rackserve.base.errors import FileFormatError

LARGEST = {"max_position_embeddings": 2**22, "num_hidden_layers": 1024}
"""Beyond these a file is damaged: there are tables for all positions."""

MAX_SIZE = 2**31 - 1

FLOAT32 = 1e-37, 3.4e38
"""Between these a number keeps its size in single precision."""


class LlamaConfig(msgspec.Struct, frozen=True):
    """Sizes and constants of the model. `tied`: the output matrix is the embedding."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool

    def to_hf(self) -> dict[str, Any]:
        """The same as the fields of a `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
        }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. FileFormatError if it is missing, malformed or no object."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}); a model folder needs this file") from error
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{path}: holds a JSON {type(content).__name__}, not an object; fetch the file again")
    return content


def _size(path: Path, fields: dict[str, Any], name: str) -> int:
    """The field as a whole number above 0. KeyError if it is absent, FileFormatError if it is anything else."""
    value, most = fields[name], LARGEST.get(name, MAX_SIZE)
    if not isinstance(value, int) or not 1 <= value <= most:
        raise FileFormatError(
            f"{path}: {name} must be a whole number of at least 1 and at most {most}, got {value!r:.40}; fetch the file again"
        )
    return value


def _positive(path: Path, fields: dict[str, Any], name: str) -> float:
    """The field as a number of FLOAT32. KeyError if it is absent, FileFormatError if it is anything else."""
    value, (least, most) = fields[name], FLOAT32
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise FileFormatError(
            f"{path}: {name} must be a number from {least:g} to {most:g}, got {value!r:.40}; fetch the file again"
        )
    return float(value)


def read_config(path: Path) -> LlamaConfig:
    """The model described by the `config.json` at `path`. FileFormatError names the field that is missing or not supported."""
    fields = read_json(path)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise FileFormatError(f"{path}: rope_parameters must be an object, got {rope!r:.40}; fetch the file again")
    required = {
        "model_type": (fields.get("model_type"), "llama"),
        "hidden_act": (fields.get("hidden_act", "silu"), "silu"),
        "attention_bias": (fields.get("attention_bias", False), False),
        "mlp_bias": (fields.get("mlp_bias", False), False),
        "rope type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for field, (found, wanted) in required.items():
        if found != wanted:
            raise FileFormatError(f"{path}: {field} is {found!r}, only {wanted!r} is supported; use another model")
    source = fields if rope.get("rope_theta") is None else rope
    try:
        heads, hidden = _size(path, fields, "num_attention_heads"), _size(path, fields, "hidden_size")
        config = LlamaConfig(
            vocab_size=_size(path, fields, "vocab_size"),
            hidden_size=hidden,
            ffn_size=_size(path, fields, "intermediate_size"),
            num_layers=_size(path, fields, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_size(path, fields, "num_key_value_heads") if fields.get("num_key_value_heads") is not None else heads,
            head_dim=_size(path, fields, "head_dim") if fields.get("head_dim") is not None else hidden // heads,
            max_positions=_size(path, fields, "max_position_embeddings"),
            rope_theta=10_000.0 if source.get("rope_theta") is None else _positive(path, source, "rope_theta"),
            norm_eps=_positive(path, fields, "rms_norm_eps"),
            tied=fields.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise FileFormatError(f"{path}: field {error.args[0]} is missing; fetch the file again") from error
    try:
        config = msgspec.convert(msgspec.to_builtins(config), LlamaConfig)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{path}: {error}; fetch the file again") from error
    if config.head_dim % 2:
        raise FileFormatError(
            f"{path}: head_dim must be even, got {config.head_dim}: positions turn its halves; use another model"
        )
    if config.head_dim < 1 or config.num_heads % config.num_kv_heads:
        counts = f"{config.num_layers} layers, {config.num_heads} heads, {config.num_kv_heads} kv heads of {config.head_dim}"
        raise FileFormatError(f"{path}: {counts} make no model: heads must be a multiple of kv heads")
    return config
