from __future__ import annotations

import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError, InvariantError
from rackserve.base.request import SamplingParams
from rackserve.base.step import ItemResult, Step, StepItem
from rackserve.model.files import ModelFiles
from rackserve.model.layout import KvDtype, kv_layout
from rackserve.model.llama import LlamaWeights, load_weights
from rackserve.model.products import Mode, Products
from rackserve.model.runner import Kernels, LlamaRunner
from rackserve.model.sampling_state import Compile
from tests.model import libraries

BLOCK_TOKENS = 4
NUM_BLOCKS = 400
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7)


class Rank:
    """A runner whose memory starts as NaN, and a free list that hands out scattered blocks."""

    def __init__(
        self,
        files: ModelFiles,
        weights: LlamaWeights | None,
        dtype: KvDtype = "bf16",
        num_blocks: int = NUM_BLOCKS,
        block_tokens: int = BLOCK_TOKENS,
        compile_constraint: Compile | None = None,
        kernels: Kernels = "torch",
    ) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = kv_layout(files.config, block_tokens, dtype).block_bytes
        self.memory = bytearray(b"\xff" * (num_blocks * self.block_bytes))
        memory = memoryview(self.memory)
        self.runner = LlamaRunner(files, memory, num_blocks, block_tokens, dtype, weights, compile_constraint, kernels)
        self.free = [at * 27 % num_blocks for at in range(num_blocks)]  # 27 shares no factor with 400 or 80
        self.tables: dict[int, list[int]] = {}

    def item(self, number: int, start: int, tokens: list[int] | None, sample: bool, **more: Any) -> StepItem:
        """An item that takes the blocks it needs; without `tokens` it continues from the last sampled one."""
        count = 1 if tokens is None else len(tokens)
        table = self.tables.setdefault(number, [])
        needed = -(-(start + count) // self.block_tokens)
        new = tuple(self.free.pop() for _ in range(needed - len(table)))
        table.extend(new)
        return StepItem(number, start, count, array.array("i", tokens or []).tobytes(), new, sample, **more)

    def run(self, *items: StepItem, retired: tuple[int, ...] = ()) -> tuple[ItemResult, ...]:
        return self.runner.run(Step(0, items, retired)).items

    def block(self, number: int) -> bytes:
        return bytes(self.memory[number * self.block_bytes : (number + 1) * self.block_bytes])

    def adopt(self, number: int, source: Rank, blocks: list[int]) -> tuple[int, ...]:
        """Copy `blocks` of another rank to the head of a new sequence's table, as a push or fetch does; their ids here."""
        table = [self.free.pop() for _ in blocks]
        for ours, theirs in zip(table, blocks, strict=True):
            self.memory[ours * self.block_bytes : (ours + 1) * self.block_bytes] = source.block(theirs)
        self.tables[number] = table
        return tuple(table)


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 31 + at * at * 7 + at) % 96 for at in range(length)]


def cold(rank: Rank, prompt: list[int], number: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """`number` output tokens of one sequence alone: one prefill, then one token a step."""
    output = list(rank.run(rank.item(999, 0, prompt, True, sampling=sampling))[0].tokens)
    for index in range(1, number):
        item = rank.item(999, len(prompt) + index - 1, None, True, output_index=index, sampling=sampling)
        output += rank.run(item)[0].tokens
    rank.run(retired=(999,))
    rank.free += rank.tables.pop(999)
    return output


@dataclass
class Session:
    """One sequence on its way through random steps."""

    prompt: list[int]
    sampling: SamplingParams
    done: int = 0
    output: list[int] = field(default_factory=list)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["bf16", "fp32"]))
