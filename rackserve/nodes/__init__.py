"""Floor 3: one class per process role: frontend, router, prefill worker, decode worker, pool.

A node's `handle` runs to completion and its only way out is its ports; it never asks which host it is on. Every state a
request can be in has an owner here and a deadline. Law: a message of an attempt that is over touches nothing.
"""
