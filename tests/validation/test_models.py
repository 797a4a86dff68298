from __future__ import annotations

import pytest

from rackserve.validation.models import gpt_oss, kimi


def test_sizes_are_those_the_models_are_known_by() -> None:
    """117 billion parameters in 63 GB, of which 5 billion work on a token; a trillion in 590 GB, 32 billion of them."""
    model = gpt_oss()
    (segment,) = model.segments
    assert segment.experts is not None
    each = segment.experts.parameters * segment.num_layers
    assert segment.dense.parameters + 128 * each + 2 * model.head.parameters == pytest.approx(117e9, rel=0.02)
    assert segment.dense.parameters + 4 * each + model.head.parameters == pytest.approx(5.1e9, rel=0.1)
    assert model.num_bytes == pytest.approx(65e9, rel=0.05)
    assert kimi("decode").num_bytes == pytest.approx(590e9, rel=0.05)


def test_half_of_the_layers_read_a_window_alone() -> None:
    full, window = gpt_oss().segments[0].attention
    assert full.num_layers == window.num_layers
    assert full.rows(10_000) == 10_000 and window.rows(10_000) == 128


def test_a_hundred_thousand_tokens_of_kimi_take_as_much_as_published() -> None:
    assert kimi("decode").kv_bytes * 100_000 == pytest.approx(3.8e9, rel=0.1)


def test_prompts_attend_to_expanded_latents() -> None:
    for prompt, decode in zip(kimi("prefill").segments, kimi("decode").segments, strict=True):
        assert prompt.attention[0].pair_flops < decode.attention[0].pair_flops / 3
