"""What a parser made of one answer, put together again."""

from __future__ import annotations

from dataclasses import dataclass, field

from rackserve.text.answers import (
    AnswerParser,
    ArgumentsDelta,
    CallFinished,
    CallStarted,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
)


@dataclass
class Message:
    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # [name, arguments] of every call begun
    finished: list[int] = field(default_factory=list)
    cut: bool = False
    malformed: bool = False

    def add(self, delta: OutputDelta) -> None:
        if isinstance(delta, ReasoningDelta):
            self.reasoning += delta.text
        elif isinstance(delta, ContentDelta):
            self.content += delta.text
        elif isinstance(delta, CallStarted):
            assert delta.index == len(self.calls)
            self.calls.append([delta.name, ""])
        elif isinstance(delta, ArgumentsDelta):
            assert delta.index == len(self.calls) - 1 and delta.index not in self.finished
            self.calls[delta.index][1] += delta.text
        else:
            assert isinstance(delta, CallFinished)
            assert delta.index == len(self.calls) - 1
            self.finished.append(delta.index)


def read(parser: AnswerParser, *pieces: str) -> Message:
    message = Message()
    for piece in pieces:
        for delta in parser.feed(piece):
            message.add(delta)
    rest = parser.finish()
    for delta in rest.deltas:
        message.add(delta)
    message.cut, message.malformed = rest.cut, rest.malformed
    assert rest.num_calls == len(message.finished)
    return message
