"""A random two-layer Llama on disk, a plain implementation of it, and a wheel that holds it as GGUF."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rackserve.model.config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    ffn_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied=True,
)

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def random_weights(seed: int = 0, config: LlamaConfig = CONFIG) -> dict[str, Tensor]:
    """bf16 weights under their Hugging Face names; large enough that the output depends strongly on every position."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size

    def draw(*shape: int) -> Tensor:
        scale = 1.0 if len(shape) == 1 else 2.0 / shape[-1] ** 0.5
        return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": draw(config.vocab_size, hidden), "model.norm.weight": draw(hidden)}
    for number in range(config.num_layers):
        base = f"model.layers.{number}"
        tensors |= {
            f"{base}.input_layernorm.weight": draw(hidden),
            f"{base}.self_attn.q_proj.weight": draw(heads, hidden),
            f"{base}.self_attn.k_proj.weight": draw(kv, hidden),
            f"{base}.self_attn.v_proj.weight": draw(kv, hidden),
            f"{base}.self_attn.o_proj.weight": draw(hidden, heads),
            f"{base}.post_attention_layernorm.weight": draw(hidden),
            f"{base}.mlp.gate_proj.weight": draw(config.ffn_size, hidden),
            f"{base}.mlp.up_proj.weight": draw(config.ffn_size, hidden),
            f"{base}.mlp.down_proj.weight": draw(hidden, config.ffn_size),
        }
    return tensors


def write_folder(folder: Path, tensors: dict[str, Tensor] | None = None, config: LlamaConfig = CONFIG) -> Path:
    """A Hugging Face folder of the tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf() | {"bos_token_id": 1, "eos_token_id": 2}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(tensors if tensors is not None else random_weights(config=config), str(folder / "model.safetensors"))
    return folder


def naive_logits(tensors: dict[str, Tensor], ids: list[int], config: LlamaConfig = CONFIG) -> Tensor:
    """Logits of all positions by the textbook, in float64, one head at a time."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    d, shared = config.head_dim, config.num_heads // config.num_kv_heads
    angle = torch.outer(torch.arange(len(ids)).double(), config.rope_theta ** -(torch.arange(0, d, 2).double() / d))
    turn = torch.polar(torch.ones_like(angle), angle)
    future = torch.ones(len(ids), len(ids)).triu(1).bool()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[f"{name}.weight"]

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[:, : d // 2], x[:, d // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = w["model.embed_tokens.weight"][ids]
    for number in range(config.num_layers):
        base = f"model.layers.{number}"
        y = norm(x, f"{base}.input_layernorm")
        q, k, v = ((y @ w[f"{base}.self_attn.{name}_proj.weight"].T).split(d, -1) for name in "qkv")
        mixed = []
        for head in range(config.num_heads):
            scores = rotate(q[head]) @ rotate(k[head // shared]).T / d**0.5
            mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[head // shared])
        x = x + torch.cat(mixed, -1) @ w[f"{base}.self_attn.o_proj.weight"].T
        y = norm(x, f"{base}.post_attention_layernorm")
        gate, up = (y @ w[f"{base}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"{base}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["model.embed_tokens.weight"].T


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows in GGUF's order, one by one: pair i of a head is rows 2i and 2i + 1."""
    size = len(weight) // heads
    order = [head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)]
    return weight[order]


def write_gguf(path: Path, pre: str = "smollm", arch: str = "llama", extra: str | None = None) -> Path:
    """The tiny model as a GGUF file with a byte-level tokenizer of 96 tokens; `extra` adds a tensor of that name."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.max_positions)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.ffn_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_rope_dimension_count(CONFIG.head_dim)
    writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "Ċ", "he", "ll", "hell", "<tool>"]
    tokens += [chr(33 + number) for number in range(CONFIG.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 4] + [1] * (len(tokens) - 9))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in random_weights().items():
        values = tensor.float().numpy()
        base = name.removesuffix(".weight")
        if base.endswith(("q_proj", "k_proj")):
            values = interleave(values, CONFIG.num_heads if base.endswith("q_proj") else CONFIG.num_kv_heads)
        if base.startswith("model.layers."):
            _, _, number, part = base.split(".", 3)
            writer.add_tensor(f"blk.{number}.{GGUF_NAMES[part]}.weight", values)
        else:
            writer.add_tensor(f"{GGUF_NAMES[base]}.weight", values)
    if extra:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(path: Path, content: Path | None) -> Path:
    """A wheel that holds `content` (a GGUF file) or nothing."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/__init__.py", "")
        if content:
            archive.write(content, "tiny/tiny.gguf")
    return path
