"""The command `cost-model`: the terms of one step on given hardware, what they rest on, and the memory beside them."""

from __future__ import annotations

import argparse

import msgspec

from rackserve.architectures import architecture_named
from rackserve.arguments import at_least
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.linear import decode_plane, prefill_cost
from rackserve.sim.cost.load import StepLoad, decode_load, prefill_load
from rackserve.sim.cost.memory import budget, require_sequences, sequence_bytes
from rackserve.sim.cost.sensitivity import GROWTH, Change, changes, term_mark
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.cost.terms import Term
from rackserve.sim.hardware import Chip, Value, chips, named


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--model", default="deepseek-v4.1-flash", metavar="NAME", help="default deepseek-v4.1-flash")
    command.add_argument("--chip", default="gb300", metavar="NAME", help="default gb300; a wrong name lists all")
    command.add_argument("--kernels", metavar="NAME", help="a set of coefficients (default: the chip's own)")
    command.add_argument("--role", choices=["prefill", "decode"], default="decode", help="default decode")
    command.add_argument("--tp", type=at_least(1), default=1, help="chips that compute a rank together (default 1)")
    command.add_argument(
        "--ep",
        type=at_least(1),
        help="ranks in lockstep that share the experts (default: 1, 2, 4 ..., as few as hold the model)",
    )
    command.add_argument(
        "--table-shards", type=at_least(0), default=0, metavar="N", help="chips that share lookup tables (default 0: the host)"
    )
    command.add_argument("--sequences", type=at_least(1), default=16, help="decode: sequences of each rank (default 16)")
    command.add_argument("--drafts", type=at_least(0), default=5, help="decode: drafts to verify per sequence (default 5)")
    command.add_argument(
        "--tokens", type=at_least(1), default=8192, help="prefill: positions of each rank's chunk (default 8192)"
    )
    command.add_argument("--tail", type=at_least(0), help="prefill: of those, how many pass every layer (default: all)")
    command.add_argument("--context", type=at_least(0), default=142_000, help="positions before those (default 142000)")


def cost_model(options: argparse.Namespace) -> int:
    """Print the step. ConfigError for a set-up that cannot be, ResourceError for one that does not fit in memory."""
    model = StepModel(_setup(options))
    sequences = options.sequences if options.role == "decode" else 1
    require_sequences(model.setup, sequences, options.context)
    load = _load(options)
    terms, seconds, moved = model.terms([load]), model.seconds([load]), changes(model, [load])
    _print_terms(model, terms, seconds, moved)
    _print_lines(model, options)
    _print_kernels(model, seconds, moved)
    _print_chip(model.setup.chip)
    _print_memory(model.setup, options)
    return 0


def _setup(options: argparse.Namespace) -> Setup:
    """The set-up that is asked for; without `--ep` the narrowest group of 1, 2, 4 ... ranks that holds the model."""
    chip = named("--chip", chips(), options.chip)
    setup = Setup(
        architecture=architecture_named(options.model),
        chip=chip,
        kernels=named("--kernels", kernel_sets(), options.kernels or chip.kernels),
        role=options.role,
        tp=options.tp,
        ep=options.ep or 1,
        table_shards=options.table_shards,
    )
    while options.ep is None and not budget(setup).fits and 2 * setup.num_chips <= chip.number("link_domain"):
        setup = msgspec.structs.replace(setup, ep=2 * setup.ep)
    return setup


def _load(options: argparse.Namespace) -> StepLoad:
    if options.role == "prefill":
        return prefill_load(options.tokens, options.context, options.tail)
    return decode_load(options.sequences, options.sequences * options.context, 1 + options.drafts)


def _print_terms(model: StepModel, terms: tuple[Term, ...], seconds: float, moved: dict[str, Change]) -> None:
    setup = model.setup
    print(f"{setup.architecture.name}, {setup.role} on {setup.num_chips} x {setup.chip.name} (ep {setup.ep}, tp {setup.tp})")
    print(f"  {'term':18} {'us':>11} {'share':>6}  {'bound':8} {'GB':>9} {'TFLOP':>9}  known as")
    total = sum(term.seconds for term in terms)
    for term in terms:
        mark = term_mark(term.name, moved, setup.kernels)
        print(
            f"  {term.name:18} {term.seconds * 1e6:11.1f} {term.seconds / total:6.1%}  {term.bound:8} "
            f"{term.num_bytes / 1e9:9.3f} {term.num_flops / 1e12:9.3f}  {mark}"
        )
    floor = ", its least" if seconds > total else ""
    print(f"  {'step':18} {seconds * 1e6:11.1f} {'':6}{floor}")


def _print_lines(model: StepModel, options: argparse.Namespace) -> None:
    if options.role == "decode":
        plane = decode_plane(model, options.sequences, options.context, 1 + options.drafts)
        print(
            f"around here: {plane.base_ns / 1e6:.3f} ms + {plane.per_sequence_ns / 1e6:.4f} ms a sequence + "
            f"{plane.per_context_token_ns:.3f} ns a cached token"
        )
    else:
        cost = prefill_cost(model, options.tokens, options.context, options.tail)
        print(
            f"around here: {cost.base_ns / 1e6:.3f} ms + {cost.per_token_ns / 1e3:.3f} us a token + "
            f"{cost.per_attended_ns * 1e3:.3f} ps a pair of positions"
        )


def _print_kernels(model: StepModel, seconds: float, moved: dict[str, Change]) -> None:
    """Coefficients, the one first on which the step hangs most."""
    print(f"coefficients, and what {GROWTH:.0%} more of one does to the step:")
    for name, change in moved.items():
        _print_value(name, getattr(model.setup.kernels, name), f"{change.step / seconds:+7.2%} ")


def _print_chip(chip: Chip) -> None:
    print(f"{chip.name}:")
    for name in Chip.__struct_fields__:
        value = getattr(chip, name)
        if isinstance(value, Value):
            _print_value(name, value)


def _print_value(name: str, value: Value, note: str = "") -> None:
    number = value.number if isinstance(value.number, str) else f"{value.number:g}"
    print(f"  {name:22} {number:>10}  {note}{value.mark:9}  {value.source}")


def _print_memory(setup: Setup, options: argparse.Namespace) -> None:
    memory = budget(setup)
    print(f"memory of one chip: {memory.capacity_bytes / 1e9:.1f} GB may be planned with")
    for line in memory.plan.lines:
        print(f"  {line.name:28} {line.num_bytes / 1e9:9.3f} GB")
    each = sequence_bytes(setup, options.context)
    count = memory.most_sequences(each)
    print(f"  {'sequences':28} {count:9,} of {options.context:,} cached tokens, {each / 1e6:.1f} MB each")
