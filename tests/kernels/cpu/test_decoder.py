from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError
from rackserve.kernels.cpu import packing
from rackserve.kernels.cpu.decoder import Decoder, DecoderLayer, DecoderWeights, Packed, Rows
from rackserve.kernels.cpu.library import Floats
from tests.kernels.cpu.variants import ALL, bf16, load, q4_1

HIDDEN, HEADS, KV, DIM, FFN, VOCAB, LAYERS, POSITIONS, BLOCK = 64, 6, 2, 32, 96, 48, 2, 640, 4
NUM_BLOCKS = 400
BLOCK_BYTES = LAYERS * 2 * KV * BLOCK * DIM * 2


class Small:
    """A decoder of random weights, bf16 or Q4_1 blocks (with inputs of 8 bits in the MLP), and the same in float64 numpy."""

    def __init__(self, heads: int = HEADS, blocks: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.matrices: list[dict[str, np.ndarray]] = []

        def matrix(outputs: int, inputs: int, kind: int = packing.Q4) -> tuple[Packed, np.ndarray]:
            if blocks:
                given, values = q4_1(rng, outputs, inputs)
                numbers = given[..., :4].copy().view(np.float16) / np.float16(64)
                given[..., :4] = numbers.view(np.uint8)
                return Packed(packing.pack_q4_1(given), kind), values.astype(np.float64) / 64
            bits, values = bf16(rng, outputs, inputs)
            shrunk = (values / np.sqrt(inputs)).astype(np.float32)
            bits = (shrunk.view(np.uint32) >> 16).astype(np.uint16)
            return Packed(packing.pack_bf16(bits), packing.BF16), (bits.astype(np.uint32) << 16).view(np.float32).astype(
                np.float64
            )

        layers = []
        for _ in range(LAYERS):
            shapes = {
                "qkv": ((heads + 2 * KV) * DIM, HIDDEN),
                "output": (HIDDEN, heads * DIM),
                "gate_up": (2 * FFN, HIDDEN, packing.Q4_EIGHT),
                "down": (HIDDEN, FFN, packing.Q4_EIGHT),
            }
            made = {name: matrix(*shape) for name, shape in shapes.items()}
            norms = {name: rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32) for name in ("attention_norm", "ffn_norm")}
            layers.append(DecoderLayer(**norms, **{name: packed for name, (packed, _) in made.items()}))
            self.matrices.append({**norms, **{name: values for name, (_, values) in made.items()}})
        embedding, self.embedding = matrix(VOCAB, HIDDEN)
        angles = np.outer(np.arange(POSITIONS), 100.0 ** -(np.arange(0, DIM, 2) / DIM))
        self.norm = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        self.cosine, self.sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.weights = DecoderWeights(
            HIDDEN, heads, KV, DIM, FFN, VOCAB, 1e-5, tuple(layers), self.norm, embedding, embedding, self.cosine, self.sine
        )

    def reference(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of all positions, KV rounded to bf16, all else in float64."""
        hidden = self.embedding[tokens]
        cosine, sine = (table[: len(tokens), None].astype(np.float64) for table in (self.cosine, self.sine))
        for layer in self.matrices:
            heads = (normed(hidden, layer["attention_norm"]) @ layer["qkv"].T).reshape(len(tokens), -1, DIM)
            turned, values = heads[:, : HEADS + KV], rounded(heads[:, HEADS + KV :])
            low, high = turned[..., : DIM // 2], turned[..., DIM // 2 :]
            turned = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1)
            queries, keys = turned[:, :HEADS], rounded(turned[:, HEADS:])
            shared = np.arange(HEADS) // (HEADS // KV)
            scores = np.einsum("qhd,khd->hqk", queries, keys[:, shared]) / np.sqrt(DIM)
            scores[:, np.triu(np.ones((len(tokens),) * 2, bool), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed = np.einsum("hqk,khd->qhd", weights, values[:, shared]).reshape(len(tokens), -1)
            hidden = hidden + mixed @ layer["output"].T
            gate, up = np.split(normed(hidden, layer["ffn_norm"]) @ layer["gate_up"].T, 2, -1)
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T
        return normed(hidden, self.norm) @ self.embedding.T


def normed(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * weight


def rounded(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


SMALL, BLOCKS = Small(), Small(blocks=True)
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 600).astype(np.int32)
TABLE = list(np.random.default_rng(6).permutation(NUM_BLOCKS // 2))  # the sequence that is compared
OTHER = list(range(NUM_BLOCKS // 2, NUM_BLOCKS))


class Running:
    """A decoder over an arena full of rubbish."""

    def __init__(
        self, name: str, threads: int = 1, max_rows: int = 600, wide: int = 2, small: Small = SMALL, block_tokens: int = BLOCK
    ) -> None:
        self.arena = np.full(NUM_BLOCKS * BLOCK_BYTES * block_tokens // BLOCK * wide // 2, 0xFF, np.uint8)  # NaN
        self.decoder = Decoder(
            load(name),
            small.weights,
            memoryview(self.arena),
            wide=wide,
            block_tokens=block_tokens,
            max_rows=max_rows,
            threads=threads,
        )

    def compute(self, first: int, end: int, beside: int = 0) -> Floats:
        """Logits of positions [first, end), which the cache then holds, beside a prompt of another sequence."""
        spans = [Rows(TABLE, first, end - first)] + ([Rows(OTHER, 0, beside)] if beside else [])
        self.decoder.forward(np.concatenate([TOKENS[first:end], TOKENS[:beside]]), spans)
        return self.decoder.logits(np.arange(end - first, dtype=np.int32))


@ALL
def test_a_prompt_is_computed_as_in_float64(name: str) -> None:
    found, wanted = Running(name).compute(0, 600), SMALL.reference(TOKENS)
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()  # KV that lies between two bf16 may round to either
    assert (found.argmax(-1) == wanted.argmax(-1)).mean() > 0.98


@ALL
@given(
    st.lists(st.tuples(st.integers(1, 599), st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(1, 3),
)
@settings(derandomize=True, max_examples=12, deadline=None)
def test_no_bit_depends_on_chunks_neighbours_or_threads(name: str, cuts: list[tuple[int, int]], threads: int) -> None:
    whole = reference_bits(name)
    running = Running(name, threads, max_rows=700)
    places = sorted({0, 600, *(at for at, _ in cuts)})
    besides = [beside for _, beside in cuts]
    for number, (first, end) in enumerate(pairwise(places)):
        found = running.compute(first, end, besides[number % len(besides)])
        assert np.array_equal(found, whole[first:end])


@ALL
@pytest.mark.parametrize("threads", [1, 3])
def test_with_quantised_weights_rows_are_as_in_float64_and_the_same_alone_and_together(name: str, threads: int) -> None:
    whole, wanted = Running(name, threads, small=BLOCKS).compute(0, 130), BLOCKS.reference(TOKENS[:130])
    assert np.abs(whole - wanted).max() < 0.02 * np.abs(wanted).max()
    running = Running(name, small=BLOCKS)
    for first, end in pairwise([0, 1, 9, 20, 21, 33, 120, 130]):
        assert np.array_equal(running.compute(first, end, beside=first % 7), whole[first:end])


CACHED: dict[str, Floats] = {}


def reference_bits(name: str) -> Floats:
    if name not in CACHED:
        CACHED[name] = Running(name).compute(0, 600)
    return CACHED[name]


@ALL
def test_decoding_goes_on_where_a_prompt_ended_and_a_batch_is_its_sequences(name: str) -> None:
    whole, running = reference_bits(name), Running(name)
    running.compute(0, 250)
    for position in range(250, 262):  # over the end of a part of the softmax and of blocks
        assert np.array_equal(running.compute(position, position + 1, beside=position % 3)[0], whole[position])


@ALL
def test_kv_in_float32_is_computed_as_in_float64_whatever_the_chunks(name: str) -> None:
    whole = Running(name, wide=4).compute(0, 130)
    wanted = SMALL.reference(TOKENS[:130])
    assert np.abs(whole - wanted).max() < 0.05 * np.abs(wanted).max()  # the reference rounds KV to bf16
    running = Running(name, threads=2, wide=4)
    for first, end in pairwise([0, 63, 64, 65, 81, 82, 130]):
        assert np.array_equal(running.compute(first, end), whole[first:end])


@ALL
@pytest.mark.parametrize("block_tokens", [3, 16, 48])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_bit_depends_on_the_length_of_blocks(name: str, block_tokens: int, threads: int) -> None:
    whole, running = reference_bits(name), Running(name, threads, block_tokens=block_tokens)
    for first, end in pairwise([0, 1, 2, 17, 100, 127, 128, 129, 192, 200]):
        assert np.array_equal(running.compute(first, end, beside=first % 5), whole[first:end])


@ALL
def test_a_step_tells_where_its_time_went_only_when_asked(name: str) -> None:
    running = Running(name)
    running.compute(0, 20)
    assert set(running.decoder.times().values()) == {0.0}
    running.decoder.time(True)
    running.compute(20, 60)
    times = running.decoder.times()
    assert {"qkv", "attend", "head", "wait"} < set(times) and all(seconds >= 0 for seconds in times.values())
    assert times["qkv"] > 0 and times["attend"] > 0 and times["head"] > 0
    running.decoder.time(False)
    running.compute(60, 80)
    assert set(running.decoder.times().values()) == {0.0}


def test_shapes_the_kernels_do_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="34 query heads"):
        Decoder(
            load("portable"),
            Small(heads=68).weights,
            memoryview(bytearray(BLOCK_BYTES)),
            wide=2,
            block_tokens=BLOCK,
            max_rows=8,
        )
