"""Floor 4: the live host. The nodes of floor 3 run here on asyncio, one process per device and one control process.

Owns processes, sockets, shared memory, threads and the real clock. The control process holds frontend, router, pool and what is
added to it; the first device of each worker holds its node, an engine thread and a copier thread, the others compute with it.
No decision about requests may be taken here, and nothing here is imported by a lower floor.
Law: a rank that was announced as down is gone: it sends nothing that is delivered and writes to no memory that is read.
"""
