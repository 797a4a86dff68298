"""What the devices of a group tell each other, over torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rackserve.base.errors import ResourceError
from rackserve.model.parallel import Exchanged, Share


class TorchCollectives:
    """The `Collectives` of a group of several devices, each a process of its own on this machine.

    The group's processes meet by the file `rendezvous` and then talk over the loopback interface. With the backend "gloo" all
    is on the CPU. "nccl" (with a `device` such as "cuda:1", where all tensors given are) makes the same calls and is untested.
    """

    __slots__ = ("_all", "_device", "_ep", "_tp", "limit_s", "share")

    def __init__(
        self,
        share: Share,
        rendezvous: str,
        *,
        ready_s: float,
        limit_s: float,
        backend: str = "gloo",
        device: str = "cpu",
    ) -> None:
        """Wait for the other devices, up to `ready_s` seconds; no later call waits longer than `limit_s` for them.

        Once per process. Raises ResourceError if the others do not come.
        """
        self.share = share
        self._device = torch.device(device)
        self.limit_s = ready_s
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # read by torch; no port is open to other machines
        devices = range(share.num_devices)

        def meet() -> None:
            dist.init_process_group(
                backend,
                init_method=f"file://{rendezvous}",
                rank=share.device,
                world_size=share.num_devices,
                timeout=timedelta(seconds=ready_s),
            )
            # all make all groups, in the same order
            self._all = self._group(devices, limit_s)
            by_rank = [devices[first : first + share.tp_size] for first in devices[:: share.tp_size]]
            tp_groups = [self._group(members, limit_s) for members in by_rank]
            ep_groups = [self._group(devices[first :: share.tp_size], limit_s) for first in range(share.tp_size)]
            self._tp, self._ep = tp_groups[share.ep_rank], ep_groups[share.tp_rank]

        self._call("meet", "all devices", meet)
        self.limit_s = limit_s

    def tp_sum(self, part: Tensor) -> Tensor:
        if self.share.tp_size == 1:
            return part
        total, *rest = self._tp_gather(part)
        for other in rest:
            total += other
        return total

    def tp_concat(self, part: Tensor) -> Tensor:
        return part if self.share.tp_size == 1 else torch.cat(self._tp_gather(part), dim=-1)

    def exchange(self, rows: Tensor, destinations: Tensor) -> Exchanged:
        if self.share.ep_size == 1:
            return Exchanged(rows, None)
        order = torch.argsort(destinations, stable=True)
        sent = torch.bincount(destinations, minlength=self.share.ep_size)
        received = torch.empty_like(sent)
        self._call("exchange row counts", self._ep_name, lambda: dist.all_to_all_single(received, sent, group=self._ep))
        sent_counts, received_counts = sent.tolist(), received.tolist()
        return Exchanged(self._send(rows[order], sent_counts, received_counts), (order, sent_counts, received_counts))

    def give_back(self, exchanged: Exchanged, results: Tensor) -> Tensor:
        if exchanged.route is None:
            return results
        order, sent_counts, received_counts = exchanged.route
        returned = self._send(results, received_counts, sent_counts)
        restored = torch.empty_like(returned)
        restored[order] = returned
        return restored

    def any(self, flag: bool) -> bool:
        flags = torch.tensor([int(flag)], device=self._device)
        self._call("agree on a flag", "all devices", lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._all))
        return bool(flags)

    def agree(self, values: list[float]) -> list[float]:
        told = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._call("hear from device 0", "all devices", lambda: dist.broadcast(told, 0, group=self._all))
        return [float(value) for value in told]

    @property
    def _tp_name(self) -> str:
        return f"the {self.share.tp_size} devices of rank {self.share.ep_rank}"

    @property
    def _ep_name(self) -> str:
        return f"device {self.share.tp_rank} of all {self.share.ep_size} ranks"

    def _tp_gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all devices of this rank, in order; the same bits on each of them."""
        mine = part.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.share.tp_size)]
        self._call("gather parts", self._tp_name, lambda: dist.all_gather(parts, mine, group=self._tp))
        return parts

    def _send(self, rows: Tensor, sent_counts: list[int], received_counts: list[int]) -> Tensor:
        """Send the first sent_counts[0] rows to rank 0, the next to rank 1...; what all send here, in rank order."""
        incoming = rows.new_empty(sum(received_counts), *rows.shape[1:])
        outgoing = rows.contiguous()
        self._call(
            "exchange rows",
            self._ep_name,
            lambda: dist.all_to_all_single(incoming, outgoing, received_counts, sent_counts, group=self._ep),
        )
        return incoming

    def _group(self, members: Sequence[int], limit_s: float) -> Any:
        return dist.new_group(list(members), timeout=timedelta(seconds=limit_s))

    def _call(self, what: str, among: str, action: Callable[[], object]) -> None:
        """Do `action`. ResourceError if a peer is gone or silent."""
        try:
            action()
        except RuntimeError as error:
            share, reason = self.share, str(error).split("] ", 1)[-1].split(". ")[0]
            raise ResourceError(
                f"device {share.device} of {share.num_devices} could not {what} among {among}: one of them is gone, or silent "
                f"for more than {self.limit_s:g} s ({reason})"
            ) from error
