from __future__ import annotations

import math

import torch

from rackserve.model.deepseek_v41.injection import Injection
from rackserve.model.deepseek_v41.linear import Linear, choose_products
from tests.model.deepseek_v41.golden import CONFIG, linear, noise, weights

LAYER = CONFIG.engram_layer_ids[0]
N, D = CONFIG.hc_mult, CONFIG.hidden_size
WIDTH = CONFIG.engram_columns * CONFIG.engram_head_dim


def test_each_stream_takes_the_value_as_far_as_its_key_agrees() -> None:
    streams, memory = noise(6, N, D), noise(6, WIDTH, seed=1)
    got = Injection(CONFIG, weights(), LAYER, linear()).inject(streams, memory)
    name = f"layers.{LAYER}.engram"
    q, k = (weights().vector(f"{name}.{part}_weight").double() for part in "qk")
    found = memory.double() @ weights().matrix(f"{name}.wkv").right().double()
    for row in range(6):
        value = found[row, N * D :]
        for stream in range(N):
            h, key = streams[row, stream].double(), found[row, stream * D : (stream + 1) * D]
            dot = float((h * q[stream] * k[stream] * key).sum())
            dot /= math.sqrt(float(h.square().mean()) * float(key.square().mean()) * D)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
            assert torch.allclose(got[row, stream].double(), h + gate * value, atol=1e-4)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    injection = Injection(CONFIG, weights(), LAYER, Linear(choose_products(CONFIG, weights()), round_inputs=False))
    streams, memory = noise(33, N, D), noise(33, WIDTH, seed=1)
    whole = injection.inject(streams, memory)
    for begin, end in ((0, 1), (5, 7), (31, 33)):
        assert torch.equal(injection.inject(streams[begin:end], memory[begin:end]), whole[begin:end])


def test_empty_memory_and_no_rows_are_no_mistake() -> None:
    injection = Injection(CONFIG, weights(), LAYER, linear())
    streams = noise(2, N, D)
    assert torch.equal(injection.inject(streams, torch.zeros(2, WIDTH)), streams)
    assert injection.inject(noise(0, N, D), noise(0, WIDTH)).shape == (0, N, D)
