"""Law I13 on a live rack: every answer against a cold run of one rank, token for token."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from rackserve.base.errors import ConfigError
from rackserve.base.ids import NodeId
from rackserve.base.kv_layout import KvLayout
from rackserve.base.messages import Message, Output, Submit
from rackserve.base.request import Request
from rackserve.base.step import ItemResult, Step, StepItem
from rackserve.base.units import blocks_for
from rackserve.config import Settings
from rackserve.live.runner import Runner, RunnerSpec, open_runner
from rackserve.ports import Node, Transport

TIE = 0.02
"""The two best logits of the cold run may come out in either order if they are closer than this and KV is stored in bf16."""


@dataclass(slots=True)
class Answer:
    """A request and the output tokens its client was sent."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    complete: bool = False


@dataclass(slots=True)
class Transcript:
    """Everything that passed between the HTTP front end and the frontend node."""

    answers: dict[str, Answer] = field(default_factory=dict)

    def around_node(self, node: Node) -> Node:
        """`node`, with the output it gets written down."""
        return _TappedNode(node, self)

    def around_transport(self, transport: Transport) -> Transport:
        """`transport`, with the requests sent through it written down."""
        return _TappedTransport(transport, self)


@dataclass(frozen=True, slots=True)
class _TappedNode:
    node: Node
    transcript: Transcript

    def handle(self, message: Message) -> None:
        if isinstance(message, Output):
            answer = self.transcript.answers[message.request]
            answer.tokens.extend(message.tokens)
            answer.complete = answer.complete or message.finish in ("stop", "length")
        self.node.handle(message)


@dataclass(frozen=True, slots=True)
class _TappedTransport:
    transport: Transport
    transcript: Transcript

    def send(self, to: NodeId, message: Message) -> None:
        if isinstance(message, Submit):
            self.transcript.answers[message.request.id] = Answer(message.request)
        self.transport.send(to, message)


@dataclass(frozen=True, slots=True)
class Difference:
    """An output token that a cold run has otherwise. `gap`: how far its logit lies below the best one there."""

    request: str
    index: int
    served: int
    cold: int
    gap: float

    def __str__(self) -> str:
        return (
            f"{self.request}: output {self.index} is {self.served}, cold {self.cold}; "
            f"its logit lies {self.gap:.4f} below the best"
        )


def check_verifiable(settings: Settings) -> None:
    """ConfigError if a cold rank need not say what this rack says."""
    runner, topology = settings.runner, settings.topology
    if runner.resume != "exact":
        raise ConfigError(f"--verify: runner.resume {runner.resume} is approximate where a prefix is cached; set it to exact")
    if runner.synthetic_acceptance:
        raise ConfigError("--verify: with runner.synthetic_acceptance the output is not the model's; set it to 0")
    if topology.prefill_tp != topology.decode_tp:
        raise ConfigError(
            "--verify: sums over more devices round otherwise, so a cold rank can only have one width; set topology.prefill_tp "
            "and topology.decode_tp to the same"
        )


@contextlib.contextmanager
def open_cold(spec: RunnerSpec, layout: KvLayout, num_positions: int, tp_size: int = 1) -> Iterator[Runner]:
    """One rank of `tp_size` devices in this process with room for `num_positions`: no cache, no neighbours, no drafts."""
    num_blocks = blocks_for(num_positions, layout.block_tokens)
    spec = msgspec.structs.replace(spec, draft_policy="all")  # without drafts there are no costs to measure
    arena = memoryview(bytearray(num_blocks * layout.block_bytes))
    if tp_size == 1:
        yield open_runner(spec, arena, num_blocks)
        return
    from rackserve.model.thread_group import ThreadGroup

    group = ThreadGroup(tp_size, lambda collectives: open_runner(spec, arena, num_blocks, collectives))
    try:
        yield group
    finally:
        group.close()


def compare_with_cold(
    answers: Iterable[Answer], runner: Runner, block_tokens: int, on_progress: Callable[[int], None] | None = None
) -> list[Difference]:
    """Run every answer again, as far as it got, alone and without any cache; returns every difference.

    Greedy requests only. The cold run is fed the served tokens, also after a difference: one that is a tie does not bring
    others about, and one that is wrong does not hide behind a tie.
    """
    found: list[Difference] = []
    for number, answer in enumerate(answers):
        found += _differences(answer, runner, block_tokens, number)
        if on_progress is not None:
            on_progress(number + 1)
    return found


def _differences(answer: Answer, runner: Runner, block_tokens: int, sequence: int) -> Iterator[Difference]:
    prompt = list(array("i", answer.request.tokens))
    total = blocks_for(len(prompt) + len(answer.tokens), block_tokens)
    start, fresh, blocks = 0, prompt, tuple(range(total))
    retired: tuple[int, ...] = (sequence - 1,) if sequence else ()
    for index, served in enumerate(answer.tokens):
        item = StepItem(sequence, start, len(fresh), array("i", fresh).tobytes(), blocks, sample=True, logprobs=2)
        done: ItemResult = runner.run(Step(0, (item,), retired)).items[0]
        if done.tokens[0] != served:
            yield Difference(answer.request.id, index, served, done.tokens[0], _gap(done, served))
        start, fresh, blocks, retired = start + len(fresh), [served], (), ()


def _gap(done: ItemResult, served: int) -> float:
    """How far the logit of `served` lies below the best; infinitely far if it is not the second best or not known."""
    if not done.logprobs:
        return math.inf
    (_, best), (second, value) = done.logprobs[0].top[:2]
    return best - value if second == served else math.inf
