"""The golden DeepSeek-V4.1 model in simulated racks too small for their load: conversations, drafts, faults, what was seen."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from rackserve.assemble import RackConfig
from rackserve.base.errors import InvariantError
from rackserve.base.events import (
    AttemptRetried,
    BlocksEvicted,
    Event,
    MessageDropped,
    Preempted,
    PrefillAdmitted,
    TransferDone,
)
from rackserve.base.ids import FRONTEND, NodeId, Rank
from rackserve.base.keys import CacheNamespace, extend_chain
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import Cancel, Message, Output, Submit, Timeout
from rackserve.base.request import Request
from rackserve.base.rng import Stream, draw_below
from rackserve.base.step import Step, StepResult
from rackserve.base.topology import Topology
from rackserve.base.units import NS_PER_MS, NS_PER_S, Time
from rackserve.model.deepseek_v41.dspark import Drafting, Drafts, DSpark
from rackserve.model.deepseek_v41.layout import ResumeMode, kv_layout
from rackserve.model.deepseek_v41.options import RunnerOptions
from rackserve.model.deepseek_v41.runner import DeepseekV41Runner
from rackserve.nodes.frontend import FrontendConfig
from rackserve.nodes.ports import Ports
from rackserve.pool.directory import PoolConfig
from rackserve.route.placement import POLICIES, RouterConfig
from rackserve.sched.scheduler import SchedulerConfig
from rackserve.sim.checks import check_always, check_at_rest, watch
from rackserve.sim.faults import FaultPlan, inject
from rackserve.sim.rack import SimRack
from rackserve.sim.store import LinkCost
from rackserve.sim.swarm import HASTY, PATIENT, step_time
from tests.model.deepseek_v41.golden import CONFIG, FILES, Bench, Job, complete

CLIENT = "client"
NUM_DRAFT = CONFIG.dspark_block_size
MAX_OUTPUTS = 24
PROMPT_TOKENS = (88, 91, 122)
"""Of the conversations' first prompts. A few output tokens later there is a block boundary, where state is left."""

SAID_TOKENS = (24, 17, 10)
"""Of the answer that the second prompts go on from; NEW_TOKENS follow."""

NEW_TOKENS = 16
NUM_CONVERSATIONS = len(PROMPT_TOKENS)


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt, and what a cold device says to it alone, without cache, neighbours or drafts."""

    prompt: list[int]
    answer: list[int]


@cache
def bench() -> Bench:
    """The one cold device."""
    return Bench()


@cache
def conversations() -> tuple[tuple[Line, Line], ...]:
    """Two turns each. All begin alike and part at the end of a block or within one."""
    first = _lines([_opening(number) for number in range(NUM_CONVERSATIONS)])
    second = _lines([_turn(number, line) for number, line in enumerate(first)])
    return tuple(zip(first, second, strict=True))


def _opening(number: int) -> list[int]:
    shared = (64, 40, 64)[number]
    return [_token("user", number, at) if at >= shared else _token("system", at) for at in range(PROMPT_TOKENS[number])]


def _turn(number: int, first: Line) -> list[int]:
    """The first answer or a part of it, then something new."""
    return first.prompt + first.answer[: SAID_TOKENS[number]] + [_token("again", number, at) for at in range(NEW_TOKENS)]


def _token(*names: str | int) -> int:
    return 3 + draw_below(CONFIG.vocab_size - 12, *names)


def _lines(prompts: list[list[int]]) -> list[Line]:
    answers = complete(bench().runner, *(Job(prompt, MAX_OUTPUTS) for prompt in prompts))
    return [Line(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def as_cold(prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
    """Of each token said to a prompt: whether a cold device says it too, after the same prompt and the tokens before it."""
    logits, _ = bench().through([*prompt, *tokens[:-1]])
    return [cold == token for cold, token in zip(logits[len(prompt) - 1 :].argmax(-1).tolist(), tokens, strict=True)]


def cold_drafts(ids: Sequence[int]) -> list[int]:
    """What the head of a cold device drafts after `ids`, the last of which has not been computed."""
    _, state = bench().through(ids[:-1])
    return bench().draft(state, ids[-1]).tokens


# ------------------------------------------------------------ one rank's engine

Place = tuple[int, tuple[int, ...]]
"""A position, and the last ids up to and with the one at it."""


@cache
def places() -> dict[Place, tuple[list[int], list[int]]]:
    """Of every place within a cold answer: all ids up to it, and those that follow."""
    found: dict[Place, tuple[list[int], list[int]]] = {}
    history = CONFIG.engram_max_ngram_size - 1
    for line in (line for lines in conversations() for line in lines):
        whole = line.prompt + line.answer
        for end in range(len(line.prompt) + 1, len(whole)):
            found[end - 1, tuple(whole[end - 1 - history : end])] = whole[:end], whole[end:]
    return found


@dataclass(slots=True)
class Seen:
    """What happened in a rack: things by name, counted, and what the ranks' heads drafted by themselves."""

    counts: Counter[str] = field(default_factory=Counter)
    drafts: dict[Place, list[int]] = field(default_factory=dict)


