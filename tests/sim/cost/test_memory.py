from __future__ import annotations

import msgspec
import pytest

from rackserve.base.errors import ResourceError
from rackserve.sim.cost.architecture import plain_architectures
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.memory import budget, require_sequences, sequence_bytes
from rackserve.sim.cost.setup import Setup
from rackserve.sim.hardware import chips
from tests.sim.cost.models import PLAIN, flash, with_chip

SMALL = Setup(architecture=PLAIN, chip=with_chip(memory_bytes=2000), kernels=kernel_sets()["blackwell"], role="decode")
"""1,000 bytes of weights and 8 per cached token on a chip of 2,000."""


def changed(**fields: float) -> Setup:
    return msgspec.structs.replace(SMALL, architecture=msgspec.structs.replace(PLAIN, **fields))


def test_the_largest_batch_is_the_hand_sum() -> None:
    plan = budget(SMALL, activation_bytes=100)
    assert plan.left_bytes == pytest.approx(0.9 * 2000 - 1000 - 100)
    assert plan.most_sequences(sequence_bytes(SMALL, 50)) == 1  # 700 / 400
    assert plan.most_sequences(sequence_bytes(SMALL, 29)) == 3  # 700 / 232


def test_wider_cached_values_and_a_table_take_their_part_of_it() -> None:
    double = changed(kv_bytes=16)
    assert budget(double, 100).most_sequences(sequence_bytes(double, 50)) == 0  # 700 / 800
    table = msgspec.structs.replace(changed(table_bytes=1200), table_shards=4)
    assert budget(table, 100).left_bytes == pytest.approx(700 - 300)
    at_host = msgspec.structs.replace(table, table_shards=0)
    assert budget(at_host, 100).left_bytes == pytest.approx(700)


def test_what_does_not_fit_is_refused_by_the_line_that_breaks() -> None:
    with pytest.raises(ResourceError, match="no room for cached tokens: 2 sequences of 50 take 800 bytes, but 700 of 1,800"):
        require_sequences(SMALL, 2, 50, activation_bytes=100)
    require_sequences(SMALL, 1, 50, activation_bytes=100)
    with pytest.raises(ResourceError, match="no room for activations: 900 bytes, but 800 of 1,800 are left; compute fewer"):
        require_sequences(SMALL, 1, 50, activation_bytes=900)
    with pytest.raises(ResourceError, match=r"no room for tables: 900 bytes, but 800 .* raise table_shards, or set it to 0"):
        budget(msgspec.structs.replace(changed(table_bytes=900), table_shards=1)).most_sequences(1)


def test_two_tables_over_eighteen_chips_are_ten_and_a_half_gib_each() -> None:
    lines = {line.name: line.num_bytes for line in budget(flash("vr", "prefill", ep=2, table_shards=18).setup).plan.lines}
    assert lines["tables"] / 2**30 == pytest.approx(10.5, abs=0.05)


def test_the_host_memory_that_tables_took_holds_about_fifteen_hundred_sessions() -> None:
    setup = flash("gb300", "decode", ep=16).setup
    session = setup.architecture.kv_bytes * 152_000
    assert setup.architecture.table_bytes / session == pytest.approx(1500, rel=0.01)


def test_a_dep2_rank_with_half_of_both_tables_does_not_fit_on_gb200() -> None:
    with pytest.raises(ResourceError, match="no room for tables"):
        budget(flash("gb200", "prefill", ep=2, table_shards=2).setup).most_sequences(1)


def test_heads_are_cut_over_chips_as_far_as_there_are_any() -> None:
    model = plain_architectures()["qwen3-30b-a3b"]  # 4 heads of keys and values
    setup = Setup(architecture=model, chip=chips()["h200"], kernels=kernel_sets()["hopper"], role="decode", tp=8)
    assert sequence_bytes(setup, 1000) == model.kv_bytes * 1000 / 4
