from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.streams import Mix, Mixer, collapse, expand, rms_norm
from rackserve.model.products import Products
from tests.kernels.triton.drawn import noise

streams = pytest.importorskip("rackserve.kernels.triton.streams")

ROUNDS, EPS, NORM_EPS = 5, 1e-6, 1e-20


class Drawn:
    """A sublayer's result, streams, mix and the next sublayer's mixing, drawn at random."""

    def __init__(self, count: int, n: int, d: int) -> None:
        kinds = 2 * n + n * n
        self.h, self.y = noise(count, n, d), noise(count, d, seed=1)
        comb = noise(count, n, n, seed=2).softmax(-1)
        self.mix = Mix(noise(count, n, seed=3).sigmoid(), 2 * noise(count, n, seed=4).sigmoid(), comb)
        self.weight, self.pre = noise(d, seed=5), noise(count, n, seed=6).sigmoid()
        fn, scale, base = noise(kinds, n * d, seed=7) / d**0.5, noise(3, seed=8), noise(kinds, seed=9)
        self.mixing = streams.Mixing(fn, scale, base, ROUNDS, EPS, NORM_EPS)

    def run(self, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> Any:
        mix = streams.Mix(*(part[rows].contiguous() for part in (self.mix.pre, self.mix.post, self.mix.comb)))
        h, y = self.h[rows].to(dtype), self.y[rows].to(dtype)
        return streams.advance(h, y, mix, self.pre[rows].contiguous(), self.weight, 1e-6, self.mixing)

    def mixer(self, n: int) -> Mixer:
        """The reference's, with these numbers."""
        mixer = Mixer.__new__(Mixer)
        mixer._linear = Linear(Products("single"), round_inputs=False)
        mixer._config = SimpleNamespace(  # type: ignore[assignment]
            hc_mult=n, rms_norm_eps=NORM_EPS, hc_eps=EPS, hc_sinkhorn_iters=ROUNDS
        )
        mixer._fn, mixer._base = self.mixing.fn.t().contiguous(), self.mixing.base
        mixer._scale = self.mixing.scale.repeat_interleave(torch.tensor([n, n, n * n]))
        return mixer


def near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("count", "n", "d"), [(1, 4, 96), (19, 4, 96), (5, 2, 32)])
def test_a_sublayer_agrees_with_the_reference(count: int, n: int, d: int) -> None:
    drawn = Drawn(count, n, d)
    done = drawn.run()
    wanted = expand(drawn.y, drawn.h, drawn.mix)
    assert torch.equal(done.streams, wanted)
    assert near(done.x, rms_norm(collapse(wanted, drawn.pre), drawn.weight, 1e-6))
    mix = drawn.mixer(n).mix(wanted)
    assert near(done.mix.pre, mix.pre)
    assert near(done.mix.post, mix.post)
    assert near(done.mix.comb, mix.comb)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    drawn = Drawn(18, 4, 64)
    together = drawn.run()
    for number in (0, 17):
        alone = drawn.run(slice(number, number + 1))
        assert torch.equal(alone.x[0], together.x[number])
        assert torch.equal(alone.streams[0], together.streams[number])
        assert torch.equal(alone.mix.comb[0], together.mix.comb[number])


def test_before_the_first_layer_streams_stay_and_after_the_last_they_collapse_alone() -> None:
    drawn = Drawn(3, 4, 96)
    begun = streams.advance(drawn.h, None, None, drawn.pre, drawn.weight, 1e-6, drawn.mixing)
    assert begun.streams is drawn.h
    assert near(begun.x, rms_norm(collapse(drawn.h, drawn.pre), drawn.weight, 1e-6))
    assert near(begun.mix.comb, drawn.mixer(4).mix(drawn.h).comb)
    mix = streams.Mix(drawn.mix.pre, drawn.mix.post, drawn.mix.comb)
    ended = streams.advance(drawn.h, drawn.y, mix, drawn.pre, None, 0.0, None)
    assert ended.mix is None
    assert torch.equal(ended.x, collapse(expand(drawn.y, drawn.h, drawn.mix), drawn.pre))


def test_served_formats_are_rounded_once_and_what_follows_reads_the_rounded_streams() -> None:
    drawn = Drawn(4, 4, 64)
    done = drawn.run(dtype=torch.float16)
    wanted = expand(drawn.y.half().float(), drawn.h.half().float(), drawn.mix).half()
    assert torch.equal(done.streams, wanted)
    assert near(done.mix.comb, drawn.mixer(4).mix(wanted.float()).comb)


def test_columns_of_a_mix_sum_to_one() -> None:
    comb = Drawn(2, 4, 32).run().mix.comb
    assert near(comb.sum(1), torch.ones(2, 4))


def test_no_rows_and_wrong_shapes() -> None:
    assert Drawn(2, 4, 32).run(slice(0, 0)).x.shape == (0, 32)
    with pytest.raises(InvariantError, match="3 streams"):
        Drawn(1, 3, 32).run()
    drawn = Drawn(1, 4, 32)
    with pytest.raises(InvariantError, match="both or neither"):
        streams.advance(drawn.h, drawn.y, None, drawn.pre, None, 0.0, None)
