"""A toy model whose next token is a digest of every KV entry it reads.

It is the cheapest full test of the serving system: a stale, missing, swapped or half-written block, a lost resume state or a
wrong position changes the output. It runs on both hosts, without torch, through the same `Step` values as a real model.

A row names a position: its token and the `history_tokens` ids before it. Entry of position p (8 bytes, `full` group) =
H(entries 0..p-1, window state after p, row p). The window state (`window` group, optional) is carried in the engine or
restored from a slot: a fold of all rows so far, or with `replay_tokens` a mark of row p and of the n rows before it, so that
it takes n positions to bring it back. With `tail_tokens` n more marks follow, of the last n rows, which are blank where a
position did not pass all layers; a drawn token depends on them while entries do not.

It has no logits. Bans (`allowed_token_ids`, `min_tokens`, `bad_words` of one id, a `logit_bias` of -100) hold and 100 forces;
where a choice depends on output or prompt, the token drawn depends on all of it. `top_p`, `top_k`, `min_p` and `logprobs` do
nothing; a constraint or log-probabilities of the prompt end the request as unsupported.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from msgspec import structs

from rackserve.base.errors import InvariantError
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.request import SamplingParams
from rackserve.base.rng import draw_below
from rackserve.base.step import UNSUPPORTED, ItemResult, Step, StepItem, StepResult

ENTRY_BYTES = 8
FOLD_BYTES = 16
MARK_BYTES = 8


def digest_layout(
    block_tokens: int, *, window: bool = False, history: int = 0, replay: int = 0, tail: bool = False
) -> KvLayout:
    """Layout of the digest model: 8 bytes per position, and a resume state if `window` or `replay`.

    replay   the state is not stored but comes back by computing so many positions again; 0: it is stored
    tail     positions of a prompt before the last `replay` do not pass all layers
    """
    full = KvGroup("entries", "full", ENTRY_BYTES * block_tokens)
    size = (replay + 1 + tail * replay) * MARK_BYTES if replay else FOLD_BYTES
    groups = (full, KvGroup("fold", "window", size)) if window or replay else (full,)
    return KvLayout(block_tokens, groups, history, replay, replay if tail else 0)


@dataclass(slots=True)
class _Sequence:
    """What the engine carries: block table, tokens drawn last, ids before the next position, and the window state there.

    read   ids that the choice of the next token depends on
    """

    fold: bytes
    ids: array[int]
    blocks: list[int] = field(default_factory=list)
    last: tuple[int, ...] = (0,)
    read: array[int] = field(default_factory=lambda: array("i"))


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
        state = self._sequences.get(item.sequence)
        if state is None:
            state = self._sequences[item.sequence] = _Sequence(bytes(self.layout.window_bytes), array("i", item.history))
        state.blocks.extend(item.new_blocks)
        if item.restore >= 0:
            state.fold = bytes(self._window(item.restore))
        end = item.start + item.num_tokens
        if item.snapshot_at < 0 and item.snapshot >= 0:
            item = structs.replace(item, snapshot_at=end)
        tokens = array("i", item.tokens) if item.tokens else array("i", state.last[-item.num_tokens :])
        digest = self._compute(state, item, item.start, tokens)
        if item.scored or (item.sample and item.sampling.constraint is not None):
            return ItemResult(item.sequence, (), finish=UNSUPPORTED)
        if not item.sample:
            return ItemResult(item.sequence, ())
        state.read.frombytes(item.context)
        drawn = [self._draw(state, item, digest, 0)]
        # A draft head that is right this often, by chance that depends on the position alone:
        accepted = draw_below(item.num_draft + 1, "draft", item.start) if item.num_draft else 0
        for extra in range(accepted):
            digest = self._compute(state, item, end + extra, array("i", drawn[-1:]))
            drawn.append(self._draw(state, item, digest, extra + 1))
        state.last = tuple(drawn)
        return ItemResult(item.sequence, state.last, num_verified=item.num_draft)

    def _draw(self, state: _Sequence, item: StepItem, digest: bytes, extra: int) -> int:
        """The token that is output number `extra` of an item."""
        sampling, index = item.sampling, item.output_index + extra
        if sampling.reads_output:
            if len(state.read) < index:
                raise InvariantError(f"sequence {item.sequence}: {len(state.read)} of {index} output tokens are known")
            digest = blake2b(digest + state.read.tobytes(), digest_size=16).digest()
        token = next_token(digest, sampling, index, self._vocab, item.stop_token_ids)
        if sampling.reads_output:
            state.read.append(token)
        return token

    def _compute(self, state: _Sequence, item: StepItem, start: int, tokens: array[int]) -> bytes:
        """Write the entries of positions [start, start + len(tokens)) of `item`; returns the digest of the last."""
        context = blake2b(digest_size=16)
        for position in range(start):
            context.update(self._entry(state, position))
        history, digest = self.layout.history_tokens, b""
        for position, token in enumerate(tokens, start):
            state.ids.append(token)
            row = state.ids[-1 - history :].tobytes()
            state.fold = self._fold(state.fold, row, full=position >= item.full_from)
            entries_read, tail = self._halves(state.fold)
            probe = context.copy()
            probe.update(entries_read + row)
            digest = probe.digest()
            if position >= item.start + item.replayed:
                self._entry(state, position)[:] = digest[:ENTRY_BYTES]
            context.update(self._entry(state, position))
            if tail:
                digest = blake2b(digest + tail, digest_size=16).digest()
            if position + 1 == item.snapshot_at:
                self._window(item.snapshot)[:] = state.fold
        return digest

    def _fold(self, fold: bytes, row: bytes, *, full: bool) -> bytes:
        """The window state after one more position; `full`: it passes all layers."""
        if not self.layout.replay_tokens:
            return blake2b(fold + row, digest_size=FOLD_BYTES).digest() if fold else fold
        mark = blake2b(row, digest_size=MARK_BYTES).digest()
        shallow, deep = self._halves(fold)
        return shallow[MARK_BYTES:] + mark + (deep[MARK_BYTES:] + (mark if full else bytes(MARK_BYTES)) if deep else b"")

    def _halves(self, fold: bytes) -> tuple[bytes, bytes]:
        """The part of a window state that entries depend on, and the part that only drawn tokens do."""
        size = (self.layout.replay_tokens + 1) * MARK_BYTES if self.layout.tail_tokens else len(fold)
        return fold[:size], fold[size:]

    def _entry(self, state: _Sequence, position: int) -> memoryview:
        block_tokens = self.layout.block_tokens
        at = state.blocks[position // block_tokens] * self.layout.block_bytes + position % block_tokens * ENTRY_BYTES
        return self._arena[at : at + ENTRY_BYTES]

    def _window(self, slot: int) -> memoryview:
        at = self._window_base + slot * self.layout.window_bytes
        return self._arena[at : at + self.layout.window_bytes]


def next_token(digest: bytes, sampling: SamplingParams, output_index: int, vocab_size: int, stop: tuple[int, ...] = ()) -> int:
    """The token drawn after a position with this digest: greedy, or by (seed, output index) if the temperature is not 0.

    stop   ids that `sampling.min_tokens` rules out at first. If nothing is left, everything may be drawn.
    """
    number = int.from_bytes(digest[ENTRY_BYTES:], "little")
    drawn = 0 if sampling.temperature == 0 else draw_below(vocab_size, sampling.seed, output_index)
    if not sampling.changes_logits:
        return (number + drawn) % vocab_size
    bias = dict(sampling.logit_bias)
    banned = {token for token, value in bias.items() if value <= -100} | {
        word[0] for word in sampling.bad_words if len(word) == 1
    }
    if output_index < sampling.min_tokens:
        banned.update(stop)
    allowed = sampling.allowed_token_ids or range(vocab_size)
    left = [token for token in allowed if token not in banned and token < vocab_size]
    left = [token for token in left if bias.get(token, 0.0) >= 100] or left or list(range(vocab_size))
    return left[(number + drawn) % len(left)]


def cold_output(
    tokens: bytes,
    max_tokens: int,
    *,
    window: bool = False,
    history: int = 0,
    replay: int = 0,
    tail: bool = False,
    vocab_size: int = 64,
    stop: tuple[int, ...] = (),
    sampling: SamplingParams | None = None,
) -> list[int]:
    """Output tokens of a fresh, cacheless server for the prompt `tokens` (int32 ids): the oracle of law I13."""
    ids = list(array("i", tokens))
    layout = digest_layout(1, window=window, history=history, replay=replay, tail=tail)
    total = len(ids) + max_tokens
    runner = DigestRunner(memoryview(bytearray(total * layout.block_bytes)), total, layout, vocab_size)
    chosen = sampling or SamplingParams()
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
            sampling=chosen,
            context=tokens if chosen.reads_prompt and not output else b"",
            stop_token_ids=stop if chosen.min_tokens else (),
            full_from=max(0, len(ids) - layout.tail_tokens) if tail and not output else 0,
        )
        token = runner.run(Step(0, (item,))).items[0].tokens[0]
        output.append(token)
        if token in stop:
            break
        start, fresh = start + len(fresh), [token]
    return output
