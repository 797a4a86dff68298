"""DeepSeek-V4.1 on the native kernels: `Backbone` and `DSpark` as one call each, over buffers that are made once.

Products and sums over channels are taken in the order that torch takes on AVX-512, roundings are those of `rounding`;
exponentials differ in the last bits. A row depends on its sequence alone, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_void_p

import torch
from torch import Tensor

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import library, v41
from rackserve.kernels.cpu.library import Library
from rackserve.kernels.cpu.mailbox import Mailbox
from rackserve.kernels.cpu.v41_tuning import ALL_ON, Tuning
from rackserve.model.deepseek_v41.backbone import EngramRows, Pass
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.dspark import Drafting, Drafts, unroll
from rackserve.model.deepseek_v41.layout import window_row_bytes
from rackserve.model.deepseek_v41.native_plan import make_plan
from rackserve.model.deepseek_v41.spans import Span
from rackserve.model.deepseek_v41.state import Arena, Proposal, SequenceState
from rackserve.model.deepseek_v41.weights import Weights
from rackserve.model.mailboxes import meet
from rackserve.model.parallel import Collectives

MAX_ROWS = 128
"""Positions of a pass that buffers are made for at first; a longer pass makes larger ones."""

ROUND_ROWS = 32
"""Rows whose sums devices tell each other at once; a longer pass takes several rounds a layer."""


def find_kernels() -> Library:
    """The kernels of this machine. ConfigError if none were built here."""
    found = library.find()
    if found is None:
        raise ConfigError(f"{library.missing()}, or set runner.kernels to torch")
    if not v41.serves(found):
        raise ConfigError(f"the native kernels built here are without DeepSeek-V4.1's; run {library.BUILD}")
    return found


class NativeBackbone:
    """All layers, over the rank's `arena`, with `weights` held as stored. What a pass returns is valid until the next one.

    threads, cores  that share a pass, and where they run (see `kernels.cpu.v41`); all devices of a rank have as many threads
    collectives  to the devices with the other shares of a tensor-parallel rank; they meet here, and later in mailboxes alone

    ConfigError if the kernels do not know such sizes.
    """

    def __init__(
        self,
        kernels: Library,
        config: DeepseekV41Config,
        weights: Weights,
        arena: Arena,
        *,
        round_inputs: bool = False,
        threads: int = 1,
        cores: Sequence[int] = (),
        collectives: Collectives | None = None,
        tuning: Tuning = ALL_ON,
    ) -> None:
        self._config, self._library, self._arena, self._threads, self._tuning = config, kernels, arena, threads, tuning
        self._cores = tuple(cores)
        devices = collectives.share.tp_size if collectives else 1
        self._plan = make_plan(config, weights, arena.block_tokens, round_inputs=round_inputs, devices=devices)
        self._mailbox: Mailbox | None = None
        if collectives is not None and devices > 1:
            floats = max(ROUND_ROWS * config.hidden_size, config.vocab_size // devices)
            self._mailbox = meet(kernels, collectives, threads, floats)
        self._gated = sum(config.has_gate(source) for source in config.kv_source_layer_ids)
        self._grow(MAX_ROWS)

    @property
    def path(self) -> str:
        """The instruction set that computes."""
        return self._library.path

    def _grow(self, rows: int) -> None:
        config = self._config
        windows = torch.zeros(config.num_hidden_layers, rows, window_row_bytes(config), dtype=torch.uint8)
        pending = torch.zeros(self._gated, rows, 2, config.head_dim)
        features = torch.zeros(rows, len(config.dspark_target_layer_ids) * config.hidden_size)
        hidden = torch.zeros(rows, config.hidden_size)
        # Last, since it tells how many rows there is room for: where memory ends before, all stays as it was.
        self.step = v41.Step(
            self._library,
            self._plan,
            self._arena.address,
            self._arena.block_bytes,
            rows,
            self._threads,
            self._cores,
            self._mailbox,
            self._tuning,
        )
        self._windows, self._pending, self._features, self._hidden = windows, pending, features, hidden
        self._result = v41.Result(windows.data_ptr(), pending.data_ptr(), features.data_ptr(), hidden.data_ptr())

    def close(self) -> None:
        """Let threads and buffers go; devices that wait for this one are told."""
        self.step.close()
        if self._mailbox is not None:
            self._mailbox.close()

    def require(self, rows: int) -> None:
        """Make sure that a pass may have so many rows."""
        if rows > self.step.max_rows:
            self._grow(rows)

    def forward(self, tokens: list[int], spans: list[Span], engram: EngramRows) -> Pass:
        """Compute the rows of `spans`, in order, with these ids. Writes global rows to the arena; all else is proposed."""
        count = len(tokens)
        self.require(count)
        memory = [engram.rows(layer).contiguous() for layer in self._config.engram_layer_ids] if count else []
        rows = (c_void_p * max(1, len(memory)))(*(part.data_ptr() for part in memory))
        ids = torch.tensor(tokens, dtype=torch.int64)
        given = (v41.Span * max(1, len(spans)))(*(_span(span.state, span) for span in spans))
        ended = self.step.forward(given, len(spans), ids.data_ptr(), rows, self._result)
        proposals = [
            Proposal(
                span.start,
                self._windows[:, span.rows],
                self._pending[:, span.rows],
                self._features[span.rows],
                tokens[span.rows],
            )
            for span in spans
        ]
        return Pass(self._hidden[:ended], _places(spans, count, ended), proposals)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of `Pass.hidden`: float32 [n, vocab]."""
        given, out = hidden.contiguous(), torch.empty(len(hidden), self._config.vocab_size)
        self.step.logits(given.data_ptr(), len(given), out.data_ptr())
        return out


