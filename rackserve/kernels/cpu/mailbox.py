"""Mailboxes of the devices of a rank, in memory that all their processes have mapped (src/mailbox.h)."""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import c_char, c_double, c_int32, c_int64, c_void_p

import numpy as np

from rackserve.base.errors import ResourceError
from rackserve.kernels.cpu.library import Floats, Library


class Mailbox:
    """Device `device` of `devices`, each of `lanes` threads, over the memory behind a descriptor, which stays the caller's.

    floats   numbers that a device can tell in one round
    limit_s  how long a wait for another device may last

    ResourceError if there is no memory.
    """

    __slots__ = ("_c", "_limit_s", "_memory", "address", "device", "devices", "floats")

    def __init__(self, library: Library, fd: int, devices: int, device: int, lanes: int, floats: int, limit_s: float) -> None:
        self._c, self._limit_s = library.c, limit_s
        self.devices, self.device, self.floats = devices, device, floats
        _declare(self._c)
        try:
            self._memory = mmap.mmap(fd, size_of(library, devices, lanes, floats))
        except (OSError, ValueError) as error:
            raise ResourceError(
                f"device {device}: no memory for mailboxes ({error}); free memory, or use fewer devices"
            ) from error
        at = ctypes.addressof(c_char.from_buffer(self._memory))
        self.address: int | None = self._c.rk_mailbox_new(at, devices, device, lanes, floats, limit_s)

    def check(self) -> None:
        """ResourceError if a device was late, gone or out of step in a round; the group is of no use then."""
        failed = self._c.rk_mailbox_failed(self.address)
        if failed:
            raise ResourceError(
                f"device {self.device} of {self.devices} did not hear from device {failed - 1}: it is gone, in another step, "
                f"or silent for more than {self._limit_s:g} s"
            )

    def round(self, mine: Floats, lane: int = 0, columns: slice | None = None) -> Floats:
        """One round of one lane, which tells its `columns` of `mine` [rows, width]: what all devices told, [devices, ...]."""
        rows, width = mine.shape
        part = columns or slice(0, width)
        found = np.empty((self.devices, rows, width), np.float32)
        self._c.rk_mailbox_round(
            self.address, lane, np.ascontiguousarray(mine).ctypes.data, rows, width, part.start, part.stop, found.ctypes.data
        )
        self.check()
        return found

    def close(self) -> None:
        """Tell the others that this device is gone. No round may be in progress here."""
        address, self.address = self.address, None
        if address:
            self._c.rk_mailbox_free(address)

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self.close()


def size_of(library: Library, devices: int, lanes: int, floats: int) -> int:
    """Bytes of the memory, which must be zeros at first."""
    _declare(library.c)
    return int(library.c.rk_mailbox_bytes(devices, lanes, floats))


def make_memory(size: int) -> int:
    """A descriptor of `size` bytes of memory without a name. ResourceError if there is none."""
    try:
        fd = os.memfd_create("rackserve:mailboxes", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
    except OSError as error:
        raise ResourceError(f"no memory for mailboxes of {size} bytes: {error.strerror}; free memory") from error
    return fd


def _declare(c: ctypes.CDLL) -> None:
    c.rk_mailbox_bytes.restype, c.rk_mailbox_bytes.argtypes = c_int64, [c_int32, c_int32, c_int64]
    c.rk_mailbox_new.restype = c_void_p
    c.rk_mailbox_new.argtypes = [c_void_p, c_int32, c_int32, c_int32, c_int64, c_double]
    c.rk_mailbox_free.argtypes = [c_void_p]
    c.rk_mailbox_failed.argtypes = [c_void_p]
    c.rk_mailbox_round.argtypes = [c_void_p, c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p]
