"""A group whose devices are forks of this process. Each makes the calls that the test knows the answers to.

Arguments: tp_size, ep_size, and "calls", "silent" or "gone" (what device 1 is). Prints what each got as a JSON list.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
from torch import Tensor

from rackserve.base.errors import ResourceError
from rackserve.model.collectives import TorchCollectives
from rackserve.model.parallel import Share

ROUNDS = 8
WIDTH = 3


def draw(share: Share, number: int, *shape: int) -> Tensor:
    """Numbers that are a function of the device and the round; their sum depends on the order of addition."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * number + share.device)) * 10.0**share.device


def rows_of(share: Share, number: int) -> tuple[Tensor, Tensor]:
    """(rows, destinations) that a device sends in a round: 0 to 6 rows, in some rounds none at all or all to one rank."""
    count = (5 * number + 3 * share.device) % 7
    seeded = torch.Generator().manual_seed(number * 10 + share.device)
    places = torch.randint(share.ep_size if number % 3 else 1, (count,), generator=seeded)
    return draw(share, number, count, WIDTH), places


def answer(rows: Tensor, rank: int) -> Tensor:
    """What a rank computes of rows it received: of another width, and different on each rank."""
    return torch.cat([rows * (rank + 2), rows[:, :1] - rank], dim=1)


def calls(group: TorchCollectives) -> list[object]:
    share, found = group.share, list[object]()
    for number in range(ROUNDS):
        rows, places = rows_of(share, number)
        sent = group.exchange(rows, places)
        found.append(
            {
                "sum": group.tp_sum(draw(share, number, 2, 5)).tolist(),
                "concat": group.tp_concat(draw(share, number, 2, 2)).tolist(),
                "received": sent.rows.tolist(),
                "back": group.give_back(sent, answer(sent.rows, share.ep_rank)).tolist(),
                "any": group.any(number == share.device),
                "agree": group.agree([float(share.device), number + 0.1]),
            }
        )
    return found


def be_device(share: Share, rendezvous: str, what: str) -> object:
    try:
        group = TorchCollectives(share, rendezvous, ready_s=60.0, limit_s=2.0 if what == "silent" else 30.0)
        if what == "calls":
            return calls(group)
        group.tp_sum(torch.zeros(3))  # so that device 0 has met everybody before device 1 is silent or goes
        if share.device == 1 and what == "silent":
            signal.pause()
        if share.device == 0:
            group.tp_sum(torch.zeros(3))
    except ResourceError as error:
        return str(error)
    return None


def main() -> None:
    tp_size, ep_size, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    rendezvous = f"/proc/{os.getpid()}/fd/{os.memfd_create('rendezvous')}"
    pids, outputs = [], []
    for device in range(tp_size * ep_size):
        output, own = os.pipe()
        pids.append(os.fork())
        if not pids[-1]:
            share = Share(device % tp_size, tp_size, device // tp_size, ep_size)
            with os.fdopen(own, "w") as file:
                json.dump(be_device(share, rendezvous, what), file)
            os._exit(0)
        os.close(own)
        outputs.append(os.fdopen(output))
    found = [outputs[0].read()]
    if what == "silent":
        os.kill(pids[1], signal.SIGKILL)
    found += [output.read() or "null" for output in outputs[1:]]
    print(f"[{', '.join(found)}]")


if __name__ == "__main__":
    main()
