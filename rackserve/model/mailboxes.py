"""How the devices of a tensor-parallel rank come to share the memory of their mailboxes."""

from __future__ import annotations

import os

from rackserve.base.errors import ResourceError
from rackserve.kernels.cpu.library import Library
from rackserve.kernels.cpu.mailbox import Mailbox, make_memory, size_of
from rackserve.model.parallel import Collectives


def meet(library: Library, collectives: Collectives, lanes: int, floats: int) -> Mailbox:
    """This device's mailbox; all devices of a group of one rank call it. The first one makes the memory, which has no name.

    lanes, floats  see `Mailbox`; the same on all devices

    ResourceError if there is no memory, or the first device is gone.
    """
    share = collectives.share
    assert share.ep_size == 1
    own = make_memory(size_of(library, share.tp_size, lanes, floats)) if share.tp_rank == 0 else -1
    pid, number = (int(value) for value in collectives.agree([float(os.getpid()), float(own)]))
    try:
        fd = own if own >= 0 else os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ResourceError(f"the mailboxes of device 0 (pid {pid}) cannot be opened: {error.strerror}") from error
    try:
        return Mailbox(library, fd, share.tp_size, share.tp_rank, lanes, floats, collectives.limit_s)
    finally:
        collectives.agree([0.0])  # all have opened it
        os.close(fd)