def _span(state: SequenceState, span: Span) -> v41.Span:
    return v41.Span(
        span.blocks.data_ptr(), state.windows.data_ptr(), state.valid.data_ptr(), state.open.data_ptr(),
        span.start, span.full_from, span.count, span.replayed,
    )  # fmt: skip


def _places(spans: Sequence[Span], count: int, ended: int) -> Tensor:
    """Which of the rows that reached the end each row of the pass is, -1 for none."""
    if ended == count:
        return torch.arange(count)
    reaches = torch.cat([torch.arange(span.start, span.end) >= span.full_from for span in spans])
    return torch.where(reaches, reaches.cumsum(0) - 1, -1)


class NativeDSpark:
    """The draft head, by the kernels of `backbone`."""

    def __init__(self, config: DeepseekV41Config, backbone: NativeBackbone) -> None:
        self._config, self._backbone = config, backbone

    def learn(self, proposals: Sequence[Proposal], lasts: Sequence[int]) -> None:
        """Fill in `drafts` of each proposal: the window rows of its first lasts[i] positions, uint8 [stages, n, bytes]."""
        config = self._config
        counts = [min(last, config.sliding_window + config.dspark_block_size) for last in lasts]
        firsts = [last - count for last, count in zip(lasts, counts, strict=True)]
        if not proposals:
            return
        features = torch.cat(
            [proposal.features[first:last] for proposal, first, last in zip(proposals, firsts, lasts, strict=True)]
        )
        positions = torch.cat(
            [
                torch.arange(proposal.start + first, proposal.start + last)
                for proposal, first, last in zip(proposals, firsts, lasts, strict=True)
            ]
        )
        stages = torch.empty(config.num_nextn_predict_layers, len(features), window_row_bytes(config), dtype=torch.uint8)
        self._backbone.step.learn(features.data_ptr(), positions.data_ptr(), len(features), stages.data_ptr())
        for proposal, first, part in zip(proposals, firsts, stages.split(counts, 1), strict=True):
            rows = stages.new_zeros(len(stages), len(proposal.tokens), stages.shape[2])
            rows[:, first : first + part.shape[1]] = part
            proposal.drafts = rows

    def draft(self, requests: Sequence[Drafting]) -> list[Drafts]:
        """One block for every sequence."""
        config, size, count = self._config, self._config.dspark_block_size, len(requests)
        self._backbone.require(count * size)
        step = self._backbone.step
        spans: Array[v41.Span] = (v41.Span * max(1, count))(
            *(
                v41.Span(None, state.windows.data_ptr(), state.valid.data_ptr(), None, state.length, 0, size, 0)
                for state in (request.state for request in requests)
            )
        )
        hidden, logits = torch.empty(count, size, config.hidden_size), torch.empty(count, size, config.vocab_size)
        anchors = torch.tensor([request.anchor for request in requests], dtype=torch.int64)
        step.draft(spans, count, anchors.data_ptr(), hidden.data_ptr(), logits.data_ptr())
        confidence = torch.empty(count, size)

        def follow(place: int, tokens: Tensor) -> None:
            step.follow(
                tokens.data_ptr(), count, hidden[:, place].data_ptr(), logits[:, place].data_ptr(),
                confidence[:, place].data_ptr(), size,
            )  # fmt: skip

        return unroll(requests, logits, confidence, follow)
