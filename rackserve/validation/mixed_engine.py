"""Request timings of one engine that mixes prompts and decode in its steps: the production scheduler over modelled steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rackserve.architectures import architecture_named
from rackserve.base.errors import FileFormatError, InvariantError
from rackserve.base.ids import Rank
from rackserve.base.kv_layout import KvGroup, KvLayout
from rackserve.base.request import Placement, Request
from rackserve.base.step import UNNAMED_TOKEN, ItemResult, Step, StepResult
from rackserve.base.units import blocks_for
from rackserve.kv.rank_cache import RankCache
from rackserve.sched.scheduler import Scheduler, SchedulerConfig
from rackserve.sched.sequence import Sequence as Running
from rackserve.sched.sequence import new_sequence
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.load import load_of
from rackserve.sim.cost.memory import budget
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.hardware import chips
from rackserve.validation.agreement import Agreement, agreement

BLOCK_TOKENS = 16
RANKS = 2
MAX_SEQUENCES = 128
MAX_BATCHED_TOKENS = 2_048
SETUP = (
    f"Qwen3-30B-A3B on {RANKS} RTX PRO 6000, experts over both (DEP{RANKS}); {MAX_SEQUENCES} sequences a rank, as the most in "
    f"flight show; {MAX_BATCHED_TOKENS:,} tokens a step (assumed)"
)


class Timing(msgspec.Struct, frozen=True):
    """One request: tokens, and seconds on one clock from the first request's arrival on."""

    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    first_s: float
    last_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; only of requests with several."""
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


class TimingAgreement(msgspec.Struct, frozen=True):
    """Agreement over all requests; `duration_error`: time until the last token, predicted / measured - 1."""

    ttft: Agreement
    tpot: Agreement
    e2e: Agreement
    duration_error: float


class _Line(msgspec.Struct):
    input_toks: int
    output_toks: int
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


def read_timings(path: Path) -> list[Timing]:
    """Measured requests in LLMServingSim's form, in order of arrival. FileFormatError for anything else."""
    try:
        lines = [msgspec.json.decode(line, type=_Line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, msgspec.MsgspecError) as error:
        raise FileFormatError(f"{path}: {error}; give LLMServingSim's measured requests, one JSON object a line") from None
    if not lines or any(line.input_toks < 1 or line.output_toks < 2 for line in lines):
        raise FileFormatError(f"{path}: needs requests with a prompt and at least 2 output tokens each; remove the others")
    lines.sort(key=lambda line: line.queued_ts)
    begin = lines[0].queued_ts
    return [
        Timing(
            line.input_toks, line.output_toks, line.queued_ts - begin, line.first_token_ts - begin, line.last_token_ts - begin
        )
        for line in lines
    ]


def compare_timings(path: Path) -> TimingAgreement:
    """Measured timings against simulated ones of the same requests at the same times."""
    measured = read_timings(path)
    chip = chips()["rtx-pro-6000"]
    setup = Setup(
        architecture=architecture_named("qwen3-30b-a3b"),
        chip=chip,
        kernels=kernel_sets()[chip.kernels],
        role="decode",
        ep=RANKS,
    )
    ours = simulate_mixed(measured, StepModel(setup), MAX_SEQUENCES, MAX_BATCHED_TOKENS)
    return TimingAgreement(
        agreement([part.ttft_s for part in ours], [part.ttft_s for part in measured]),
        agreement([part.tpot_s for part in ours], [part.tpot_s for part in measured]),
        agreement([part.e2e_s for part in ours], [part.e2e_s for part in measured]),
        max(part.last_s for part in ours) / max(part.last_s for part in measured) - 1,
    )


class _Rank:
    """One rank of the engine: its scheduler, and requests that wait for room."""

    __slots__ = ("cache", "firsts", "lasts", "most", "running", "scheduler", "waiting")

    def __init__(self, number: int, config: SchedulerConfig, layout: KvLayout, num_blocks: int) -> None:
        rank = Rank("engine", number)
        self.cache = RankCache(rank, layout, num_blocks)
        self.scheduler = Scheduler(config, rank, self.cache, BLOCK_TOKENS)
        self.most = config.max_sequences
        self.waiting: deque[Running] = deque()
        self.running = 0
        self.firsts: dict[int, float] = {}
        self.lasts: dict[int, float] = {}

    @property
    def load(self) -> int:
        return self.running + len(self.waiting)

    def admit(self) -> None:
        """Take waiting requests into the batch, in order, while there is room for all their tokens."""
        while self.waiting and self.running < self.most:
            request = self.waiting[0].request
            lease = self.cache.acquire(b"", 0, blocks_for(request.num_tokens + request.max_tokens, BLOCK_TOKENS))
            if lease is None:
                return
            sequence = self.waiting.popleft()
            sequence.lease = lease
            sequence.move("ready")
            self.scheduler.add(sequence)
            self.running += 1

    def finish(self, step: Step, now: float) -> None:
        """A token for each sequence whose prompt is done; those that have all theirs leave."""
        items = tuple(ItemResult(item.sequence, (UNNAMED_TOKEN,) if item.sample else ()) for item in step.items)
        progress, _ = self.scheduler.apply(step, StepResult(step.dp_rank, items))
        for part in progress:
            sequence = part.sequence
            if part.tokens:
                self.firsts.setdefault(sequence.number, now)
            if len(sequence.outputs) >= sequence.max_outputs and sequence.lease is not None:
                self.lasts[sequence.number] = now
                sequence.move("done")
                self.scheduler.remove(sequence)
                self.cache.release(sequence.lease)
                self.running -= 1


def simulate_mixed(requests: Sequence[Timing], model: StepModel, max_sequences: int, max_batched_tokens: int) -> list[Timing]:
    """The requests as the modelled engine would have served them: each goes to the rank with the fewest, ranks in lockstep.

    `requests` are in order of arrival; of their times only the arrivals are used.
    """
    setup = model.setup
    block_bytes = int(setup.architecture.kv_bytes * BLOCK_TOKENS)
    layout = KvLayout(BLOCK_TOKENS, (KvGroup("kv", "full", block_bytes),))
    config = SchedulerConfig(max_batched_tokens=max_batched_tokens, max_sequences=max_sequences, max_steps_in_flight=1)
    ranks = [_Rank(number, config, layout, int(budget(setup).left_bytes) // block_bytes) for number in range(setup.ep)]
    now, arrived = 0.0, 0
    while arrived < len(requests) or any(rank.load for rank in ranks):
        while arrived < len(requests) and requests[arrived].arrived_s <= now:
            rank = min(ranks, key=lambda each: each.load)
            rank.waiting.append(_sequence(arrived, requests[arrived]))
            arrived += 1
        for rank in ranks:
            rank.admit()
        planned = [rank.scheduler.plan()[0] for rank in ranks]
        if not any(planned):
            if arrived == len(requests):
                raise InvariantError(f"requests wait for room that never comes at {now:.3f} s")
            now = requests[arrived].arrived_s
            continue
        steps = [step or rank.scheduler.dummy() for step, rank in zip(planned, ranks, strict=True)]
        now += model.seconds([load_of(step) for step in steps])
        for rank, step in zip(ranks, steps, strict=True):
            rank.finish(step, now)
    firsts = {number: at for rank in ranks for number, at in rank.firsts.items()}
    lasts = {number: at for rank in ranks for number, at in rank.lasts.items()}
    return [
        msgspec.structs.replace(request, first_s=firsts[number], last_s=lasts[number])
        for number, request in enumerate(requests)
    ]


def _sequence(number: int, timing: Timing) -> Running:
    request = Request(str(number), "", b"", b"", timing.prompt_tokens, timing.output_tokens, ignore_eos=True)
    here = Rank("engine")
    return new_sequence(number, request, Placement(request.id, 1, here, here, 0, 0), "queued", timing.output_tokens)
