"""One published measurement set up here: figures side by side, and how they agree."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackserve.validation.agreement import Agreement, agreement


class Row(msgspec.Struct, frozen=True):
    """One figure. `published` is None where only ours is of interest."""

    what: str
    unit: str
    published: float | None
    ours: float

    @property
    def error(self) -> float | None:
        return None if self.published is None else self.ours / self.published - 1


class Trial(msgspec.Struct, frozen=True):
    """A published measurement, what of it was set up how, and its figures. None of them was fitted to anything."""

    name: str
    source: str
    setup: str
    rows: tuple[Row, ...]

    def agreement(self) -> Agreement | None:
        """Over the figures that were published; None without any. Figures of several units have no order."""
        rows = [row for row in self.rows if row.published is not None]
        if not rows:
            return None
        found = agreement([row.ours for row in rows], [row.published or 0.0 for row in rows])
        return found if len({row.unit for row in rows}) == 1 else msgspec.structs.replace(found, tau=None)


def lines_of(trial: Trial) -> list[str]:
    """The trial as text."""
    lines = [f"{trial.name}: not calibrated ({trial.source})", f"  set up: {trial.setup}"]
    width = max(len(row.what) for row in trial.rows)
    for row in trial.rows:
        published = "-" if row.published is None else f"{row.published:,.4g}"
        error = "" if row.error is None else f"{row.error:+8.0%}"
        lines.append(f"  {row.what:{width}}  {row.unit:8} published {published:>8}  ours {row.ours:>9,.4g} {error}".rstrip())
    found = trial.agreement()
    if found is not None:
        lines.append(f"  {told(found)}")
    return lines


def told(found: Agreement) -> str:
    """An agreement in one line."""
    tau = "-" if found.tau is None else f"{found.tau:+.2f}"
    return (
        f"{found.count} figures: median |error| {found.median_error:.0%}, median error {found.median_signed:+.0%}, "
        f"too low {found.share_low:.0%}, rank correlation {tau}"
    )


def largest_at(levels: Sequence[float], values: Sequence[float], bound: float) -> float:
    """The knee: the highest level up to which no value exceeds `bound`; 0 if the first does."""
    knee = 0.0
    for level, value in zip(levels, values, strict=True):
        if value > bound:
            return knee
        knee = level
    return knee
