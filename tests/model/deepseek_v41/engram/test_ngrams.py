from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import FileFormatError
from rackserve.model.deepseek_v41.engram.ngrams import NgramHash, column_primes, multipliers
from rackserve.model.deepseek_v41.engram.vocabulary import token_map
from tests.model.deepseek_v41.engram.tiny import GOLDEN, flash_config, tiny_config

FLASH = flash_config()
SAME = np.arange(FLASH.vocab_size, dtype=np.int32)
TINY = tiny_config()
TINY_MAP = token_map(GOLDEN, TINY)
HASH = NgramHash(TINY, TINY_MAP)

LAST_OF_LAYER_1 = [
    11754974, 24210124, 42797160, 63493520, 78540315, 88889911, 110064958, 126757584,
    143641730, 148232863, 163475809, 179531185, 206996897, 220731181, 225334082, 246693705,
    259287126, 280637906, 293598051, 308078758, 323066193, 337547390, 359933296, 371888815,
]  # fmt: skip


def test_released_primes_fill_the_released_tables() -> None:
    primes = column_primes(FLASH)
    assert primes[0, [0, 1, 2, 3, 23]].tolist() == [16000057, 16000079, 16000081, 16000097, 16000463]
    assert primes[1, [0, 23]].tolist() == [16000477, 16000889]
    assert primes.sum(1).tolist() == [384006168, 384016682]
    assert len(set(primes.ravel().tolist())) == 48


def test_multipliers_are_those_of_the_release() -> None:
    assert multipliers(FLASH).tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_addresses_are_those_of_the_release() -> None:
    found = NgramHash(FLASH, SAME).addresses([([], [5, 6, 7, 8])])
    assert found[1].dtype == np.int64 and found[1].shape == found[14].shape == (4, 24)
    assert found[1][0, :3].tolist() == [5412672, 18319159, 35492627]
    assert found[1][3].tolist() == LAST_OF_LAYER_1
    assert found[14][3, -3:].tolist() == [341236743, 354074693, 370262006]


def one_by_one(ids: Sequence[int]) -> dict[int, list[list[int]]]:
    """Addresses of a whole sequence by whole numbers of any size, one column at a time."""
    primes, factors = column_primes(TINY).tolist(), multipliers(TINY).tolist()
    result: dict[int, list[list[int]]] = {}
    for number, layer in enumerate(TINY.engram_layer_ids):
        result[layer] = []
        for at in range(len(ids)):
            near = [TINY_MAP[ids[at - back] if at >= back else TINY.engram_pad_token_id].item() for back in range(4)]
            row, mixed, start = [], near[0] * factors[number][0], 0
            for column, prime in enumerate(primes[number]):
                if column % 2 == 0:
                    order = column // 2 + 1
                    mixed ^= near[order] * factors[number][order]
                row.append(mixed % prime + start)
                start += prime
            result[layer].append(row)
    return result


@given(st.lists(st.integers(0, 511), max_size=12))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_addresses_equal_those_worked_out_one_by_one(ids: list[int]) -> None:
    found = HASH.addresses([([], ids)])
    assert {layer: rows.tolist() for layer, rows in found.items()} == one_by_one(ids)
    assert all(rows.shape == (len(ids), 6) for rows in found.values())


@given(st.data())
@settings(derandomize=True, max_examples=200, deadline=None)
def test_however_sequences_are_cut_and_batched_their_addresses_stay(data: st.DataObject) -> None:
    sequences = data.draw(st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=20), min_size=1, max_size=3))
    whole = [HASH.addresses([([], ids)]) for ids in sequences]
    done, last = [0] * len(sequences), data.draw(st.integers(0, 6))
    for step in range(last + 1):
        # A step takes the next few ids, or none, of each sequence, in any order, with as much of the past as somebody kept.
        stretches, wanted = [], []
        for number in data.draw(st.permutations(range(len(sequences)))):
            at, ids = done[number], sequences[number]
            take = len(ids) - at if step == last else data.draw(st.integers(0, min(7, len(ids) - at)))
            kept = data.draw(st.integers(3, 5))
            stretches.append((ids[max(0, at - kept) : at], np.array(ids[at : at + take], np.int32)))
            wanted += [(number, place) for place in range(at, at + take)]
            done[number] += take
        for layer, rows in HASH.addresses(stretches).items():
            assert rows.tolist() == [whole[number][layer][place].tolist() for number, place in wanted]
    assert done == [len(ids) for ids in sequences]


def test_another_token_three_before_changes_rows_and_four_before_none() -> None:
    def last(ids: list[int]) -> list[int]:
        return HASH.addresses([(ids[:-1], ids[-1:])])[1][0].tolist()

    plain = last([10, 11, 12, 13, 14])
    assert last([10, 99, 12, 13, 14]) != plain
    assert last([99, 11, 12, 13, 14]) == plain


def test_no_stretches_have_no_addresses() -> None:
    assert [rows.shape for rows in HASH.addresses([]).values()] == [(0, 6), (0, 6)]


def test_a_table_of_another_length_is_refused_by_name() -> None:
    wrong = msgspec.structs.replace(TINY, engram_num_embeddings=(462, 631))
    with pytest.raises(FileFormatError, match=r"engram_num_embeddings is \[462, 631\].*\[462, 630\]"):
        NgramHash(wrong, TINY_MAP)
