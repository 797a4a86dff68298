"""Floor 2: the rack's one KV pool, as a directory that no data passes through.

Owns which slot of which tray's segment holds which block (`directory`, `segments`), the leases of readers and the grants of
writers, the sum of whether fetching pays (`planner`), and who owns which rows of an n-gram table (`shards`). It knows keys,
ranks and slots, never tokens or tensors; it reads no clock: callers say `now`.
Law: nobody is told of a block that is not wholly written, and no slot is reused while someone may still read or write it.
"""
