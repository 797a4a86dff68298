"""`rackserve profile`: where the time of this machine's own steps goes."""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from pathlib import Path

from rackserve.arguments import at_least, whole_within
from rackserve.base.errors import ConfigError, ResourceError
from rackserve.base.step import Step, StepItem
from rackserve.base.units import MIB
from rackserve.live.computing import crowding
from rackserve.live.cores import allowed_cores
from rackserve.live.regions import available_bytes
from rackserve.live.runner import MAX_THREADS

BLOCK_TOKENS = 16
MAX_BATCH = 1024
MAX_STEP_TOKENS = 65_536
SYSTEM = Path("/proc"), Path("/sys/fs/cgroup")
AROUND = "around"
"""The stage of what is no kernel: planning of buffers, sampling, results."""

LINES = """\
milliseconds a step of the thread that leads it, and their share:
  embed                rows of the embedding          norm      RMS norms, and rounding what products read
  qkv, output          attention's products           place     RoPE, and writing K and V to their blocks
  gate_up, down        the MLP's products             attend    attention over the context
  activate             SiLU, and rounding             join      of parts that threads had of one context
  head                 logits and their maximum       wait      for the other threads
  around               what is no kernel: plan of the buffers, tokens drawn, results
Time in wait means threads with too little to share, or fewer free cores than threads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, LINES
    parser.add_argument("--model", default="embedded", help="embedded (default), or a folder with a Llama model")
    parser.add_argument("--batch", type=whole_within(1, MAX_BATCH), default=1, help="sequences decoded together (default 1)")
    parser.add_argument("--context", type=at_least(1), default=128, help="tokens of each before the step (default 128)")
    parser.add_argument("--prefill", action="store_true", help="steps that compute the context instead of one more token")
    parser.add_argument(
        "--steps", type=at_least(1), default=10, help="steps that are measured, behind one that is not (default 10)"
    )
    parser.add_argument("--threads", type=whole_within(1, MAX_THREADS), default=1, help="cores that share a step (default 1)")


def profile(args: argparse.Namespace) -> int:
    """Print milliseconds of CPU time of the leading thread a step, by stage.

    ConfigError without native kernels, ResourceError if the KV does not fit into memory.
    """
    from rackserve.model.config import LlamaConfig
    from rackserve.model.files import open_model
    from rackserve.model.layout import kv_layout
    from rackserve.model.runner import LlamaRunner

    files = open_model(args.model)
    if not isinstance(files.config, LlamaConfig):
        raise ConfigError(f"--model {args.model} is a DeepSeek-V4.1: profile measures models of the Llama family only")
    each = -(-(args.context + args.steps + 1) // BLOCK_TOKENS)
    blocks, limit = each * args.batch, files.llama.max_positions
    if args.context + args.steps + 1 > limit:
        raise ConfigError(
            f"--context {args.context} and --steps {args.steps}: the model has {limit} positions; {fitting(args.steps, limit)}"
        )
    tokens = args.batch * (args.context if args.prefill else 1)
    if tokens > MAX_STEP_TOKENS:
        raise ConfigError(
            f"--batch {args.batch} and --context {args.context}: at most {MAX_STEP_TOKENS} tokens a step; take fewer"
        )
    size, room = blocks * kv_layout(files.llama, BLOCK_TOKENS, "bf16").block_bytes, available_bytes(*SYSTEM)
    if size > room:
        raise ResourceError(
            f"--batch {args.batch} and --context {args.context}: KV takes {size / MIB:,.0f} MiB of memory, "
            f"{room / MIB:,.0f} are available; take fewer"
        )
    arena = memoryview(bytearray(size))
    runner = LlamaRunner(files, arena, blocks, BLOCK_TOKENS, kernels="native", threads=args.threads)
    prompt = prompt_of(files.llama.vocab_size, args.context)
    tables = [tuple(range(number * each, (number + 1) * each)) for number in range(args.batch)]
    for number, table in enumerate(tables):
        runner.run(Step(0, (StepItem(number, 0, args.context, prompt, table, True),)))
    spent = 0.0
    for number in range(args.steps + 1):
        if number == 1:
            spent = 0.0
            runner.time_stages(True)
        step = (
            prefill_step(args.batch, prompt, args.context) if args.prefill else decode_step(args.batch, args.context + number)
        )
        begin = time.thread_time()
        runner.run(step)
        spent += time.thread_time() - begin
    crowded = crowding(args.threads, 1, allowed_cores(), "--threads")
    if crowded:
        sys.stderr.write(f"note: {crowded}\n")
    sys.stdout.write(f"{runner.path}, {args.threads} thread(s), {tokens} tokens a step, context {args.context}\n")
    sys.stdout.write(as_table(runner.stage_times(), spent, args.steps))
    return 0


def fitting(steps: int, limit: int) -> str:
    """What to take instead of a context that does not fit `limit` positions with its `steps` and the first one."""
    most = limit - steps - 1
    what = f"with so many steps --context {most}" if most > 0 else f"--steps {limit - 2}"
    return f"the model has {limit} positions; {what} is the most"


def prompt_of(vocab_size: int, count: int) -> bytes:
    """Ids that repeat late."""
    return array("i", ((at * 7_919 + 1) % vocab_size for at in range(count))).tobytes()


def prefill_step(batch: int, prompt: bytes, context: int) -> Step:
    """The whole `prompt` of `context` tokens again, of each of `batch` sequences."""
    return Step(0, tuple(StepItem(number, 0, context, prompt, (), True) for number in range(batch)))


def decode_step(batch: int, position: int) -> Step:
    """One token more of each of `batch` sequences, at `position`."""
    return Step(0, tuple(StepItem(number, position, 1, b"", (), True) for number in range(batch)))


def as_table(stages: dict[str, float], spent: float, steps: int) -> str:
    """A line a stage. stages: seconds of each; spent: of all of it, over `steps` steps."""
    rows = {**stages, AROUND: max(0.0, spent - sum(stages.values()))}
    whole = sum(rows.values()) or 1.0
    lines = [f"{name:<10}{seconds / steps * 1e3:>10.3f} ms{seconds / whole:>8.1%}" for name, seconds in rows.items()]
    return "\n".join([*lines, f"{'step':<10}{whole / steps * 1e3:>10.3f} ms", ""])
