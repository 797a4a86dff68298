"""A real model on a CPU: its files, its forward pass over KV blocks, and the choice of the next token.

Owns weights, the reading of model files, and what an engine remembers of a sequence. Holds no KV of its own: every key and
value lies in the arena it is given, block by block, so that other processes may move them. Knows no clock, node or socket.
Law: a token depends on its sequence alone, to the bit: not on chunks, batch, cached prefix or neighbours.
That takes float32 sums in a fixed order on one thread; with KV rounded to bf16, noise of 1e-6 would grow to 0.2 in a logit.
"""
