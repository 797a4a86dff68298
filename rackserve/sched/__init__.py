"""Floor 2: what a rank computes next.

Owns sequences, the waiting queue, the step scheduler and lockstep groups. It plans from counts and tokens it was given; it
never looks at a clock, the engine or another rank.
Law: no step exceeds its token budget, and no position is in two steps in flight.
"""
