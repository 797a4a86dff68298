"""What nodes say to each other survives encoding, byte for byte."""

from __future__ import annotations

import typing

import msgspec
import pytest

from rackserve.base import messages
from rackserve.base.ids import Rank
from rackserve.base.messages import (
    AnyMessage,
    AttemptFailed,
    AttemptMessage,
    BlocksStored,
    Cancel,
    Message,
    StepFinished,
    Submit,
    TokensEmitted,
)
from rackserve.base.request import Request
from rackserve.base.step import ItemResult, StepResult, TokenLogprobs

GOLDEN: dict[str, Message] = {
    "93a643616e63656ca27231a963616e63656c6c6564": Cancel("r1"),
    "9aad546f6b656e73456d6974746564a272310282a6776f726b6572a26430a764705f72616e6b000792050604a473746f709090":
        TokensEmitted("r1", 2, Rank("d0"), 7, (5, 6), 4, "stop"),
    "95ac426c6f636b7353746f72656482a6776f726b6572a870726566696c6c30a764705f72616e6b0103c4106b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b00":
        BlocksStored(Rank("prefill0", 1), 3, b"k" * 16, 0),
    "96ad417474656d70744661696c6564a1720182a6776f726b6572a26430a764705f72616e6b00a178c2":
        AttemptFailed("r", 1, Rank("d0"), "x", False),
    "93a65375626d697486a26964a172a773657373696f6ea173a6746f6b656e73c40401000000a5636861696ec400aa6e756d5f746f6b656e7301aa6d61785f"
    "746f6b656e7302a6636c69656e74": Submit(Request("r", "s", b"\1\0\0\0", b"", 1, 2), "client"),
}  # fmt: skip


def kinds(root: type[Message] = Message) -> set[type[Message]]:
    return {kind for child in root.__subclasses__() for kind in {child, *kinds(child)}} - {AttemptMessage}


@pytest.mark.parametrize("encoded", GOLDEN)
def test_encoding_equals_the_golden_bytes(encoded: str) -> None:
    assert msgspec.msgpack.encode(GOLDEN[encoded]).hex() == encoded
    assert msgspec.msgpack.decode(bytes.fromhex(encoded), type=AnyMessage) == GOLDEN[encoded]


def test_nested_results_come_back_equal() -> None:
    logprobs = (TokenLogprobs(-0.5, ((3, -0.5), (4, -1.5))),)
    message = StepFinished(4, (StepResult(0, (ItemResult(7, (3,), logprobs), ItemResult(8, ()))),), 1000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AnyMessage) == message


def test_the_closed_set_names_every_message() -> None:
    assert set(typing.get_args(AnyMessage)) == kinds()


def test_every_message_says_who_sends_it_to_whom() -> None:
    for kind in kinds():
        assert "->" in (kind.__doc__ or ""), kind.__name__
        assert kind.__module__ == messages.__name__


def test_messages_about_an_attempt_are_filed_under_it() -> None:
    assert AttemptFailed("r", 3, Rank("d0"), "x").key == ("r", 3)


def test_an_unknown_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["NoSuchMessage", 1]), type=AnyMessage)
