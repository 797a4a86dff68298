"""Where the time of an engine goes."""

from __future__ import annotations

import msgspec

from rackserve.base.units import Time, to_seconds


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's engine time went so far, in nanoseconds; a step counts when it has ended.

    kernel  in native or torch compute
    plan    in deciding: all that the worker's messages made it do, and of its steps what is beside the kernels: inputs, draws
    wait    without a step to run, although there were requests: they waited for a message, for KV, or to be planned

    Planning goes on while the step before is computed, so only what is longer than that step shows as waiting.
    """

    kernel: Time = 0
    plan: Time = 0
    wait: Time = 0

    @property
    def seconds(self) -> tuple[float, float, float]:
        """The three, in seconds."""
        return to_seconds(self.kernel), to_seconds(self.plan), to_seconds(self.wait)
