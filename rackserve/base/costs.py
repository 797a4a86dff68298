"""How long a step takes, as a linear model fitted to recorded steps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.base.units import Time


class StepCost(msgspec.Struct, frozen=True):
    """Nanoseconds a step of one role takes: a base plus a price for each thing it does. All prices are at least 0.

    per_token_ns           per position computed
    per_attended_ns        per (computed position, position it attends to) pair
    per_sequence_ns        per sequence in the step
    per_context_token_ns   per position before the computed ones whose KV is read
    num_steps              steps the model was fitted to
    held_out_error         median of |predicted - measured| / measured over steps kept out of the fit; held_out_error_p90 its
                           90th percentile. None: not calibrated
    """

    base_ns: float
    per_token_ns: float
    per_attended_ns: float
    per_sequence_ns: float
    per_context_token_ns: float
    num_steps: int = 0
    held_out_error: float | None = None
    held_out_error_p90: float | None = None

    def duration_ns(self, new_tokens: int, attended: int, num_sequences: int, context_tokens: int) -> Time:
        """Predicted duration of a step, at least 1 ns."""
        price = (
            self.base_ns
            + self.per_token_ns * new_tokens
            + self.per_attended_ns * attended
            + self.per_sequence_ns * num_sequences
            + self.per_context_token_ns * context_tokens
        )
        return max(1, round(price))

    def decode_ns(self, num_sequences: int, contexts: Sequence[int]) -> list[Time]:
        """`duration_ns` of steps in which each of so many sequences computes one position, by positions before those.

        `contexts` must not fall. Prices are added up in the same order as there, so that rounding cannot tell the two apart.
        """
        attended, read = self.per_attended_ns, self.per_context_token_ns
        fixed, sequences = self.base_ns + self.per_token_ns * num_sequences, self.per_sequence_ns * num_sequences
        if attended:
            prices = [round(fixed + attended * (context + num_sequences) + sequences + read * context) for context in contexts]
        else:
            fixed += sequences
            prices = [round(fixed + read * context) for context in contexts]
        return prices if prices and prices[0] > 0 else [max(1, price) for price in prices]
