from __future__ import annotations

import msgspec
import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.step import Step, StepItem
from rackserve.digest_model import cold_output, digest_layout
from rackserve.live.runner import RunnerSpec, layout_of, open_runner


def test_the_digest_runner_computes_in_the_given_arena() -> None:
    spec = RunnerSpec(block_tokens=4, vocab_size=50)
    arena = memoryview(bytearray(4 * layout_of(spec).block_bytes))
    tokens = b"".join(token.to_bytes(4, "little") for token in range(6))
    item = StepItem(1, 0, 6, tokens, (2, 0), sample=True)
    result = open_runner(spec, arena, 4).run(Step(0, (item,)))
    assert list(result.items[0].tokens) == cold_output(tokens, 1, vocab_size=50)
    assert any(arena[:32]) and any(arena[64:96]) and not any(arena[32:64])


def test_the_layout_is_that_of_the_model() -> None:
    assert layout_of(RunnerSpec(block_tokens=8, window=True)) == digest_layout(8, window=True)


def test_a_wrong_spec_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"runner\.block_tokens"):
        RunnerSpec(block_tokens=0)
    with pytest.raises(msgspec.ValidationError, match="kind"):
        msgspec.json.decode(b'{"kind": "gpt"}', type=RunnerSpec)
    with pytest.raises(msgspec.ValidationError, match="speed"):
        msgspec.json.decode(b'{"speed": 1}', type=RunnerSpec)
