"""Floor 0: the values every other package speaks, and the units they are counted in.

Owns identifiers, block keys, requests, steps, transfers, messages, topology and errors.
Nothing here does I/O, keeps state between calls or imports more than the standard library and msgspec.
Law: a value is immutable, compared by content, and means the same in every process.
"""
