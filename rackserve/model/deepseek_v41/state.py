"""What the model keeps of a sequence: global rows in the blocks of an arena, and its own resume state.

The resume state (windows of every layer and DSpark stage, the pending token of each ratio-2 compressor, the last token ids) is
held beside the blocks while the sequence runs, and copied to and from window slots of the arena. A pass only proposes new
state; `SequenceState.commit` takes in the positions that stand, so a rejected draft leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.base.kv_layout import KvLayout
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.layout import index_row_bytes, main_row_bytes, window_row_bytes


class Arena:
    """Blocks and window slots of one rank, as byte tensors over shared memory: first the blocks, then the slots."""

    __slots__ = ("_blocks", "_rows", "_slots", "block_tokens", "num_blocks")

    def __init__(self, config: DeepseekV41Config, layout: KvLayout, memory: memoryview, num_blocks: int) -> None:
        """InvariantError if `memory` is smaller than `num_blocks` blocks."""
        full = num_blocks * layout.block_bytes
        if len(memory) < full:
            raise InvariantError(f"the arena has {len(memory)} bytes, {num_blocks} blocks need {full}")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.num_blocks = num_blocks
        self.block_tokens = layout.block_tokens
        self._blocks = whole[:full].view(num_blocks, layout.block_bytes)
        num_slots = (len(memory) - full) // layout.window_bytes
        self._slots = whole[full : full + num_slots * layout.window_bytes].view(num_slots, layout.window_bytes)
        self._rows: dict[tuple[str, int], Tensor] = {}
        at = 0
        for source in config.kv_source_layer_ids:
            for kind, row_bytes in (("main", main_row_bytes(config)), ("index", index_row_bytes(config))):
                rows = layout.block_tokens // config.compress_ratios[source]
                part = self._blocks[:, at : at + rows * row_bytes]
                self._rows[kind, source] = part.unflatten(1, (rows, row_bytes))
                at += rows * row_bytes

    @property
    def address(self) -> int:
        """Where block 0 begins in this process, for native code."""
        return self._blocks.data_ptr()

    @property
    def block_bytes(self) -> int:
        return self._blocks.shape[1]

    def read(self, kind: str, source: int, blocks: Tensor, rows: Tensor) -> Tensor:
        """Packed rows, uint8 [..., bytes], by row number within a sequence whose block table is `blocks` [n]."""
        view = self._rows[kind, source]
        return view[blocks[rows // view.shape[1]], rows % view.shape[1]]

    def write(self, kind: str, source: int, blocks: Tensor, first: int, packed: Tensor) -> None:
        """Store rows first, first + 1, ... of a sequence."""
        view = self._rows[kind, source]
        rows = torch.arange(first, first + len(packed))
        view[blocks[rows // view.shape[1]], rows % view.shape[1]] = packed

    def slot(self, number: int) -> Tensor:
        """The bytes of a window slot, writable. InvariantError if there is none of that number."""
        if not 0 <= number < len(self._slots):
            raise InvariantError(f"window slot {number} of {len(self._slots)}")
        return self._slots[number]


@dataclass(slots=True)
class Proposal:
    """State that a pass has computed for positions [start, start + n) of one sequence, not taken in yet.

    windows   uint8 [layers, n, row bytes]; rows of positions before `full_from` are void in the decoder's layers
    pending   float32 [ratio-2 sources, n, 2, head_dim]: each position's kv and gate
    features  float32 [n, targets * hidden]: what DSpark reads; void before `full_from`
    tokens    the ids
    """

    start: int
    windows: Tensor
    pending: Tensor
    features: Tensor
    tokens: list[int]
    drafts: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class SequenceState:
    """The resume state of one running sequence after its first `length` positions.

    windows  uint8 [layers + stages, window, row bytes]; the row of position p is at p % window
    open     float32 [ratio-2 sources, 2, head_dim]: kv and gate of position length - 1, meaningful if length is odd
    valid    per layer and stage, the first position whose window row has been computed
    history  the last ids, fewer at a sequence start
    """

    __slots__ = ("_config", "_num_layers", "blocks", "history", "last_token", "length", "open", "valid", "windows")

    def __init__(self, config: DeepseekV41Config) -> None:
        self._config = config
        self._num_layers = config.num_hidden_layers
        num_windows = config.num_hidden_layers + config.num_nextn_predict_layers
        gated = sum(config.has_gate(source) for source in config.kv_source_layer_ids)
        self.blocks: list[int] = []
        self.length = 0
        self.last_token = -1
        self.windows = torch.zeros(num_windows, config.sliding_window, window_row_bytes(config), dtype=torch.uint8)
        self.open = torch.zeros(gated, 2, config.head_dim)
        self.valid = torch.zeros(num_windows, dtype=torch.int64)
        self.history: list[int] = []

    def begin(self, length: int, history: Sequence[int]) -> None:
        """Stand before position `length` with nothing in the windows: what follows fills them."""
        self.length = length
        self.valid.fill_(length)
        self.history = list(history)

    def restore(self, slot: Tensor, length: int, history: Sequence[int]) -> None:
        """Take over the state that lies in a window slot and belongs before position `length`."""
        size = self.windows.numel()
        self.windows.copy_(slot[:size].view_as(self.windows))
        self.open.view(torch.uint8).flatten().copy_(slot[size:])
        self.length = length
        self.valid.fill_(max(0, length - self._config.sliding_window))
        self.history = list(history)

    def store(self, slot: Tensor) -> None:
        """Copy the state to a window slot."""
        size = self.windows.numel()
        slot[:size].copy_(self.windows.flatten())
        slot[size:].copy_(self.open.view(torch.uint8).flatten())

    def commit(self, proposal: Proposal, upto: int) -> None:
        """Positions before `upto` of `proposal` stand: take their state in. May be called again with a later `upto`."""
        window, first, last = self._config.sliding_window, self.length - proposal.start, upto - proposal.start
        if last <= first:
            return
        row = max(first, last - window)
        while row < last:  # to the end of the ring, then from its beginning
            place = (proposal.start + row) % window
            count = min(last - row, window - place)
            self.windows[: self._num_layers, place : place + count] = proposal.windows[:, row : row + count]
            if len(proposal.drafts):
                self.windows[self._num_layers :, place : place + count] = proposal.drafts[:, row : row + count]
            row += count
        self.open.copy_(proposal.pending[:, last - 1])
        self.history = (self.history + proposal.tokens[first:last])[-(self._config.engram_max_ngram_size - 1) :]
        self.length = upto

    def before(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Packed window rows of `layer` at positions `rows` [n] below `length`, and which of them there are (bool [n])."""
        return self.windows[layer, rows % self._config.sliding_window], rows >= self.valid[layer]
