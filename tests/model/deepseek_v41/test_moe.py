from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear, choose_products
from rackserve.model.deepseek_v41.moe import Expert, MoE
from rackserve.model.parallel import Alone, Exchanged, Share
from tests.model.deepseek_v41.golden import CONFIG, linear, noise, weights

NAME, E, D = "layers.3.ffn", CONFIG.n_routed_experts, CONFIG.hidden_size


def moe(top: int = CONFIG.num_experts_per_tok, config: DeepseekV41Config = CONFIG) -> MoE:
    return MoE(config, weights(), NAME, linear(), Alone(), E, top)


def naive_expert(x: Tensor, name: str, weight: float, limit: float = CONFIG.swiglu_limit) -> Tensor:
    w1, w2, w3 = (weights().matrix(f"{name}.{part}").right().double() for part in ("w1", "w2", "w3"))
    gate, up = (x @ w1).clamp(max=limit), (x @ w3).clamp(-limit, limit)
    return (silu(gate) * up * weight) @ w2


def naive(x: Tensor, top: int) -> Tensor:
    """Row by row, expert by expert, in float64."""
    out = []
    bias = weights().vector(f"{NAME}.gate.bias").double()
    for row in x.double():
        scores = softplus(row @ weights().matrix(f"{NAME}.gate").right().double()).sqrt()
        chosen = sorted(range(E), key=lambda e: (-float(scores[e] + bias[e]), e))[:top]
        whole = sum(float(scores[e]) for e in chosen) if top > 1 else 1.0
        y = naive_expert(row, f"{NAME}.shared_experts", 1.0)
        for e in chosen:
            y = y + naive_expert(row, f"{NAME}.experts.{e}", float(scores[e]) / whole * CONFIG.routed_scaling_factor)
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("top", [1, 2, 3, E])
def test_it_is_the_shared_expert_and_the_weighted_best_of_the_others(top: int) -> None:
    """With one expert per row its score itself is the weight: nothing is normalised."""
    x = noise(20, D)
    assert torch.allclose(moe(top)(x).double(), naive(x, top), atol=2e-4)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    x, gate = noise(200, D), moe()
    experts, shares = gate._route(x)
    assert torch.allclose(shares.sum(1), torch.full((200,), CONFIG.routed_scaling_factor))
    scores = softplus(x @ weights().matrix(f"{NAME}.gate").right()).sqrt()
    taken = scores.gather(1, experts)
    assert torch.allclose(shares, taken / taken.sum(1, keepdim=True) * CONFIG.routed_scaling_factor, atol=1e-6)
    by_score_alone = scores.sort(dim=1, descending=True, stable=True).indices[:, : CONFIG.num_experts_per_tok]
    assert not torch.equal(by_score_alone.sort(1).values, experts.sort(1).values)  # the bias matters in this model


def test_of_equal_experts_the_first_are_taken() -> None:
    experts, shares = moe()._route(torch.zeros(3, D))  # every score is the same, so the bias alone decides
    bias = weights().vector(f"{NAME}.gate.bias")
    assert experts[0].tolist() == sorted(range(E), key=lambda e: (-float(bias[e]), e))[: CONFIG.num_experts_per_tok]
    assert shares[0, 0] == shares[0, 1]


def test_what_goes_through_an_expert_is_limited() -> None:
    expert = Expert(CONFIG, weights(), f"{NAME}.experts.0", linear())
    x = noise(6, D, scale=1000.0)
    got = expert(x, torch.ones(6, 1))
    assert torch.allclose(got.double(), naive_expert(x.double(), f"{NAME}.experts.0", 1.0), atol=1e-3)
    assert not torch.allclose(got.double(), naive_expert(x.double(), f"{NAME}.experts.0", 1.0, 1e9), atol=1.0)


def test_the_weight_goes_in_before_the_last_product() -> None:
    """It matters where the input of that product is rounded."""
    rounding = Linear(linear().products, round_inputs=True)
    expert, x = Expert(CONFIG, weights(), f"{NAME}.experts.0", rounding), noise(50, D)
    assert not torch.equal(expert(x, torch.full((50, 1), 0.7)), 0.7 * expert(x, torch.ones(50, 1)))


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    safe = Linear(choose_products(CONFIG, weights()), round_inputs=False)
    model = MoE(CONFIG, weights(), NAME, safe, Alone(), E, CONFIG.num_experts_per_tok)
    x = noise(40, D)
    whole = model(x)
    for begin, end in ((0, 1), (1, 3), (20, 37)):
        assert torch.equal(model(x[begin:end]), whole[begin:end])


def test_no_rows_are_no_mistake() -> None:
    assert moe()(noise(0, D)).shape == (0, D)


class Second(Alone):
    """The second of two ranks, whose peer sends what the test wants it to."""

    share = Share(ep_rank=1, ep_size=2)

    def __init__(self, others: Tensor) -> None:
        self._others = others
        self.destinations = torch.empty(0)
        self.given = torch.empty(0)

    def exchange(self, rows: Tensor, destinations: Tensor) -> Exchanged:
        self.destinations = destinations
        return Exchanged(self._others, len(rows))

    def give_back(self, exchanged: Exchanged, results: Tensor) -> Tensor:
        self.given = results
        return torch.zeros(exchanged.route, results.shape[1])


def test_rows_go_to_the_rank_of_their_expert_and_what_comes_is_computed_here() -> None:
    x = noise(5, D)
    others = torch.cat((noise(3, D, seed=1), torch.tensor([[0.5], [1.0], [2.0]]), torch.tensor([[7.0], [4.0], [7.0]])), 1)
    second = Second(others)
    model = MoE(CONFIG, weights(), NAME, linear(), second, E, CONFIG.num_experts_per_tok)
    y = model(x)
    experts, _ = model._route(x)
    assert second.destinations.tolist() == [expert // (E // 2) for row in experts.tolist() for expert in row]
    for row, (number, weight) in enumerate([(7, 0.5), (4, 1.0), (7, 2.0)]):
        want = naive_expert(others[row, :D].double(), f"{NAME}.experts.{number}", weight)
        assert torch.allclose(second.given[row].double(), want, atol=2e-4)
    shared = torch.stack([naive_expert(row.double(), f"{NAME}.shared_experts", 1.0) for row in x])
    assert torch.allclose(y.double(), shared, atol=2e-4)
