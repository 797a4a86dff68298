"""Floor 1: runs of consecutive block keys in a compressed radix tree, shared by prefix cache, pool and router index.

Owns the tree (`RunTree`) and the store of slots under it (`RunCache`). It knows keys and slot numbers, never tokens, tensors
or ranks. Law: presence is prefix-closed: a run is present only if its parent is, and eviction takes tails first.
"""
