"""The page of curves: each alone, and one over the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rackserve.bench.frontier import Curve
from rackserve.bench.metrics import DEFINITIONS
from rackserve.report.curve_sections import curves_section, multiples_section
from rackserve.report.curves import Cost, CurveComparison
from rackserve.report.page import page


def render_curves(
    curves: Sequence[Curve],
    comparisons: Sequence[CurveComparison] = (),
    costs: Mapping[str, Sequence[Cost]] | None = None,
    title: str = "rackserve curves",
    about: str = "",
) -> str:
    """The page as text: comparisons first, then the curves, then the definitions of all figures.

    Under the title stands `about`, or else the curves' names.
    """
    over = "".join(multiples_section(result, costs or {}) for result in comparisons)
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in DEFINITIONS.items())
    rules = f"<details><summary>How each figure is defined</summary><dl>{items}</dl></details>"
    return page(title, about or ", ".join(curve.name for curve in curves), over + curves_section(curves) + rules)


def write_curve_report(
    path: Path | str,
    curves: Sequence[Curve],
    comparisons: Sequence[CurveComparison] = (),
    costs: Mapping[str, Sequence[Cost]] | None = None,
    title: str = "rackserve curves",
    about: str = "",
) -> None:
    """Write the page of `render_curves` to `path`."""
    Path(path).write_text(render_curves(curves, comparisons, costs, title, about), encoding="utf-8")
