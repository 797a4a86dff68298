"""The published figures beside what the simulator and the cost model give for the same set-ups.

Owns: the table of figures, the set-ups of each, how a prediction comes about. May not happen here: a published figure reaching
a prediction. Figures and predictions meet only in the table that is printed.
Law: changing any published figure changes no prediction.
"""
