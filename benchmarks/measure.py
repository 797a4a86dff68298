"""What every benchmark shares: interleaved rounds, figures with their spread, and the command line of a script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import process_time_ns

import msgspec

ROUNDS = 7
QUICK_ROUNDS = 2


class Options(msgspec.Struct, frozen=True):
    """`quick`: small sizes and few rounds, to see that a script works; its figures mean nothing. `alone`: without peers."""

    quick: bool = False
    alone: bool = False
    seed: int = 42
    trace: str = ""
    costs: str = ""
    harness: str = ""
    dynamo: str = ""
    mooncake: str = ""
    routers: str = ""
    vllm: str = ""
    llamacpp: str = ""
    openvino: str = ""
    gguf: str = ""

    @property
    def rounds(self) -> int:
        return QUICK_ROUNDS if self.quick else ROUNDS


class Figure(msgspec.Struct, frozen=True):
    """One measured quantity: a value a round, and in each round its ratio to the quantity named `to`, measured beside it."""

    what: str
    unit: str
    values: tuple[float, ...]
    to: str = ""
    ratios: tuple[float, ...] = ()


class Claim(msgspec.Struct, frozen=True):
    """Something the script set out to show, and whether its own figures bear it out."""

    text: str
    holds: bool


def at_most(text: str, ratios: Sequence[float], limit: float) -> Claim:
    """A claim that holds if no round's ratio is above `limit`."""
    return Claim(text, max(ratios) <= limit)


class Result(msgspec.Struct, frozen=True):
    """What a script found. `clock` says which time is meant; `skipped` why there are no figures."""

    name: str
    question: str
    clock: str
    claims: tuple[Claim, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: str = ""


CPU_TIME = "CPU time of the process"


def ns_per_call(action: Callable[[], object], calls: int, clock: Callable[[], int] = process_time_ns) -> float:
    """Nanoseconds of `clock` one call of `action` takes, over `calls` calls."""
    start = clock()
    for _ in range(calls):
        action()
    return (clock() - start) / calls


def interleave(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every variant once a round, beginning with another one each time; the first round warms up and is not kept.

    A variant does its work and returns its own figure, so that set-up is not measured.
    """
    names = list(variants)
    kept: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            value = variants[name]()
            if number:
                kept[name].append(value)
    return kept


def figure(
    what: str,
    unit: str,
    values: Sequence[float],
    to: str = "",
    reference: Sequence[float] | float | None = None,
    scale: float = 1.0,
) -> Figure:
    """A figure whose `values` are given in units of 1 / `scale`; its ratios are values / reference, before scaling."""
    if reference is None:
        ratios: tuple[float, ...] = ()
    elif isinstance(reference, int | float):
        ratios = tuple(value / reference for value in values)
    else:
        ratios = tuple(value / other for value, other in zip(values, reference, strict=True))
    return Figure(what, unit, tuple(value * scale for value in values), to, ratios)


def rate(what: str, unit: str, ns: Sequence[float], count: float, to: str, reference: Sequence[float]) -> Figure:
    """`count` things took each of `ns`: things per second, and how many times longer that took than `reference` ns."""
    return Figure(what, unit, tuple(count / value * 1e9 for value in ns), to, tuple(figure("", "", ns, to, reference).ratios))


def number(value: float) -> str:
    """Three figures that a person can read."""
    size = abs(value)
    if size and size < 0.001:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Smallest to largest."""
    return f"{number(min(values))} to {number(max(values))}"


def verdict(claim: Claim, quick: bool) -> str:
    """In a word or three; the figures of a `quick` run bear nothing out."""
    return "quick run, not judged" if quick else "holds" if claim.holds else "**does not hold**"


def as_markdown(result: Result, quick: bool = False) -> str:
    """A section of RESULTS.md, of a quick run or a whole one."""
    lines = [f"## {result.name}", "", result.question, ""]
    if result.skipped:
        return "\n".join([*lines, f"Skipped: {result.skipped}.", ""])
    lines += [f"- {verdict(claim, quick)}: {claim.text}" for claim in result.claims]
    lines += [""] if result.claims else []
    lines += ["| figure | unit | median | min to max | ratio | min to max | ratio to |", "|---|---|---:|---|---:|---|---|"]
    for part in result.figures:
        ratio = (number(median(part.ratios)), spread(part.ratios)) if part.ratios else ("", "")
        cells = (part.what, part.unit, number(median(part.values)), spread(part.values), *ratio, part.to)
        lines.append(f"| {' | '.join(cells)} |")
    rounds = max(len(part.values) for part in result.figures)
    lines += ["", f"Clock: {result.clock}. Values per figure: {rounds}.", *(f"\n{note}" for note in result.notes), ""]
    return "\n".join(lines)


def main(run: Callable[[Options], Result], description: str | None) -> int:
    """The command line of a script: print the result as a table, or as JSON for run.py."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: only shows that it works")
    parser.add_argument("--alone", action="store_true", help="without any peer: our own figures, beside memory (cpu_engine)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--trace", default="", help="a file of recorded sessions to use as well (simulator)")
    parser.add_argument("--costs", default="", help="costs.json of a calibrated run (simulations); default: assumed costs")
    parser.add_argument("--harness", default="", help="the command of agentx-harness, to compare with (agentx_agreement)")
    parser.add_argument("--dynamo", default="", help="the Python of an environment with ai-dynamo (peer_replay)")
    parser.add_argument("--routers", default="", help="the Python of an environment with sglang-router, vllm-router (routing)")
    parser.add_argument("--vllm", default="", help="the Python of an environment with vLLM (frontend, cpu_engine, served)")
    parser.add_argument("--llamacpp", default="", help="a build folder of llama.cpp (cpu_engine, served)")
    parser.add_argument("--openvino", default="", help="the Python of an environment with openvino-genai (cpu_engine)")
    parser.add_argument("--gguf", default="", help="the embedded model's file, and after commas others (cpu_engine, served)")
    parser.add_argument("--mooncake", default="", help="a Mooncake trace of requests (peer_replay)")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    options = Options(**given)
    result = run(options)
    if as_json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        sys.stdout.write(as_markdown(result, options.quick))
    return 0
