"""What a DeepSeek-V4.1 pass does to be quick when it is small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is done for the latency of small passes. No bit depends on it; each part can be left out, to measure it.

    inline_shared  the shared expert's first products are taken beside the router's, not after it
    early_gathers  selected rows are unpacked once for all layers that read them, and the next layer's window while devices are
                   awaited
    fused_sums     products write into the mailbox, and a row's parts are added, mixed into its streams and normed in one go
    """

    inline_shared: bool = True
    early_gathers: bool = True
    fused_sums: bool = True


ALL_ON = Tuning()
