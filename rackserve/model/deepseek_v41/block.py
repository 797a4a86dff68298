"""One layer's parts and how they are joined through the residual streams; layers and DSpark stages alike."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rackserve.model.deepseek_v41.attention import Attention
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.linear import Linear
from rackserve.model.deepseek_v41.moe import MoE
from rackserve.model.deepseek_v41.streams import Mixer, collapse, expand, rms_norm
from rackserve.model.deepseek_v41.weights import Weights
from rackserve.model.parallel import Collectives


class Block:
    """A layer ("layers.3") or stage ("mtp.0"), with `num_experts` routed experts of which `top` are taken."""

    __slots__ = ("_attn_mixer", "_attn_norm", "_eps", "_ffn_mixer", "_ffn_norm", "attention", "moe")

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
        self._eps = config.rms_norm_eps
        self._attn_norm, self._ffn_norm = weights.vector(f"{name}.attn_norm"), weights.vector(f"{name}.ffn_norm")
        self._attn_mixer = Mixer(config, weights, f"{name}.hc_attn", linear)
        self._ffn_mixer = Mixer(config, weights, f"{name}.hc_ffn", linear)
        self.attention = Attention(config, weights, f"{name}.attn", linear, collectives)
        self.moe = MoE(config, weights, f"{name}.ffn", linear, collectives, num_experts, top)

    def attention_input(self, streams: Tensor, pre: Tensor) -> Tensor:
        """What the attention sublayer works on: [T, n, d] -> [T, d]."""
        return rms_norm(collapse(streams, pre), self._attn_norm, self._eps)

    def join(self, streams: Tensor, x: Tensor, attend: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Both sublayers. `x` is `attention_input`, `attend` its attention. Returns the streams and the next layer's `pre`."""
        mix = self._attn_mixer.mix(streams)
        streams = expand(attend(x), streams, mix)
        after = self._ffn_mixer.mix(streams)
        y = self.moe(rms_norm(collapse(streams, mix.pre), self._ffn_norm, self._eps))
        return expand(y, streams, after), after.pre
