from __future__ import annotations

from array import array

import pytest

from rackserve.base.errors import ConfigError
from rackserve.base.keys import CacheNamespace, Chain, extend_chain
from rackserve.base.step import Step
from rackserve.validation.engine import Ask, Engine, Limits

ROOT = CacheNamespace("test", "0", 16, "ids").root()


class PerToken:
    """A millisecond for each position, and one for the pass."""

    def seconds(self, step: Step) -> float:
        return 1e-3 * (1 + step.carried + sum(item.num_tokens for item in step.items))


def chain(*ids: int) -> Chain:
    return extend_chain(b"", ROOT, array("i", ids).tobytes(), 1)


def ask(number: int, ids: tuple[int, ...], outputs: int = 1) -> Ask:
    return Ask(number, "", chain(*ids), 16 * len(ids) + 1, outputs)


def engine(num_blocks: int = 100, max_sequences: int = 4, max_tokens: int = 64) -> Engine:
    return Engine("one", Limits(num_blocks, max_sequences, max_tokens), PerToken())


def passes(one: Engine) -> list[tuple[float, list[int], list[int]]]:
    """Seconds, first tokens and last tokens of each pass until there is no work."""
    found = []
    while (seconds := one.begin()) is not None:
        found.append((seconds, *one.end()))
    return found


def test_a_prompt_is_computed_in_passes_and_then_a_token_a_pass() -> None:
    one = engine()
    one.add(ask(7, (1, 2, 3, 4, 5), outputs=3))  # 81 tokens
    found = passes(one)
    assert [seconds for seconds, _, _ in found] == pytest.approx([0.065, 0.018, 0.002, 0.002])
    assert [firsts for _, firsts, _ in found] == [[], [7], [], []]
    assert [lasts for _, _, lasts in found] == [[], [], [], [7]]
    assert one.load == 0 and one.cached == {7: 0}


def test_what_was_computed_is_not_computed_again() -> None:
    one = engine()
    one.add(ask(1, (1, 2, 3)))
    passes(one)
    other = ask(2, (1, 2, 9))
    assert one.held(other) == 32
    one.add(other)
    assert [seconds for seconds, _, _ in passes(one)] == pytest.approx([0.018])
    assert one.cached[2] == 32


def test_the_last_token_of_a_prompt_is_computed_even_if_all_is_cached() -> None:
    one = engine()
    whole = Ask(1, "", chain(1, 2), 32, 1)
    one.add(whole)
    passes(one)
    one.add(Ask(2, "", whole.chain, 32, 1))
    passes(one)
    assert one.cached[2] == 16


def test_what_was_brought_counts_as_cached_and_stays_for_others() -> None:
    one = engine()
    one.add(ask(1, (1, 2, 3)), brought_tokens=40)
    assert [seconds for seconds, _, _ in passes(one)] == pytest.approx([0.018])
    assert one.cached[1] == 32 and one.held(ask(2, (1, 2, 3))) == 48


def test_requests_wait_in_order_for_a_place_and_for_room() -> None:
    for one in (engine(max_sequences=1), engine(num_blocks=5)):
        for number in (1, 2):
            one.add(ask(number, (10 * number, 10 * number + 1, 10 * number + 2), outputs=2))
        assert [lasts for _, _, lasts in passes(one) if lasts] == [[1], [2]]


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 blocks"):
        engine(num_blocks=3).add(ask(1, (1, 2, 3)))
