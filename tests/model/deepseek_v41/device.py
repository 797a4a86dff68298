"""A group whose devices are forks of this process; they run the same passes and steps, each rank with sequences of its own.

Arguments: tp_size, ep_size, the file to write what every device computed to, by `torch.save`, and the kernels.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch

from rackserve.base.step import Step, StepResult, TokenLogprobs
from rackserve.model.collectives import TorchCollectives
from rackserve.model.parallel import Share
from rackserve.model.runner import Kernels
from tests.model.deepseek_v41.golden import PROMPTS, Bench, cut, item, prompt, table

PASSES = 5
SIZES = (64, 3, 100)
"""A prompt's chunks: others on each rank, so that ranks have different numbers of rows, and none once a prompt is done."""

NUM_STEPS = 8


def prompts_of(rank: int, ep_size: int) -> list[str]:
    """The prompts whose logits a rank computes, side by side."""
    return list(PROMPTS) if ep_size == 1 else [["long"], ["short", "medium"]][rank]


def logits_of(bench: Bench, names: list[str]) -> dict[str, torch.Tensor]:
    """Logits of all positions, in PASSES passes, of which the last have no rows for some ranks and prompts."""
    states = {name: bench.begin(PROMPTS.index(name)) for name in names}
    pieces = {name: cut(prompt(name), SIZES if name == "long" else (7, 33)) for name in names}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for number in range(PASSES):
        present = [name for name in names if number < len(pieces[name])]
        done = bench.compute(*((states[name], pieces[name][number]) for name in present))
        for name, rows in zip(present, done, strict=True):
            found[name].append(rows)
    assert all(len(piece) <= PASSES for piece in pieces.values())
    return {name: torch.cat(rows) for name, rows in found.items()}


class Runs(Protocol):
    """A device, or a group of them in one process."""

    def run(self, step: Step) -> StepResult: ...


def output_of(device: Runs, rank: int) -> tuple[list[int], list[int], list[TokenLogprobs]]:
    """Greedy steps: tokens, drafts verified in each, log-probabilities.

    Rank 0 drafts and is done early: from then on its steps are dummies. Rank 1 does not draft.
    """
    name, num_draft = (("short", 3), ("medium", 0))[rank]
    ids, at = prompt(name), 0
    output, verified, shares = list[int](), list[int](), list[TokenLogprobs]()
    for number in range(NUM_STEPS):
        if rank == 0 and number >= NUM_STEPS // 2:
            assert device.run(Step(rank, ())).items == ()
            continue
        fields = {"output_index": len(output), "num_draft": num_draft, "logprobs": 4}
        sent = item(1, at, () if at else ids, () if at else table(), **fields)
        (result,) = device.run(Step(rank, (sent,))).items
        at += sent.num_tokens + len(result.tokens) - 1
        output += result.tokens
        verified.append(result.num_verified)
        shares += result.logprobs
    return output, verified, shares


def be_device(share: Share, rendezvous: str, kernels: Kernels) -> dict[str, Any]:
    group = TorchCollectives(share, rendezvous, ready_s=60.0, limit_s=60.0)
    bench = Bench(collectives=group, kernels=kernels)
    return {
        "logits": logits_of(bench, prompts_of(share.ep_rank, share.ep_size)),
        "output": output_of(bench.runner, share.ep_rank),
    }


def main() -> None:
    tp_size, ep_size, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    kernels: Kernels = "native" if sys.argv[4] == "native" else "torch"
    torch.set_num_threads(1)
    rendezvous = f"/proc/{os.getpid()}/fd/{os.memfd_create('rendezvous')}"
    devices = range(tp_size * ep_size)
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for device in devices:
            pids.append(os.fork())
            if not pids[-1]:
                share = Share(device % tp_size, tp_size, device // tp_size, ep_size)
                torch.save(be_device(share, rendezvous, kernels), Path(folder) / str(device))
                os._exit(0)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            sys.exit(f"devices ended with {statuses}")
        torch.save([torch.load(Path(folder) / str(device), weights_only=False) for device in devices], path)


if __name__ == "__main__":
    main()
