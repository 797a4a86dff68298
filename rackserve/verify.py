"""Law I13 on a live rack: every answer against a cold run of one rank, token for token."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rackserve.base.ids import NodeId
from rackserve.base.messages import Message, Output, Submit
from rackserve.base.request import Request
from rackserve.base.step import ItemResult, Step, StepItem
from rackserve.base.units import blocks_for
from rackserve.live.runner import Runner
from rackserve.ports import Node, Transport

TIE = 0.02
"""Two best logits closer than this in the cold run may come out in either order when KV is stored in bf16."""


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
    """The first output token that a cold run has otherwise. `gap`: how far its two best logits lay apart there."""

    request: str
    index: int
    served: int
    cold: int
    gap: float

    def __str__(self) -> str:
        return (
            f"{self.request}: output {self.index} is {self.served}, cold {self.cold}; "
            f"the two best logits differ by {self.gap:.4f}"
        )


def compare_with_cold(
    answers: Iterable[Answer], runner: Runner, block_tokens: int, on_progress: Callable[[int], None] | None = None
) -> list[Difference]:
    """Run every complete answer again, alone and without any cache; returns the first difference of each that has one.

    Greedy requests only. Forced continuation: after a tie that fell the other way the served tokens are followed, so a
    difference is never counted twice.
    """
    found = []
    for number, answer in enumerate(answers):
        difference = _first_difference(answer, runner, block_tokens, number)
        if difference is not None:
            found.append(difference)
        if on_progress is not None:
            on_progress(number + 1)
    return found


def _first_difference(answer: Answer, runner: Runner, block_tokens: int, sequence: int) -> Difference | None:
    prompt = list(array("i", answer.request.tokens))
    total = blocks_for(len(prompt) + len(answer.tokens), block_tokens)
    start, fresh, blocks = 0, prompt, tuple(range(total))
    retired: tuple[int, ...] = (sequence - 1,) if sequence else ()
    for index, served in enumerate(answer.tokens):
        item = StepItem(sequence, start, len(fresh), array("i", fresh).tobytes(), blocks, sample=True, logprobs=2)
        done: ItemResult = runner.run(Step(0, (item,), retired)).items[0]
        if done.tokens[0] != served:
            top = done.logprobs[0].top
            gap = top[0][1] - top[1][1]
            return Difference(answer.request.id, index, served, done.tokens[0], gap)
        start, fresh, blocks, retired = start + len(fresh), [served], (), ()
    return None
