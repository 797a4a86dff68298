"""The open specification's own types for the events of /v1/responses."""

from __future__ import annotations

from typing import Any

import openresponses_types.types as spec
from openai.types.responses import ResponseReasoningTextDeltaEvent, ResponseReasoningTextDoneEvent
from pydantic import BaseModel


def _kinds() -> dict[str, type[BaseModel]]:
    events = [each for name, each in vars(spec).items() if name.endswith("StreamingEvent") and issubclass(each, BaseModel)]
    return {kind.value: event for event in events for kind in event.model_fields["type"].annotation}  # type: ignore[union-attr]


KINDS = _kinds()

OTHERS: dict[str, type[BaseModel]] = {
    "response.reasoning_text.delta": ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": ResponseReasoningTextDoneEvent,
}
"""Events of the vendor's own specification: the open one has no reasoning that is shown as it is, under these names."""


def validate(events: list[Any]) -> set[str]:
    """The kinds of events there were. Raises pydantic's ValidationError for one that is not as specified."""
    for event in events:
        (KINDS.get(event["type"]) or OTHERS[event["type"]]).model_validate(event)
    return {event["type"] for event in events}
