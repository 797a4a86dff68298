"""DeepSeek-V4.1-Flash: compressed sparse attention, mHC, MoE, Engram memory and the DSpark speculative head.

Owns the architecture, its checkpoint format, its roundings and its cached state. Must not know requests, nodes or transport:
it computes steps over an arena. What is rounded to a storage format is stored in that format, so nothing is lost by caching.
Law: a position's result depends on its sequence alone, whatever chunk, batch, cache or rank it is computed in.
"""
