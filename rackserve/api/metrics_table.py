"""The table of metrics in docs/operations.md, made from the metrics themselves: `python -m rackserve.api.metrics_table`."""

from __future__ import annotations

from rackserve.api.metrics import Metrics
from rackserve.base.ids import Rank


def table() -> str:
    """Markdown: name as it is scraped (without prefix), kind, labels, meaning."""
    metrics = Metrics([Rank("prefill0")])
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in metrics.registry.collect():
        name = family.name.removeprefix("rackserve_") + ("_total" if family.type == "counter" else "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        lines.append(f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
