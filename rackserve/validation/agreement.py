"""How well predictions agree with measurements: error, sign, and whether they put things into the same order."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec


class Agreement(msgspec.Struct, frozen=True):
    """Of `count` pairs: medians of |error| and of error (predicted / measured - 1), share predicted too low, rank correlation.

    tau   Kendall's: pairs in the same order less pairs in the other, over pairs that differ in both; None without any
    """

    count: int
    median_error: float
    median_signed: float
    share_low: float
    tau: float | None


def agreement(predicted: Sequence[float], measured: Sequence[float]) -> Agreement:
    """The agreement of at least one pair, all measurements above 0."""
    errors = [ours / theirs - 1 for ours, theirs in zip(predicted, measured, strict=True)]
    return Agreement(
        len(errors),
        median(abs(error) for error in errors),
        median(errors),
        sum(error < 0 for error in errors) / len(errors),
        kendall_tau(predicted, measured),
    )


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """1: the same order, -1: the opposite; pairs that tie in either are left out. None if all do."""
    balance = pairs = 0
    for at in range(len(first)):
        for other in range(at):
            product = (first[at] - first[other]) * (second[at] - second[other])
            if product:
                pairs += 1
                balance += 1 if product > 0 else -1
    return balance / pairs if pairs else None
