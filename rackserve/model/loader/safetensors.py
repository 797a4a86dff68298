"""Weights of a local Hugging Face folder: one safetensors file or shards, read through memory maps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rackserve.base.errors import FileFormatError, ResourceError
from rackserve.model.loader.folder import weight_files

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TensorFiles:
    """The tensors of a model folder by name. Use it in a `with`: tensors already read stay valid after it."""

    __slots__ = ("_folder", "_holder", "_stack")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holder: dict[str, tuple[Path, Any]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for path in weight_files(self._folder):
            try:
                opened = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise FileFormatError(f"{path}: truncated or no safetensors file ({error}); fetch it again") from error
            except RuntimeError as error:  # torch's, of a file that safetensors found sound
                size = path.stat().st_size
                raise ResourceError(
                    f"{path}: no {size} bytes of address space to map it ({error}); raise the limit (ulimit -v)"
                ) from error
            self._holder.update((name, (path, opened)) for name in opened.keys())  # noqa: SIM118 (no mapping)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """Tensor `name` as stored, on pages shared with every process that maps the file. FileFormatError unless of `shape`."""
        if name not in self._holder:
            files = ", ".join(sorted({path.name for path, _ in self._holder.values()}))
            raise FileFormatError(f"{self._folder}: tensor {name} of shape {list(shape)} is in none of {files}; fetch it again")
        path, opened = self._holder[name]
        tensor: Tensor = opened.get_tensor(name)
        if list(tensor.shape) != list(shape):
            found = list(tensor.shape)
            raise FileFormatError(
                f"{path}: tensor {name} has shape {found}, config.json asks for {list(shape)}; use matching files"
            )
        if tensor.dtype not in DTYPES:
            raise FileFormatError(f"{path}: tensor {name} is {tensor.dtype}, supported are bf16, fp16, fp32; use another file")
        return tensor
