"""Llama on the native kernels: the same forward pass as `llama`, one call a step, weights as the model file has them.

Matrices keep the blocks of a converted GGUF file (Q4_1, Q8_0) or the bf16 of a Hugging Face folder. With blocks, what is
multiplied by them is rounded to 16 bits, row by row; for the Q4_1 matrices of an MLP to 8 bits in groups of 32,
but 16 bits in groups that stick out (src/matrix.h). Attention over bf16 KV is in 16-bit whole numbers (src/attention.h).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import library, packing
from rackserve.kernels.cpu.decoder import Decoder, DecoderLayer, DecoderWeights, Packed, Rows
from rackserve.kernels.cpu.library import Floats
from rackserve.model.attention import Span
from rackserve.model.config import LlamaConfig
from rackserve.model.layout import KvDtype
from rackserve.model.loader.blocks import Blocks
from rackserve.model.loader.safetensors import TensorFiles
from rackserve.model.products import Mode
from rackserve.model.sampler import Picks

KINDS: dict[str, tuple[int, Callable[[packing.Bytes], packing.Bytes]]] = {
    "q4_1": (packing.Q4, packing.pack_q4_1),
    "q8_0": (packing.Q8, packing.pack_q8_0),
}
MAX_ROWS = 512
"""Positions of a step that buffers are made for at first; a longer step makes larger ones."""

NO_HIDDEN = torch.empty(0)
"""What a pass leaves stays in its buffers."""


def load_native(folder: Path, config: LlamaConfig) -> DecoderWeights:
    """Weights packed for the kernels. ConfigError for shapes they do not know, FileFormatError naming file and tensor."""
    hidden, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    with TensorFiles(folder) as files:
        blocks = Blocks(folder)

        def matrix(*parts: tuple[str, int], inner: int, eight: bool = False) -> Packed:
            found = blocks.find(parts, inner)
            if found is None:
                return _bf16(files, parts, inner)
            kind, pack = KINDS[found[0]]
            return Packed(pack(np.concatenate(found[1])), packing.Q4_EIGHT if eight and kind == packing.Q4 else kind)

        def norm(name: str) -> Floats:
            return np.asarray(files.read(f"{name}.weight", (hidden,)).float().numpy(), np.float32)

        def layer(number: int) -> DecoderLayer:
            base = f"model.layers.{number}"
            attention, mlp = f"{base}.self_attn", f"{base}.mlp"
            qkv = ((f"{attention}.q_proj", heads), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv))
            gate_up = ((f"{mlp}.gate_proj", config.ffn_size), (f"{mlp}.up_proj", config.ffn_size))
            return DecoderLayer(
                attention_norm=norm(f"{base}.input_layernorm"),
                ffn_norm=norm(f"{base}.post_attention_layernorm"),
                qkv=matrix(*qkv, inner=hidden),
                output=matrix((f"{attention}.o_proj", hidden), inner=heads),
                gate_up=matrix(*gate_up, inner=hidden, eight=True),
                down=matrix((f"{mlp}.down_proj", hidden), inner=config.ffn_size, eight=True),
            )

        embedding = matrix(("model.embed_tokens", config.vocab_size), inner=hidden)
        layers = tuple(layer(number) for number in range(config.num_layers))
        # After the files were found to have that head size.
        inverse = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(config.max_positions).float(), inverse)
        return DecoderWeights(
            hidden=hidden,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn=config.ffn_size,
            vocab=config.vocab_size,
            norm_eps=config.norm_eps,
            layers=layers,
            norm=norm("model.norm"),
            embedding=embedding,
            head=embedding if config.tied else matrix(("lm_head", config.vocab_size), inner=hidden),
            cosine=angles.cos().numpy(),
            sine=angles.sin().numpy(),
        )


def _bf16(files: TensorFiles, parts: Sequence[tuple[str, int]], inner: int) -> Packed:
    read = [files.read(f"{name}.weight", (rows, inner)).to(torch.bfloat16) for name, rows in parts]
    bits = torch.cat(read).view(torch.int16).numpy().view(np.uint16)
    return Packed(packing.pack_bf16(bits), packing.BF16)


class NativeLlama:
    """The forward pass over one arena, for `LlamaRunner`. Results of a row depend on its sequence alone.

    ConfigError if no kernels were built, or they do not know such shapes.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        arena: memoryview | mmap.mmap,
        block_tokens: int,
        dtype: KvDtype,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> None:
        found = library.find()
        if found is None:
            raise ConfigError(f"{library.missing()}, or set runner.kernels to torch")
        self._library = found
        wide = 2 if dtype == "bf16" else 4

        def make(rows: int) -> Decoder:
            room = {"wide": wide, "block_tokens": block_tokens, "max_rows": rows}
            return Decoder(found, weights, arena, **room, threads=threads, cores=cores)

        self._make = make
        self._decoder = make(MAX_ROWS)
        self._timed = False
        self._spent: dict[str, float] = {}
        self._logits = np.empty((0, weights.vocab), np.float32)

    @property
    def products(self) -> Mode:
        """Rows never depend on each other here."""
        return "direct"

    @property
    def path(self) -> str:
        """The instruction set that computes."""
        return self._library.path

    def forward(self, tokens: Tensor | Sequence[int], spans: Sequence[Span]) -> Tensor:
        """Compute positions and store their KV. tokens: those of all `spans`, one after the other. What it returns is empty.

        ResourceError if the buffers of a longer step cannot be had; shorter ones still can be computed then.
        """
        given = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        if len(given) > self._decoder.max_rows:
            self._grow(len(given))
        self._decoder.forward(given, [Rows(span.blocks, span.start, span.num_tokens) for span in spans])
        return NO_HIDDEN

    def logits(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Logits float32 [len(wanted), vocab] of rows `wanted` of the last `forward`, which returned `hidden`.

        Good until the next call, which writes to the same memory.
        """
        return torch.from_numpy(self.pick(wanted.tolist(), len(wanted))[0])

    def pick(self, wanted: Sequence[int], num_read: int) -> tuple[Floats, Picks]:
        """Logits [num_read, vocab] of the first of rows `wanted`, as good as those of `logits`; the likeliest token of all.

        Other logits are never written.
        """
        if num_read > len(self._logits):
            self._logits = np.empty((num_read, self._logits.shape[1]), np.float32)
        logits = self._logits[:num_read]
        return logits, Picks(*self._decoder.pick(wanted, logits if num_read else None))

    def time_stages(self, on: bool) -> None:
        """Begin to count where steps spend their time, from zero on; or end it."""
        self._timed, self._spent = on, {}
        self._decoder.time(on)

    def stage_times(self) -> dict[str, float]:
        """CPU seconds of the calling thread by stage of the step."""
        return {stage: seconds + self._spent.get(stage, 0.0) for stage, seconds in self._decoder.times().items()}

    def _grow(self, rows: int) -> None:
        """Buffers for steps of `rows` positions. The old ones go when the new are there, so that a failure leaves those."""
        larger = self._make(rows)
        self._spent = self.stage_times()
        if self._timed:
            larger.time(True)
        self._decoder.close()
        self._decoder = larger
