"""DeepSeek-V4.1 with two devices for one sequence: what each part of the low-latency path is worth, one after the other.

Devices are processes of one thread each that tell each other partial sums through mailboxes in shared memory. Whole steps of a
runner that verifies five drafts a step, of which as many stand as to make 3.51 tokens a step.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING

from measure import Claim, Figure, Options, Result, figure, interleave, main
from v41_start import ACCEPTANCE, DRAFTS, cores, fastest, kernel_path, random_model, why_not

if TYPE_CHECKING:
    from rackserve.kernels.cpu.v41_tuning import Tuning

CLOCK = "wall-clock time of device 0; the fastest step of a round, the one that others on the machine disturbed least"
PUBLISHED = (
    "Published of another machine, at this acceptance: 1,117 to 1,844 tokens/s/user, step 3.142 to 1.903 ms; wider tensor "
    "parallelism alone -35 % of the step, the inline shared expert -0.22 ms, early gathers -0.016 to -0.021 ms."
)


def _steps() -> tuple[tuple[str, int, Tuning], ...]:
    """What is switched on, one after the other: its name, how many devices, and the tuning."""
    from rackserve.kernels.cpu.v41_tuning import ALL_ON, Tuning

    return (
        ("one device", 1, Tuning(inline_shared=False, early_gathers=False, fused_sums=False)),
        ("+ two devices", 2, Tuning(inline_shared=False, early_gathers=False, fused_sums=False)),
        ("+ inline shared expert", 2, Tuning(inline_shared=True, early_gathers=False, fused_sums=False)),
        ("+ early gathers", 2, Tuning(inline_shared=True, early_gathers=True, fused_sums=False)),
        ("+ fused sums", 2, ALL_ON),
        ("one device, all of it", 1, ALL_ON),
    )


def run(options: Options) -> Result:
    question = "What does each part of the low-latency path bring one sequence, and how long is two devices' step beside one's?"
    if skipped := why_not():
        return Result("low_latency", question, CLOCK, skipped=skipped)
    with _devices(options) as ask:
        names = [name for name, _, _ in _steps()]
        ns = interleave({name: partial(ask, number) for number, name in enumerate(names)}, options.rounds)
    first, last, whole = names[0], names[-2], names[-1]
    figures = [figure(f"step, {first}", "ms", ns[first], scale=1e-6)]
    figures += [figure(f"step, {name}", "ms", ns[name], first, ns[first], 1e-6) for name in names[1:]]
    rates = {name: [1e9 * ACCEPTANCE / value for value in ns[name]] for name in names}
    for before, name in pairwise(names[:-1]):
        figures.append(figure(f"one sequence, {name}", "tokens/s/user", rates[name], before, rates[before]))
    figures.append(figure(f"step, {last}", "ms", ns[last], whole, ns[whole], 1e-6))
    claims = (
        Claim("with all of it two devices take less time a step than one (median)", median(figures[-1].ratios) < 1),
        *(_claim(part) for part in figures[len(names) : -1]),
    )
    notes = (
        f"Kernels: {kernel_path()}. 130 million random weights; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.",
        "With more processes than cores, devices wait for each other's turn on a core, which no kernel can mend.",
        PUBLISHED,
    )
    return Result("low_latency", question, CLOCK, claims, tuple(figures), notes)


def _claim(part: Figure) -> Claim:
    return Claim(f"{part.what}: more tokens/s/user than with {part.to!r} (median)", median(part.ratios) > 1)


@contextmanager
def _devices(options: Options) -> Iterator[Callable[[int], float]]:
    """Two processes that have every variant open; gives what measures one by its number, in nanoseconds a step."""
    context, steps = (64, 4) if options.quick else (256, 40)
    spawn = multiprocessing.get_context("spawn")
    rendezvous = f"/proc/{os.getpid()}/fd/{os.memfd_create('rendezvous', os.MFD_CLOEXEC)}"
    with random_model(options) as model:
        ours, processes = [], []
        for device in range(2):
            own, other = spawn.Pipe()
            task = spawn.Process(target=_device, args=(other, device, rendezvous, model, context, steps), daemon=True)
            task.start()
            other.close()
            ours.append(own)
            processes.append(task)
        for connection in ours:
            connection.recv()

        def ask(number: int) -> float:
            asked = ours[: _steps()[number][1]]
            for connection in asked:
                connection.send(number)
            took = [float(connection.recv()) for connection in asked]
            return took[0]

        yield ask
        for connection, task in zip(ours, processes, strict=True):
            connection.close()
            task.join(10)


def _device(parent: Connection, device: int, rendezvous: str, model: str, context: int, steps: int) -> None:
    """Be a device: open every variant, then measure those that are asked for until there is nobody to ask."""
    from v41_model import Sequences

    from rackserve.model.collectives import TorchCollectives
    from rackserve.model.deepseek_v41.options import RunnerOptions
    from rackserve.model.files import open_model
    from rackserve.model.parallel import Share

    if len(cores()) > device:
        os.sched_setaffinity(0, {cores()[device]})
    group = TorchCollectives(Share(device, 2), rendezvous, ready_s=300.0, limit_s=120.0)
    files, assumed = open_model(model), RunnerOptions(synthetic_acceptance=ACCEPTANCE)
    variants = [
        Sequences(files, "native", 1, context, assumed, collectives=group if devices > 1 else None, tuning=tuning)
        for _, devices, tuning in _steps()
        if devices > 1 or device == 0
    ]
    if device:
        variants.insert(0, variants[0])  # that of one device is never asked for
    parent.send("ready")
    begun = set[int]()
    while True:
        try:
            number = parent.recv()
        except EOFError:
            return
        if number not in begun:
            begun.add(number)
            variants[number].prefill(0)
        parent.send(fastest(variants[number], steps, DRAFTS))


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
