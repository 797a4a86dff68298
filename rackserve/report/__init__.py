"""Floor 5: turns summaries and recordings of runs, and curves, into pages and tables a person can read.

Owns the comparison of arms and of curves, the drawings and the self-contained HTML pages (`report.css` and `report.js` go into
them). It computes ratios, costs and interpolations and no figure of a run: those come from `bench.metrics` and `bench.rack`.
Nothing is loaded from a network, and a page without its script lacks only what a reader does: pointing, choosing, saving.
Law: throughput is always shown as three numbers where they are known, and a simulated figure never without its model's error.
"""
