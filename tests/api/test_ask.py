from __future__ import annotations

from rackserve.api.ask import Ask, Conversation


def test_what_is_not_asked_for_is_off() -> None:
    ask = Ask(kind="chat", field="messages", conversation=Conversation(messages=[]))
    assert (ask.n, ask.max_tokens, ask.logprobs, ask.prompt_logprobs, ask.stream, ask.echo) == (1, None, -1, -1, False, False)
    assert ask.conversation is not None and ask.conversation.tool_choice == "auto" and ask.conversation.tools == []
