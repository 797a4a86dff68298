"""The weights one device computes with: its share of a checkpoint, as stored or widened to float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rackserve.model.deepseek_v41.checkpoint import Checkpoint, open_checkpoint
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.inventory import TILE, owned, require_width
from rackserve.model.deepseek_v41.options import WeightMemory
from rackserve.model.deepseek_v41.rounding import E2M1
from rackserve.model.parallel import Share

WHOLE = Share()

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}

FP4_PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=1)
"""[256, 2]: the two numbers in each byte, the one in its low half first."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [out, in] as the checkpoint stores it: fp8 with a scale per 32 x 32, fp4 with one per row and 32, or bf16."""

    weight: Tensor
    scale: Tensor | None

    def widen(self) -> Tensor:
        """Its numbers, float32 [out, in]: exact, since every scale is a power of two."""
        weight = self.weight
        if self.scale is None:
            return weight.float()
        scale = self.scale.float()
        if weight.dtype == torch.int8:
            rows, columns = weight.shape[0], 2 * weight.shape[1]
            numbers = FP4_PAIRS.index_select(0, weight.contiguous().view(torch.uint8).flatten().int())
            return (numbers.view(rows, -1, TILE) * scale.unsqueeze(-1)).view(rows, columns)
        rows, columns = weight.shape
        tiles = weight.float().view(rows // TILE, TILE, columns // TILE, TILE)
        return (tiles * scale.view(rows // TILE, 1, columns // TILE, 1)).view(rows, columns)


class Matrix:
    """A linear layer's weight [out, in] on this device.

    quantised  stored as fp8 or fp4: what it is multiplied with is rounded where the served model rounds
    """

    __slots__ = ("_packed", "_right", "quantised", "shape")

    def __init__(self, packed: Packed, memory: WeightMemory) -> None:
        rows, columns = packed.weight.shape
        self.shape = (rows, columns * 2 if packed.weight.dtype == torch.int8 else columns)
        self.quantised = packed.scale is not None
        widened = memory == "widened"
        self._right = _right(packed) if widened else None
        self._packed = None if widened else packed

    @property
    def stored(self) -> Packed:
        """It as the checkpoint has it. Only where matrices are kept so."""
        assert self._packed is not None, "matrices were widened when they were loaded"
        return self._packed

    def right(self) -> Tensor:
        """The right side of a product, float32 [in, out], contiguous. Not to be written to."""
        if self._right is not None:
            return self._right
        assert self._packed is not None
        return _right(self._packed)


class Weights:
    """What one device loaded, by checkpoint name without `.weight`. KeyError for what it does not hold.

    checkpoint  the folder it came from: where the Engram tables lie
    """

    __slots__ = ("_matrices", "_tables", "_vectors", "checkpoint")

    def __init__(self, checkpoint: Checkpoint, share: Share, memory: WeightMemory) -> None:
        self.checkpoint = checkpoint
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[str, Tensor] = {}
        self._tables: dict[str, Tensor] = {}
        for name, spec in checkpoint.tensors.items():
            part = owned(spec, share)
            if part is None or name.endswith(".scale"):
                continue
            tensor, short = _read(checkpoint, name, part), name.removesuffix(".weight")
            if short.endswith("embed"):
                self._tables[short] = tensor
            elif len(spec.shape) == 2 and short != name:
                self._matrices[short] = Matrix(Packed(tensor, _read_scale(checkpoint, f"{short}.scale", share)), memory)
            else:
                self._vectors[short] = tensor.float()

    def has(self, name: str) -> bool:
        """Whether this device holds (its part of) a tensor."""
        return name in self._matrices or name in self._vectors or name in self._tables

    def matrix(self, name: str) -> Matrix:
        """A linear layer's weight, such as `layers.3.attn.wq_a`, `layers.3.ffn.experts.5.w1` or `head`."""
        return self._matrices[name]

    def matrices(self) -> Iterable[Matrix]:
        """All linear layers' weights this device holds."""
        return self._matrices.values()

    def vector(self, name: str) -> Tensor:
        """What is no linear layer's weight, float32 as shaped in the checkpoint: norms, sinks, biases, stream mixes."""
        return self._vectors[name]

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of `embed` or of a Markov head's `embed`, float32 [..., width]. `ids` count from this device's first row."""
        return self._tables[name][ids].float()

    def table(self, name: str) -> Tensor:
        """`embed` or a Markov head's `embed` as stored: bf16 [rows, width]."""
        return self._tables[name]

    def num_rows(self, name: str) -> int:
        """How many rows of a table this device holds."""
        return len(self._tables[name])


def load_weights(folder: Path, config: DeepseekV41Config, share: Share = WHOLE, memory: WeightMemory = "widened") -> Weights:
    """The share of the checkpoint in `folder` that one device holds.

    memory  "stored": matrices stay on the file's pages and are widened at every use; "widened": once, as float32.
    ConfigError if the model cannot be cut that way, FileFormatError if the folder is not a sound checkpoint of `config`.
    """
    require_width(config, share.tp_size, share.ep_size)
    return Weights(open_checkpoint(folder, config), share, memory)


def _right(packed: Packed) -> Tensor:
    return packed.widen().t().contiguous()


def _read_scale(checkpoint: Checkpoint, name: str, share: Share) -> Tensor | None:
    spec = checkpoint.tensors.get(name)
    part = None if spec is None else owned(spec, share)
    return None if part is None else _read(checkpoint, name, part)


def _read(checkpoint: Checkpoint, name: str, part: tuple[slice, ...]) -> Tensor:
    """The part of a tensor as stored. Whole rows are the file's own pages; columns are copied."""
    spec = checkpoint.tensors[name]
    view = checkpoint.view(name)
    dtype = DTYPES[spec.dtype]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing here writes to weights
        flat = torch.frombuffer(view, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:  # the format aligns nothing; the whole copy goes, only the part is kept
        return flat.clone().view(dtype).view(spec.shape)[part].clone(memory_format=torch.contiguous_format)
    return flat.view(dtype).view(spec.shape)[part].contiguous()
