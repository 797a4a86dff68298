from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rackserve.model.deepseek_v41.block import Block
from rackserve.model.deepseek_v41.moe import MoE
from rackserve.model.deepseek_v41.streams import Mixer, rms_norm
from rackserve.model.parallel import Alone
from tests.model.deepseek_v41.golden import CONFIG, linear, noise, weights

N, D = CONFIG.hc_mult, CONFIG.hidden_size
CASES = [
    ("layers.3", CONFIG.n_routed_experts, CONFIG.num_experts_per_tok),
    ("mtp.1", CONFIG.dspark_n_routed_experts, CONFIG.dspark_num_experts_per_tok),
]


@pytest.mark.parametrize(("name", "num_experts", "top"), CASES)
def test_a_sublayer_is_fed_with_weights_made_one_sublayer_earlier(name: str, num_experts: int, top: int) -> None:
    block = Block(CONFIG, weights(), name, linear(), Alone(), num_experts, top)
    streams, pre = noise(4, N, D), noise(4, N, seed=1).softmax(-1)
    norm, after_norm = weights().vector(f"{name}.attn_norm"), weights().vector(f"{name}.ffn_norm")
    moe = MoE(CONFIG, weights(), f"{name}.ffn", linear(), Alone(), num_experts, top)

    def attention(x: Tensor) -> Tensor:
        return 0.5 * x.flip(1)

    x = block.attention_input(streams, pre)
    assert torch.allclose(x, rms_norm(torch.einsum("ti,tid->td", pre, streams), norm, 1e-20), atol=1e-5)
    got, next_pre = block.join(streams, x, attention)

    first = Mixer(CONFIG, weights(), f"{name}.hc_attn", linear()).mix(streams)
    h = first.post[:, :, None] * attention(x)[:, None] + torch.einsum("tij,tid->tjd", first.comb, streams)
    second = Mixer(CONFIG, weights(), f"{name}.hc_ffn", linear()).mix(h)
    y = moe(rms_norm(torch.einsum("ti,tid->td", first.pre, h), after_norm, 1e-20))  # not by second.pre
    want = second.post[:, :, None] * y[:, None] + torch.einsum("tij,tid->tjd", second.comb, h)
    assert torch.allclose(got, want, atol=1e-3)
    assert torch.allclose(next_pre, second.pre, atol=1e-5)