class GuidedDrafts:
    """Drafts of the model's own head, of which a drawn number are put right: the golden model's weights are random."""

    def __init__(self, dspark: DSpark, seen: Seen) -> None:
        self._dspark, self._seen = dspark, seen

    def draft(self, requests: Sequence[Drafting]) -> list[Drafts]:
        return [self._guide(request, drafts) for request, drafts in zip(requests, self._dspark.draft(requests), strict=True)]

    def _guide(self, request: Drafting, drafts: Drafts) -> Drafts:
        place = request.state.length, (*request.state.history, request.anchor)
        self._seen.drafts[place] = drafts.tokens
        _, right = places().get(place, ([], []))
        right = right[: min(NUM_DRAFT, draw_below(NUM_DRAFT + 3, "right", place[0], request.anchor))]
        return replace(drafts, tokens=right + drafts.tokens[len(right) :])


class WatchedRunner:
    """A rank's runner with guided drafts, over memory that reads as NaN; writes down what it was asked for and what it did."""

    def __init__(self, arena: memoryview, num_blocks: int, case: Case, seen: Seen) -> None:
        arena[:] = b"\xff" * len(arena)
        self._size, self._seen = case.block_tokens, seen
        self._runner = DeepseekV41Runner(FILES, arena, num_blocks, self._size, RunnerOptions(resume=case.resume))
        speculation = self._runner._speculation
        speculation._dspark = GuidedDrafts(speculation._dspark, seen)  # type: ignore[assignment]

    def run(self, step: Step) -> StepResult:
        result = self._runner.run(step)
        for item, done in zip(step.items, result.items, strict=True):
            accepted = max(0, len(done.tokens) - 1)
            begin = item.start + item.num_tokens
            end = begin + accepted
            found = {
                "accepted": accepted > 0,
                "rejected": done.num_verified > accepted,
                "accepted across a boundary": begin // self._size < end // self._size and begin % self._size > 0,
                "left state among accepted drafts": item.snapshot >= 0 and begin < item.snapshot_at < end,
                "restored": item.restore >= 0,
                "replayed": item.replayed > 0,
                "skipped the decoder's layers": item.full_from > item.start,
            }
            self._seen.counts.update(name for name, there in found.items() if there)
        return result


# ------------------------------------------------------------ the client


@dataclass(slots=True)
class Answer:
    """A request, what it was sent, and what a cold device would have said up to the same stop."""

    request: Request
    prompt: list[int]
    cold: list[int]
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""

    @property
    def complete(self) -> bool:
        return self.outcome in ("stop", "length")


