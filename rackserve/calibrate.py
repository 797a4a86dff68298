"""The command `calibrate`: fits step costs to the steps of recorded runs and says how far off they are on unseen ones."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from rackserve.base.costs import StepCost
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.bench.calibrate import MIN_STEPS, calibrate
from rackserve.bench.records import read_recording


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument(
        "recordings", nargs="+", metavar="FILE", help="recordings of live runs with their steps, as demo writes them"
    )
    command.add_argument("--out", metavar="FILE", help="write the costs there, for `simulate --costs`")


def run_calibrate(options: argparse.Namespace) -> int:
    """Fit, print, write. ConfigError if no role ran enough steps, and for simulated runs."""
    recordings = [(path, read_recording(path)) for path in options.recordings]
    for path, recording in recordings:
        if recording.run.host != "live":
            raise ConfigError(
                f"{path}: was made by the simulator, whose steps take what a cost model said: a fit would find that again, "
                "with hardly an error; give a recording of a live run"
            )
    costs = calibrate(*(recording.events for _, recording in recordings))
    if not costs:
        raise ConfigError(
            f"{', '.join(options.recordings)}: no role ran {MIN_STEPS} steps that were recorded; "
            "record a longer run of a rack with demo (what bench records holds no steps)"
        )
    for role, cost in costs.items():
        print(role)
        for line in describe(cost):
            print(f"  {line}")
    if options.out:
        try:
            Path(options.out).write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=2))
        except OSError as error:
            raise FileFormatError(f"{options.out}: cannot be written ({error.strerror}); choose another --out") from error
    return 0


def describe(cost: StepCost) -> list[str]:
    """Prices and errors of one role, one a line."""
    prices = {
        "step": cost.base_ns,
        "position computed": cost.per_token_ns,
        "pair of positions": cost.per_attended_ns,
        "sequence": cost.per_sequence_ns,
        "position before": cost.per_context_token_ns,
    }
    lines = [f"{name:18} {price / 1e3:14.3f} us  fitted" for name, price in prices.items()]
    if cost.held_out_error is None or cost.held_out_error_p90 is None:
        return [*lines, "not calibrated"]
    return [
        *lines,
        f"error on unseen steps: {cost.held_out_error:.1%} at the median, {cost.held_out_error_p90:.1%} at p90 "
        f"({cost.num_steps} steps fitted)",
    ]
