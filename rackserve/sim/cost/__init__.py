"""Step times from a model's shape, a chip and a set-up: one roofline term per operator, each coefficient with its source.

Nothing here is measured on the hardware it speaks of: what comes out is a prediction with marks, never a fact.
Law: a term is a sum of bytes, operations and latencies over given rates; every rate and latency is data with a source.
"""
