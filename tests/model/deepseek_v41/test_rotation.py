from __future__ import annotations

import cmath
import math
from pathlib import Path

import pytest
import torch

import rackserve.model.deepseek_v41 as package
from rackserve.model.deepseek_v41.config import DeepseekV41Config, read_config
from rackserve.model.deepseek_v41.rotation import Rotation, frequencies
from tests.model.deepseek_v41.golden import CONFIG, noise

FLASH = read_config(Path(package.__file__).with_name("flash.json"))
POSITIONS = torch.tensor([0, 1, 7, 63, 64, 1000])


def test_plain_frequencies_fall_by_a_constant_factor() -> None:
    freqs = frequencies(FLASH, compressed=False)
    assert len(freqs) == FLASH.qk_rope_head_dim // 2
    assert freqs.tolist() == pytest.approx([10_000.0 ** (-2 * i / 64) for i in range(32)])


def test_yarn_of_the_released_model_stretches_from_channel_15_to_25() -> None:
    freqs, base = frequencies(FLASH, compressed=True), [160_000.0 ** (-2 * i / 64) for i in range(32)]
    shares = [(1 - float(f) / b) / (1 - 1 / 16) for f, b in zip(freqs, base, strict=True)]
    assert shares == pytest.approx([min(max((i - 15) / 10, 0.0), 1.0) for i in range(32)], abs=1e-5)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("config", [CONFIG, FLASH])
def test_adjacent_pairs_turn_as_complex_numbers_and_other_channels_stay(config: DeepseekV41Config, compressed: bool) -> None:
    freqs, dim = frequencies(config, compressed=compressed), config.qk_rope_head_dim
    x = noise(len(POSITIONS), config.head_dim)
    turned = Rotation(freqs, POSITIONS).apply(x)
    assert torch.equal(turned[:, :-dim], x[:, :-dim])
    for row, position in enumerate(POSITIONS.tolist()):
        for pair in range(dim // 2):
            at = config.head_dim - dim + 2 * pair
            angle = math.fmod(float(torch.tensor(float(position)) * freqs[pair]), 2 * math.pi)
            want = complex(x[row, at], x[row, at + 1]) * cmath.exp(1j * angle)
            assert complex(turned[row, at], turned[row, at + 1]) == pytest.approx(want, abs=1e-5)


def test_the_inverse_undoes_it_for_rows_and_heads() -> None:
    rotation = Rotation(frequencies(CONFIG, compressed=True), POSITIONS)
    for x in (noise(len(POSITIONS), CONFIG.head_dim), noise(len(POSITIONS), 4, CONFIG.head_dim)):
        turned = rotation.apply(x)
        assert not torch.allclose(turned[1:], x[1:], atol=1e-2)
        assert torch.allclose(rotation.apply(turned, inverse=True), x, atol=1e-6)
    heads = noise(len(POSITIONS), 4, CONFIG.head_dim)
    assert torch.equal(rotation.apply(heads)[:, 2], rotation.apply(heads[:, 2]))


def test_a_score_depends_on_the_distance_alone() -> None:
    freqs = frequencies(CONFIG, compressed=False)
    q, k = noise(1, CONFIG.head_dim, seed=1), noise(1, CONFIG.head_dim, seed=2)
    scores = [
        (Rotation(freqs, torch.tensor([at + 5])).apply(q) * Rotation(freqs, torch.tensor([at])).apply(k)).sum()
        for at in (0, 40)
    ]
    assert float(scores[0]) == pytest.approx(float(scores[1]), abs=1e-4)


def test_picked_rows_and_other_positions_beside_them_change_no_bit() -> None:
    freqs = frequencies(CONFIG, compressed=True)
    positions = torch.arange(50)
    rows, x = torch.tensor([3, 3, 49, 0]), noise(4, CONFIG.head_dim)
    picked = Rotation(freqs, positions).pick(rows).apply(x)
    assert torch.equal(picked, Rotation(freqs, positions[rows]).apply(x))
    assert torch.equal(picked[2:3], Rotation(freqs, torch.tensor([49])).apply(x[2:3]))
