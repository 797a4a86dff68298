from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import FileFormatError
from rackserve.base.keys import Chain
from rackserve.validation.hit_curve import CappedCache, compare_hits, hit_rate, prompts_of


def chain(*numbers: int) -> Chain:
    """Chained keys of blocks with these contents: a key names all blocks before it too."""
    keys, path = b"", b""
    for number in numbers:
        path += bytes([number])
        keys += path.rjust(16, b"\0")
    return keys


def naive(prompts: list[tuple[int, ...]], size: int) -> list[int]:
    """Blocks hit by each prompt in a cache that gives up the least recently used prefix, the longest of that first."""
    held: OrderedDict[tuple[int, ...], int] = OrderedDict()
    hits = []
    for tick, prompt in enumerate(prompts):
        parts = [prompt[:end] for end in range(1, len(prompt) + 1)][:size]
        hit = next((at for at, part in enumerate(parts) if part not in held), len(parts))
        for part in parts[:hit]:
            held[part] = tick
        while len(held) + len(parts) - hit > size:
            held.pop(min(held, key=lambda part: (held[part], -len(part))))
        held |= dict.fromkeys(parts, tick)
        hits.append(hit)
    return hits


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=20), st.integers(5, 12))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_a_capped_cache_hits_like_a_naive_one_with_as_much_room(drawn: list[list[int]], size: int) -> None:
    cache = CappedCache(size)
    assert [cache.add(chain(*prompt)) for prompt in drawn] == naive([tuple(prompt) for prompt in drawn], size)


def test_without_room_the_oldest_prompt_goes_first() -> None:
    cache = CappedCache(4)
    assert [cache.add(chain(*prompt)) for prompt in ((1, 2), (3, 4), (1, 2), (5, 6), (1, 2), (3, 4))] == [0, 0, 2, 0, 2, 0]


def test_a_prompt_larger_than_the_cache_is_held_as_far_as_it_fits() -> None:
    cache = CappedCache(3)
    cache.add(chain(1, 2, 3, 4, 5))
    assert cache.add(chain(1, 2, 3, 4, 5)) == 3


def test_one_cache_hits_at_least_as_much_as_several_of_its_parts() -> None:
    prompts = [(chain(number % 7, number % 5, number % 3), 3 * 512) for number in range(60)]
    assert hit_rate(prompts, 30) >= hit_rate(prompts, 10, 3) > 0


def trace(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_hits_of_a_trace_are_those_counted_by_hand(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 9, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 9, "input_length": 700, "output_length": 1, "hash_ids": [1, 4]},
    ]
    prompts = prompts_of(trace(tmp_path / "trace.jsonl", lines))
    assert hit_rate(prompts, 100) == pytest.approx((1024 + 512) / (1024 + 1536 + 700))
    assert compare_hits(tmp_path / "trace.jsonl")[0].error == pytest.approx(1536 / 3260 / 0.4 - 1)


def test_a_trace_of_sessions_is_refused(tmp_path: Path) -> None:
    session = {"id": "a", "block_size": 64, "requests": [{"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [1]}]}
    with pytest.raises(FileFormatError, match="no Mooncake trace"):
        prompts_of(trace(tmp_path / "weka.jsonl", [session]))


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"empty\.jsonl: holds no (request|session)"):
        prompts_of(trace(tmp_path / "empty.jsonl", []))
