from __future__ import annotations

import math

import pytest
import torch

from rackserve.model.deepseek_v41.streams import Mixer, collapse, expand, first_pre, rms_norm
from tests.model.deepseek_v41.golden import CONFIG, linear, noise, weights

N, D = CONFIG.hc_mult, CONFIG.hidden_size


def mixer(name: str = "layers.3.hc_attn") -> Mixer:
    return Mixer(CONFIG, weights(), name, linear())


def test_mixing_weights_follow_the_formula_row_by_row() -> None:
    streams, name = noise(5, N, D), "layers.3.hc_attn"
    fn, base, scale = (weights().vector(f"{name}_{part}").double() for part in ("fn", "base", "scale"))
    mix = mixer(name).mix(streams)
    for row in range(5):
        x = streams[row].flatten().double()
        m = (fn @ x) / math.sqrt(float(x.square().mean()))
        pre = torch.sigmoid(m[:N] * scale[0] + base[:N]) + 1e-6
        post = 2 * torch.sigmoid(m[N : 2 * N] * scale[1] + base[N : 2 * N])
        comb = (m[2 * N :] * scale[2] + base[2 * N :]).view(N, N).softmax(1) + 1e-6
        comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
        for _ in range(CONFIG.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
        for got, want in ((mix.pre, pre), (mix.post, post), (mix.comb, comb)):
            assert torch.allclose(got[row].double(), want, atol=1e-5)


@pytest.mark.parametrize("layer", range(CONFIG.num_hidden_layers))
def test_the_mixture_of_streams_is_doubly_stochastic(layer: int) -> None:
    comb = mixer(f"layers.{layer}.hc_ffn").mix(noise(40, N, D, seed=layer, scale=3.0)).comb
    assert bool((comb > 0).all())
    assert torch.allclose(comb.sum(1), torch.ones(40, N), atol=1e-5)  # the last to be normalised
    assert torch.allclose(comb.sum(2), torch.ones(40, N), atol=2e-2)


def test_streams_are_collapsed_and_expanded_by_their_weights() -> None:
    streams, y = noise(3, N, D), noise(3, D, seed=1)
    mix = mixer().mix(streams)
    new = expand(y, streams, mix)
    assert torch.allclose(collapse(streams, mix.pre), torch.einsum("ti,tid->td", mix.pre, streams), atol=1e-6)
    want = mix.post[:, :, None] * y[:, None] + torch.einsum("tij,tid->tjd", mix.comb, streams)
    assert torch.allclose(new, want, atol=1e-5)


def test_before_the_first_layer_the_first_stream_alone_is_taken() -> None:
    streams = noise(3, N, D)
    assert torch.equal(collapse(streams, first_pre(3, N)), streams[:, 0])


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    streams, y = noise(37, N, D), noise(37, D, seed=1)
    whole = mixer().mix(streams)
    alone = mixer().mix(streams[30:31])
    assert torch.equal(whole.pre[30:31], alone.pre)
    assert torch.equal(whole.post[30:31], alone.post)
    assert torch.equal(whole.comb[30:31], alone.comb)
    assert torch.equal(expand(y, streams, whole)[30:31], expand(y[30:31], streams[30:31], alone))
    assert torch.equal(collapse(streams, whole.pre)[30:31], collapse(streams[30:31], alone.pre))


def test_no_rows_are_no_mistake() -> None:
    mix = mixer().mix(noise(0, N, D))
    assert expand(noise(0, D), noise(0, N, D), mix).shape == (0, N, D)
    assert collapse(noise(0, N, D), mix.pre).shape == (0, D)


def test_a_norm_divides_by_the_root_mean_square_and_keeps_tiny_rows() -> None:
    x, weight = noise(4, D), noise(D, seed=1)
    x[3] *= 1e-6
    got = rms_norm(x, weight, CONFIG.rms_norm_eps)
    want = weight.double() * x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(got.double(), want, atol=1e-4)
    assert bool(rms_norm(torch.zeros(1, D), weight, CONFIG.rms_norm_eps).isfinite().all())
