"""A toy model whose next token is a digest of every KV entry it reads.

It is the cheapest full test of the serving system: a stale, missing, swapped or half-written block, a lost resume state or a
wrong position changes the output. It runs on both hosts, without torch, through the same `Step` values as a real model.

Entry of position p (8 bytes, `full` group) = H(entries 0..p-1, window state after p, token p). The window state (16 bytes,
`window` group, optional) folds all tokens so far and is carried in the engine or restored from a slot.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from rackserve.base.errors import InvariantError
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.request import SamplingParams
from rackserve.base.rng import draw_below
from rackserve.base.step import ItemResult, Step, StepItem, StepResult

ENTRY_BYTES = 8
WINDOW_BYTES = 16


def digest_layout(block_tokens: int, *, window: bool = False) -> KvLayout:
    """Layout of the digest model: 8 bytes per position, and 16 bytes of resume state if `window`."""
    full = KvGroup("entries", "full", ENTRY_BYTES * block_tokens)
    groups = (full, KvGroup("fold", "window", WINDOW_BYTES)) if window else (full,)
    return KvLayout(block_tokens, groups)


@dataclass(slots=True)
class _Sequence:
    blocks: list[int] = field(default_factory=list)
    last: tuple[int, ...] = ()
    fold: bytes = bytes(WINDOW_BYTES)


class DigestRunner:
    """Runs steps of one rank over `arena` (num_blocks full slots, then the window slots)."""

    def __init__(self, arena: memoryview, num_blocks: int, layout: KvLayout, vocab_size: int = 64) -> None:
        needed = num_blocks * layout.block_bytes
        if len(arena) < needed:
            raise InvariantError(f"arena has {len(arena)} bytes, {num_blocks} blocks need {needed}")
        self.layout = layout
        self._arena = arena
        self._window_base = needed
        self._vocab = vocab_size
        self._sequences: dict[int, _Sequence] = {}

    def run(self, step: Step) -> StepResult:
        for sequence in step.retired:
            self._sequences.pop(sequence, None)
        return StepResult(step.dp_rank, tuple(self._run_item(item) for item in step.items))

    def _run_item(self, item: StepItem) -> ItemResult:
        state = self._sequences.setdefault(item.sequence, _Sequence())
        state.blocks.extend(item.new_blocks)
        if item.restore >= 0:
            state.fold = bytes(self._window(item.restore))
        tokens = array("i", item.tokens) if item.tokens else array("i", state.last[-item.num_tokens :])
        digest = self._compute(state, item.start, tokens)
        if item.snapshot >= 0:
            self._window(item.snapshot)[:] = state.fold
        if not item.sample:
            return ItemResult(item.sequence, ())
        drawn = [next_token(digest, item.sampling, item.output_index, self._vocab)]
        # A draft head that is right this often, by chance that depends on the position alone:
        accepted = draw_below(item.num_draft + 1, "draft", item.start) if item.num_draft else 0
        for extra in range(accepted):
            digest = self._compute(state, item.start + item.num_tokens + extra, array("i", drawn[-1:]))
            drawn.append(next_token(digest, item.sampling, item.output_index + extra + 1, self._vocab))
        state.last = tuple(drawn)
        return ItemResult(item.sequence, state.last)

    def _compute(self, state: _Sequence, start: int, tokens: array[int]) -> bytes:
        """Write the entries of positions [start, start + len(tokens)); returns the digest of the last."""
        context = blake2b(digest_size=16)
        for position in range(start):
            context.update(self._entry(state, position))
        digest = b""
        for offset, token in enumerate(tokens):
            state.fold = blake2b(state.fold + token.to_bytes(4, "little"), digest_size=WINDOW_BYTES).digest()
            probe = context.copy()
            probe.update((state.fold if self.layout.has_window else b"") + token.to_bytes(4, "little"))
            digest = probe.digest()
            self._entry(state, start + offset)[:] = digest[:ENTRY_BYTES]
            context.update(digest[:ENTRY_BYTES])
        return digest

    def _entry(self, state: _Sequence, position: int) -> memoryview:
        block_tokens = self.layout.block_tokens
        at = state.blocks[position // block_tokens] * self.layout.block_bytes + position % block_tokens * ENTRY_BYTES
        return self._arena[at : at + ENTRY_BYTES]

    def _window(self, slot: int) -> memoryview:
        at = self._window_base + slot * WINDOW_BYTES
        return self._arena[at : at + WINDOW_BYTES]


def next_token(digest: bytes, sampling: SamplingParams, output_index: int, vocab_size: int) -> int:
    """The token drawn after a position with this digest: greedy, or by (seed, output index) if the temperature is not 0."""
    greedy = int.from_bytes(digest[ENTRY_BYTES:], "little") % vocab_size
    if sampling.temperature == 0:
        return greedy
    return (greedy + draw_below(vocab_size, sampling.seed, output_index)) % vocab_size


def cold_output(
    tokens: bytes,
    max_tokens: int,
    *,
    window: bool = False,
    vocab_size: int = 64,
    stop: tuple[int, ...] = (),
    sampling: SamplingParams | None = None,
) -> list[int]:
    """Output tokens of a fresh, cacheless server for the prompt `tokens` (int32 ids): the oracle of law I13."""
    ids = list(array("i", tokens))
    layout = digest_layout(1, window=window)
    total = len(ids) + max_tokens
    runner = DigestRunner(memoryview(bytearray(total * layout.block_bytes)), total, layout, vocab_size)
    output: list[int] = []
    start, fresh = 0, ids
    while len(output) < max_tokens:
        item = StepItem(
            0,
            start,
            len(fresh),
            array("i", fresh).tobytes(),
            tuple(range(start, start + len(fresh))),
            sample=True,
            output_index=len(output),
            sampling=sampling or SamplingParams(),
        )
        token = runner.run(Step(0, (item,))).items[0].tokens[0]
        output.append(token)
        if token in stop:
            break
        start, fresh = start + len(fresh), [token]
    return output