def test_tokens_depend_neither_on_chunks_nor_batch_nor_prefix_nor_neighbours(
    data: st.DataObject, dtype: KvDtype, tiny_files: ModelFiles, tiny_weights: LlamaWeights
) -> None:
    reference, donor, rank = (Rank(tiny_files, tiny_weights, dtype) for _ in range(3))
    sessions = []
    for number in range(data.draw(st.integers(1, 4))):
        prompt = prompt_of(number, data.draw(st.integers(1, 150)))
        sessions.append(Session(prompt, data.draw(st.sampled_from([SamplingParams(), SEEDED]))))
        # Part of the prompt may have been computed by another process; at least one position is left.
        cached = data.draw(st.integers(0, (len(prompt) - 1) // BLOCK_TOKENS))
        if cached:
            donor.run(donor.item(number, 0, prompt[: cached * BLOCK_TOKENS + data.draw(st.integers(0, 1))], False))
            rank.adopt(number, donor, donor.tables[number][:cached])
            sessions[-1].done = cached * BLOCK_TOKENS
    fresh = {number: tuple(rank.tables.get(number, ())) for number in range(len(sessions))}
    expected = [cold(reference, session.prompt, 4, session.sampling) for session in sessions]
    while unfinished := [number for number, session in enumerate(sessions) if len(session.output) < 4]:
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        items = []
        for number in chosen:
            session = sessions[number]
            left = len(session.prompt) - session.done
            tokens = session.prompt[session.done :][: data.draw(st.integers(1, left))] if left > 0 else None
            last = left <= len(tokens or ())
            item = rank.item(number, session.done, tokens, last, output_index=len(session.output), sampling=session.sampling)
            prefix = fresh.pop(number, ())
            items.append(StepItem(**{**_fields(item), "new_blocks": prefix + item.new_blocks}))
            session.done += item.num_tokens
        for number, result in zip(chosen, rank.run(*items), strict=True):
            assert result.sequence == number
            sessions[number].output += result.tokens
            assert sessions[number].output == expected[number][: len(sessions[number].output)]


def _fields(item: StepItem) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__struct_fields__}


@pytest.fixture
def rank(tiny_files: ModelFiles, tiny_weights: LlamaWeights) -> Rank:
    return Rank(tiny_files, tiny_weights)


def test_a_seeded_request_draws_the_same_whoever_shares_its_batch(rank: Rank) -> None:
    prompt = prompt_of(3, 40)
    alone = cold(rank, prompt, 6, SEEDED)
    others = [SamplingParams(temperature=1.0, seed=other) for other in range(7)]
    mixed: list[int] = []
    for index in range(6):
        items = []
        for number, sampling in enumerate([*others[:3], SEEDED, *others[3:]]):
            tokens, start = (prompt, 0) if index == 0 else (None, len(prompt) + index - 1)
            items.append(rank.item(number, start, tokens, True, output_index=index, sampling=sampling))
        mixed += rank.run(*items)[3].tokens
    assert mixed == alone
    assert cold(rank, prompt, 6, SamplingParams(temperature=0.9, top_p=0.95, seed=8)) != alone


def whole_and_in_parts(files: ModelFiles) -> tuple[LlamaRunner, ItemResult, ItemResult]:
    """A prompt's result from one step alone, and from two in which others take part."""
    rank = Rank(files, load_weights(files.path, files.config))
    prompt = prompt_of(7, 100)
    whole = rank.run(rank.item(1, 0, prompt, True, logprobs=5))[0]
    rank.run(rank.item(2, 0, prompt[:37], False), rank.item(3, 0, prompt_of(4, 90), False))
    parts = rank.run(rank.item(4, 0, [1], True), rank.item(2, 37, prompt[37:], True, logprobs=5))[1]
    return rank.runner, whole, parts


@pytest.mark.parametrize(
    ("library", "mode"),
    [(libraries.by_itself, "direct"), (libraries.by_count, "tiled"), (libraries.by_place, "single")],
)
def test_a_token_depends_on_its_sequence_alone_whatever_the_library_does(
    library: libraries.Scale, mode: Mode, tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.install(monkeypatch, library)
    runner, whole, parts = whole_and_in_parts(tiny_files)
    assert runner.products == mode
    assert (parts.tokens, parts.logprobs) == (whole.tokens, whole.logprobs)


@pytest.mark.parametrize("library", [libraries.by_count, libraries.by_place])
def test_such_a_library_would_be_seen_in_the_output(
    library: libraries.Scale, tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.install(monkeypatch, library)
    for module in ("llama", "attention"):
        monkeypatch.setattr(f"rackserve.model.{module}.choose", lambda holds: Products("direct"))
    _, whole, parts = whole_and_in_parts(tiny_files)
    assert parts.logprobs != whole.logprobs


def test_a_preempted_sequence_continues_under_a_new_number(rank: Rank) -> None:
    prompt = prompt_of(5, 33)
    whole = cold(rank, prompt, 6, SEEDED)
    resumed = rank.run(rank.item(1, 0, prompt + whole[:3], True, output_index=3, sampling=SEEDED))[0].tokens
    assert list(resumed) == whole[3:4]


def test_results_come_in_the_order_of_the_step_and_only_for_items_that_sample(rank: Rank) -> None:
    items = [rank.item(4, 0, prompt_of(4, 9), True), rank.item(2, 0, [3], True), rank.item(8, 0, prompt_of(8, 5), False)]
    results = rank.run(*items)
    assert [(result.sequence, len(result.tokens), result.logprobs) for result in results] == [
        (4, 1, ()),
        (2, 1, ()),
        (8, 0, ()),
    ]
    assert rank.runner.run(Step(3, ())).dp_rank == 3


def test_logprobs_do_not_depend_on_the_cached_prefix(rank: Rank) -> None:
    prompt = prompt_of(6, 3 * BLOCK_TOKENS + 1)
    whole = rank.run(rank.item(1, 0, prompt, True, logprobs=2))[0]
    shared = tuple(rank.tables[1][:3])
    rank.tables[2] = list(shared)
    item = rank.item(2, 3 * BLOCK_TOKENS, prompt[-1:], True, logprobs=2)
    warm = rank.run(StepItem(**{**_fields(item), "new_blocks": shared + item.new_blocks}))[0]
    assert (warm.tokens, warm.logprobs) == (whole.tokens, whole.logprobs)
    assert whole.logprobs[0].top[0] == (whole.tokens[0], whole.logprobs[0].logprob)


def test_kv_is_read_from_the_arena_at_each_step(rank: Rank) -> None:
    prompt = prompt_of(2, 24)
    rank.run(rank.item(1, 0, prompt, True))
    block = rank.tables[1][2]
    before = rank.run(rank.item(1, 24, [5], True, logprobs=0))[0].logprobs
    start = block * rank.block_bytes
    rank.memory[start : start + rank.block_bytes] = rank.block(rank.tables[1][0])
    assert rank.run(rank.item(1, 24, [5], True, logprobs=0))[0].logprobs != before


def test_a_block_never_written_is_an_error_not_a_token(rank: Rank) -> None:
    item = rank.item(1, 4, [1, 2], True)
    with pytest.raises(InvariantError, match="sequence 1: logits are not finite"):
        rank.run(item)


def test_a_retired_sequence_is_forgotten(rank: Rank) -> None:
    rank.run(rank.item(1, 0, [1, 2, 3], True))
    with pytest.raises(InvariantError, match="no token was sampled"):
        rank.run(rank.item(1, 3, None, True), retired=(1,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": b""}, "1 tokens given for 3 positions"),
        ({"tokens": array.array("i", [1, 2, 96]).tobytes()}, "outside the vocabulary"),
        ({"tokens": array.array("i", [1, -2, 3]).tobytes()}, "outside the vocabulary"),
        ({"new_blocks": ()}, r"positions \[0, 3\) do not fit 0 blocks"),
        ({"new_blocks": (NUM_BLOCKS,)}, "exceed 400 blocks"),
        ({"start": -1}, r"positions \[-1, 2\)"),
        ({"start": 511, "new_blocks": tuple(range(129))}, "512 positions"),
        ({"restore": 0}, "no window state"),
        ({"snapshot": 2}, "no window state"),
    ],
)
def test_an_item_that_cannot_be_computed_is_refused_and_changes_nothing(
    rank: Rank, changes: dict[str, Any], words: str
) -> None:
    good = StepItem(1, 0, 3, array.array("i", [1, 2, 3]).tobytes(), (5,), True)
    before = bytes(rank.memory)
    with pytest.raises(InvariantError, match=words):
        rank.run(StepItem(**{**_fields(good), **changes}))
    assert bytes(rank.memory) == before
    assert rank.run(good)[0].tokens


def test_an_arena_too_small_is_refused_before_weights_are_read(tiny_files: ModelFiles) -> None:
    with pytest.raises(ConfigError, match="cannot hold 3 blocks"):
        LlamaRunner(tiny_files, memoryview(bytearray(10)), 3, 16)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_embedded_model_writes_what_transformers_writes(
    smollm2: ModelFiles, smollm2_weights: LlamaWeights, golden: dict[str, Any], dtype: KvDtype
) -> None:
    """All prompts in one batch, in chunks of 33, then 32 decode steps together."""
    rank = Rank(smollm2, smollm2_weights, dtype, num_blocks=80, block_tokens=16)
    prompts = [entry["ids"] for entry in golden.values()]
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while min(len(output) for output in outputs) < 32:
        items = []
        for number, prompt in enumerate(prompts):
            tokens = prompt[done[number] : done[number] + 33] or None
            if len(outputs[number]) < 32:
                items.append(rank.item(number, done[number], tokens, done[number] + len(tokens or [0]) >= len(prompt)))
                done[number] += len(tokens or [0])
        for result in rank.run(*items):
            outputs[result.sequence] += result.tokens
    for output, entry in zip(outputs, golden.values(), strict=True):
        # fp32 must agree throughout; rounding KV to bf16 may tip a choice whose margin lies below twice its bound.
        sure = 32 if dtype == "fp32" else next((at for at, margin in enumerate(entry["margins"]) if margin < 0.3), 32)
        assert output[:sure] == entry["greedy"][:sure]
    assert outputs[2] == cold(rank, prompts[2], 32)
