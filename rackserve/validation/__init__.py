"""Measurements that nobody here made, beside what the cost model and the production caches give.

Owns: readers of others' tables, what is predicted for each row, how agreement is told. May not happen here: fitting anything.
Law: every figure says whether what predicts it was ever calibrated on that chip and model.
"""
