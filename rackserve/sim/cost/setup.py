"""What a step time is asked for: a model on a group of chips in one role."""

from __future__ import annotations

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.topology import Role
from rackserve.sim.cost.architecture import Architecture
from rackserve.sim.cost.kernels import Kernels
from rackserve.sim.hardware import Chip


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of `ep` ranks of `tp` chips each, in lockstep.

    ep               ranks of the group, over which experts are spread (DEP); 1: a rank of its own
    tp               chips that compute a rank together
    chips_per_tray   an exchange between more chips than that crosses trays
    table_shards     chips over which the rows of the model's tables are cut; 0: they lie in host memory
    time_factor      every step takes so many times what the terms give: for asking what follows if they are off
    """

    architecture: Architecture
    chip: Chip
    kernels: Kernels
    role: Role
    tp: int = 1
    ep: int = 1
    chips_per_tray: int = 4
    table_shards: int = 0
    time_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.chips_per_tray < 1 or self.table_shards < 0:
            raise ConfigError(
                f"tp, ep and chips_per_tray must be at least 1 and table_shards at least 0, got {self.tp}, {self.ep}, "
                f"{self.chips_per_tray} and {self.table_shards}"
            )
        if not self.time_factor > 0:
            raise ConfigError(f"time_factor must be above 0, got {self.time_factor}")
        domain = self.chip.number("link_domain")
        if self.num_chips > domain:
            raise ConfigError(
                f"{self.num_chips} chips (ep {self.ep} x tp {self.tp}) exceed the {domain:g} of {self.chip.name} that one fast "
                f"link joins; lower ep or tp"
            )
        for segment in self.architecture.segments:
            if segment.experts and segment.experts.num % self.ep:
                raise ConfigError(f"{segment.experts.num} experts cannot be cut over ep {self.ep} evenly; choose another ep")

    @property
    def num_chips(self) -> int:
        """Chips of the group."""
        return self.tp * self.ep

    @property
    def rate_share(self) -> float:
        """Share of the chip's rate that products reach in this role."""
        return self.kernels.number("prefill_rate_share" if self.role == "prefill" else "decode_rate_share")

    @property
    def prefill_floor_s(self) -> float:
        """The least that a step with prompts takes."""
        return self.kernels.number("prefill_floor_us") * 1e-6 * self.time_factor

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth of a long read from the near domain."""
        return self.chip.number("memory_bytes_per_s") * self.kernels.number("memory_efficiency")

    def domain_share(self, local: str) -> float:
        """Bandwidth, in parts of the near domain's, of reads for which coefficient `local` says whether they are near."""
        return 1.0 if self.kernels.number(local) else self.kernels.number("far_share")

    @property
    def spread_share(self) -> float:
        """Bandwidth, in parts of the near domain's, of reads that no kernel places."""
        return self.kernels.number("far_share") if self.chip.number("memory_domains") > 1 else 1.0

    @property
    def staged_bytes_per_s(self) -> float:
        """Most bandwidth that the reads of weights in flight sustain: their bytes over the time each takes."""
        stages, size = self.kernels.number("weight_stages"), self.kernels.number("stage_bytes")
        return stages * size * self.chip.number("num_sms") / (self.kernels.number("memory_latency_us") * 1e-6)