class Client:
    """Holds `num_sessions` conversations at once, two turns each; some answers are cut short, some are not waited for."""

    def __init__(self, case: Case, ports: Ports) -> None:
        self._case, self._ports = case, ports
        self._chance = Stream("golden client", case.seed)
        layout = case.layout
        self._root = CacheNamespace("golden", "0", layout.block_tokens, layout.fingerprint()).root()
        self.answers: dict[str, Answer] = {}

    def start(self) -> None:
        """Begin every conversation at a drawn moment."""
        for session in range(self._case.num_sessions):
            self._ports.clock.call_at(self._chance.below(60 * NS_PER_MS), Timeout("turn", f"{session}/0"))

    def handle(self, message: Message) -> None:
        if isinstance(message, Timeout) and message.kind == "turn":
            session, turn = map(int, message.key.split("/"))
            self._send(message.key, conversations()[session % NUM_CONVERSATIONS][turn])
        elif isinstance(message, Timeout):
            self._ports.transport.send(FRONTEND, Cancel(message.key))
        elif isinstance(message, Output):
            self._receive(message, self.answers[message.request])

    def _send(self, name: str, line: Line) -> None:
        chance, case = self._chance, self._case
        length = chance.between(MAX_OUTPUTS // 2, MAX_OUTPUTS)
        stop = (line.answer[chance.between(3, MAX_OUTPUTS - 1)],) if chance.chance(0.3) else ()
        tokens = array("i", line.prompt).tobytes()
        request = Request(
            id=name,
            session=name.split("/")[0],
            tokens=tokens,
            chain=extend_chain(b"", self._root, tokens, case.block_tokens),
            num_tokens=len(line.prompt),
            max_tokens=length,
            stop_token_ids=stop,
            root=self._root,
        )
        cold = line.answer[:length]
        self.answers[name] = Answer(request, line.prompt, cold[: cold.index(stop[0]) + 1] if stop and stop[0] in cold else cold)
        self._ports.transport.send(FRONTEND, Submit(request, CLIENT))
        if chance.chance(case.cancels):
            self._ports.clock.call_at(self._ports.clock.now() + chance.below(60 * NS_PER_MS), Timeout("cancel", name))

    def _receive(self, message: Output, answer: Answer) -> None:
        if answer.outcome or message.index != len(answer.tokens):
            raise InvariantError(f"{message.request}: output {message.index} after {len(answer.tokens)}, {answer.outcome} (I1)")
        answer.tokens += message.tokens
        if self._case.resume == "exact" and answer.tokens != answer.cold[: len(answer.tokens)]:
            raise InvariantError(f"{message.request}: {answer.tokens}, a cold device says {answer.cold} (I13)")
        if message.finish is None and message.error is None:
            return
        answer.outcome = message.error or message.finish or ""
        if message.usage is not None and message.finish in ("stop", "length"):
            usage, request = message.usage, answer.request
            if (usage.prompt_tokens, usage.output_tokens) != (request.num_tokens, len(answer.tokens)):
                raise InvariantError(f"{message.request}: usage {usage} does not add up (I12)")
            if not 0 <= usage.cached_tokens < usage.prompt_tokens:
                raise InvariantError(f"{message.request}: usage {usage} (I12)")
        session, turn = message.request.split("/")
        if turn == "0":
            self._ports.clock.call_at(
                self._ports.clock.now() + self._chance.below(20 * NS_PER_MS), Timeout("turn", f"{session}/1")
            )


# ------------------------------------------------------------ a case


@dataclass(frozen=True, slots=True)
class Case:
    """A rack, its load and its faults: a function of the seed."""

    seed: int
    resume: ResumeMode
    block_tokens: int
    config: RackConfig
    plan: FaultPlan
    num_sessions: int
    cancels: float

    @property
    def layout(self) -> KvLayout:
        return kv_layout(CONFIG, self.block_tokens, self.resume)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case: every answer, and what was seen."""

    answers: tuple[Answer, ...]
    seen: Seen


def draw(seed: int, resume: ResumeMode = "exact") -> Case:
    """Memory for one or two sequences a rank, drafts on; faults from seed 1 on."""
    chance = Stream("golden", seed)
    block_tokens = (16, 32)[chance.below(2)]
    topology = Topology(
        prefill_workers=2,
        decode_workers=1,
        prefill_ranks=1,
        decode_ranks=chance.between(1, 2),
        prefill_blocks=chance.between(192, 320) // block_tokens,
        decode_blocks=chance.between(192, 288) // block_tokens,
        segment_blocks=chance.between(128, 256) // block_tokens,
        rank_windows=chance.between(4, 6),
        segment_windows=chance.between(2, 4),
    )
    config = RackConfig(
        topology=topology,
        frontend=FrontendConfig(max_attempts=60),
        router=RouterConfig(policy=sorted(POLICIES)[chance.below(len(POLICIES))]),
        scheduler=SchedulerConfig(
            max_batched_tokens=chance.between(24, 64), max_sequences=4, max_steps_in_flight=1, num_draft=NUM_DRAFT
        ),
        pool=PoolConfig(lease_ns=2 * NS_PER_S),
        deadlines=HASTY if chance.chance(0.3) else PATIENT,
    )
    plan = FaultPlan(
        loss=0.01,
        double=0.03,
        late=0.1 * (seed % 2),
        kills=chance.between(1, 2),
        segment_losses=chance.below(2),
        slow_ranks=chance.below(2),
        engine_failures=2,
        slow_transfers=chance.below(2),
        horizon_ns=250 * NS_PER_MS,
    )
    sessions = chance.between(4, 5) if resume == "exact" else 3
    return Case(seed, resume, block_tokens, config, plan if seed else FaultPlan(), sessions, cancels=0.15)


@cache
def outcome(seed: int, resume: ResumeMode = "exact") -> Outcome:
    return run(draw(seed, resume))


def run(case: Case) -> Outcome:
    """Run a case to rest with every law on. InvariantError if one is broken."""
    seen = Seen()
    rack = SimRack(
        case.config,
        case.layout,
        lambda arena, num_blocks: WatchedRunner(arena, num_blocks, case, seen),
        {"prefill": step_time, "decode": step_time},
        LinkCost(latency_ns=100_000, bytes_per_s=1e7),
        backed=True,
    )
    clients: list[Client] = []

    def make(ports: Ports) -> Client:
        clients.append(Client(case, ports))
        return clients[0]

    def note(now: Time, source: NodeId, event: Event) -> None:
        seen.counts.update(names_of(event))

    rack.host.sinks.append(note)
    rack.add_node(CLIENT, make)
    clients[0].start()
    inject(rack, case.plan, case.seed)
    watch(rack)
    rack.host.after_event = lambda: check_always(rack)
    rack.host.run(max_events=100_000)
    if not rack.host.is_idle:
        raise InvariantError("the rack does not come to rest")
    check_at_rest(rack)
    return Outcome(tuple(clients[0].answers.values()), seen)


def names_of(event: Event) -> Iterator[str]:
    """What an event shows to have happened."""
    if isinstance(event, BlocksEvicted):
        yield f"evicted from {_role(event.holder)}"
    elif isinstance(event, Preempted):
        yield f"preempted on {_role(event.rank)}"
    elif isinstance(event, AttemptRetried):
        yield "retried: rank down" if event.reason.endswith("is down") else f"retried: {event.reason}"
    elif isinstance(event, TransferDone):
        yield f"{event.kind} {event.outcome}"
    elif isinstance(event, PrefillAdmitted):
        yield from (["found locally"] if event.local_tokens else []) + (["fetched"] if event.fetched_tokens else [])
    elif isinstance(event, MessageDropped):
        yield f"dropped: {event.reason}"


def _role(rank: Rank) -> str:
    """Prefill, decode or pool."""
    return rank.worker.rstrip("0123456789")
