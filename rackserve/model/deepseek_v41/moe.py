"""Mixture of experts: a router, experts that may live on other ranks, and a shared expert that everybody has."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.pointwise import steady, total
from rackserve.model.deepseek_v41.weights import Weights
from rackserve.model.parallel import Collectives

NORM_EPS = 1e-20
"""Added to the sum that routing weights are divided by."""


class Expert:
    """A gated feed-forward network ("layers.3.ffn.experts.7"), this device's slice of its inner width."""

    __slots__ = ("_limit", "_linear", "_w1", "_w2", "_w3")

    def __init__(self, config: DeepseekV41Config, weights: Weights, name: str, linear: Linear) -> None:
        self._limit, self._linear = config.swiglu_limit, linear
        self._w1, self._w2, self._w3 = (weights.matrix(f"{name}.{part}") for part in ("w1", "w2", "w3"))

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """`x` [T, hidden] -> [T, hidden]; the routing weight [T, 1] goes in before the last product."""
        x = self._linear.rounded(x) if self._w1.quantised else x
        gate = self._linear.plain(x, self._w1).clamp(max=self._limit)
        inner = steady(silu, gate) * self._linear.plain(x, self._w3).clamp(-self._limit, self._limit)
        return self._linear(inner if weight is None else inner * weight, self._w2)


class MoE:
    """The feed-forward part of a layer ("layers.3.ffn"): every row goes to its `top` best of `num_experts` experts."""

    __slots__ = ("_bias", "_collectives", "_config", "_experts", "_gate", "_linear", "_owned", "_shared", "_top")

    def __init__(
        self,
        config: DeepseekV41Config,
        weights: Weights,
        name: str,
        linear: Linear,
        collectives: Collectives,
        num_experts: int,
        top: int,
    ) -> None:
        self._config, self._linear, self._collectives, self._top = config, linear, collectives, top
        self._gate, self._bias = weights.matrix(f"{name}.gate"), weights.vector(f"{name}.gate.bias")
        self._owned = collectives.share.experts(num_experts)
        self._experts = [Expert(config, weights, f"{name}.experts.{number}", linear) for number in self._owned]
        self._shared = Expert(config, weights, f"{name}.shared_experts", linear)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, hidden] -> [T, hidden]. Every device of the group must call it, with T = 0 if it has no rows."""
        experts, weights = self._route(x)
        rows = torch.cat((x.repeat_interleave(self._top, 0), weights.reshape(-1, 1), experts.reshape(-1, 1).float()), 1)
        sent = self._collectives.exchange(rows, experts.reshape(-1) // len(self._owned))
        results = self._collectives.give_back(sent, self._compute(sent.rows)).view(len(x), self._top, x.shape[1])
        return self._collectives.tp_sum(total(results, 1)[:, 0] + self._shared(x, None))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts, int64 [T, top], and their weights. The bias chooses; it does not weigh."""
        scores = steady(softplus, self._linear.plain(x, self._gate)).sqrt()
        chosen = (scores + self._bias).sort(dim=1, descending=True, stable=True).indices[:, : self._top]
        weights = scores.gather(1, chosen)
        if self._top > 1:
            weights = weights / (total(weights, 1) + NORM_EPS)
        return chosen, weights * self._config.routed_scaling_factor

    def _compute(self, rows: Tensor) -> Tensor:
        """Results [m, hidden] of rows [m, hidden + weight + expert number]."""
        x, weights, numbers = rows[:, :-2], rows[:, -2:-1], rows[:, -1].to(torch.int64)
        results = torch.empty_like(x)
        for number, expert in zip(self._owned, self._experts, strict=True):
            mine = (numbers == number).nonzero()[:, 0]
            if len(mine):
                results[mine] = expert(x[mine], weights[mine])
        return results
