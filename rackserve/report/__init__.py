"""Floor 5: turns summaries of runs into a page and a table a person can read.

Owns the comparison of arms, the drawings and the self-contained HTML report. It computes no figure of its own beyond ratios:
numbers come from `bench.metrics` and `bench.rack`. No network, no scripts, no plotting library.
Law: throughput is always shown as three numbers, and a simulated figure never without its model's error.
"""
