"""Draws are functions of their names alone."""

from __future__ import annotations

from hashlib import blake2b

from rackserve.base.rng import Stream, draw_below, draw_u64, draw_unit


def plain(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def test_draws_equal_the_golden_vectors() -> None:
    assert [draw_u64("a"), draw_u64("a", 1), draw_u64("swarm", 7)] == [
        3405396810240292928, 13924241962069754241, 18389830380333954692,
    ]  # fmt: skip
    assert draw_unit("x", 3) == 0.05663146873628799
    assert draw_below(10, "seed", 5) == 2
    stream = Stream("faults", 3)
    assert [stream.u64(), stream.u64()] == [8453078911691746354, 44994951075661730]


def test_a_draw_is_a_digest_of_its_names() -> None:
    assert draw_u64("a", 1) == plain("a\x1f1")
    assert draw_u64("a", "b") != draw_u64("ab") != draw_u64("b", "a")
    assert Stream("s", 9).u64() == plain("s\x1f9\x1f1")


def test_streams_of_one_name_agree_and_do_not_disturb_each_other() -> None:
    first, second, other = Stream("s"), Stream("s"), Stream("t")
    numbers = [first.u64() for _ in range(5)]
    for number in numbers:
        other.u64()
        assert second.u64() == number


def test_draws_stay_in_their_range_and_reach_its_ends() -> None:
    stream = Stream("range")
    assert {stream.between(3, 5) for _ in range(100)} == {3, 4, 5}
    assert {stream.below(2) for _ in range(50)} == {0, 1}
    assert all(0 <= stream.unit() < 1 for _ in range(100))
    assert not any(Stream("c").chance(0.0) for _ in range(20))
    assert all(stream.chance(1.0) for _ in range(20))
