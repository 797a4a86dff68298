from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.sim.cost.load import StepLoad, decode_load
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.cost.terms import Share, Term, segment_terms, touched
from tests.sim.cost.models import PLAIN, flash, with_chip, with_kernels

CHIP = with_chip(memory_bytes_per_s=1000, bf16_flops=5000, link_bytes_per_s=100)


def plain(tp: int = 1, overlap: float = 0.0) -> Setup:
    """800 bytes at 1,000 a second; 500 parameters at 5,000 operations a second; times in seconds, not microseconds."""
    kernels = with_kernels(
        "blackwell",
        memory_efficiency=1,
        decode_rate_share=1,
        overlap=overlap,
        launch_us=1e5,
        dense_attention_us=2e6,
        allreduce_us=1e6,
        cross_tray_us=0.5e6,
    )
    return Setup(architecture=PLAIN, chip=CHIP, kernels=kernels, role="decode", tp=tp)


def terms_of(setup: Setup, load: StepLoad) -> dict[str, Term]:
    return {term.name: term for term in segment_terms(PLAIN.segments[0], Share(setup, load, load.tokens), load.tokens)}


def test_every_term_is_the_hand_sum_of_bytes_operations_and_latencies() -> None:
    terms = terms_of(plain(), decode_load(2, 0, 1))  # two new sequences, one position each
    assert terms["dense weights"].seconds == pytest.approx(0.8 + 2 * 2 * 500 / 5000)
    assert terms["launches"].seconds == pytest.approx(2 * 3 * 0.1)
    assert terms["attention"].seconds == pytest.approx(2 * 2)  # its least, in two layers
    assert set(terms) == {"dense weights", "launches", "attention"}


def test_attention_over_long_contexts_reads_each_cached_row_once_a_sequence() -> None:
    term = terms_of(plain(), StepLoad(1, 2, 2, 998, 2 * 1000))["attention"]
    assert term.num_bytes == 2 * 1000 * 4
    assert term.num_flops == 2 * 2 * 1000 * 4
    assert term.seconds == pytest.approx(2 * (4 + 2 * 1000 * 4 / 5000))
    assert term.bound == "memory"


def test_overlap_hides_the_shorter_of_loads_and_products() -> None:
    load = decode_load(2, 0, 1)
    seconds = [terms_of(plain(overlap=share), load)["dense weights"].seconds for share in (0, 0.5, 1)]
    assert seconds == pytest.approx([1.2, 1.0, 0.8])


def test_chips_of_a_rank_share_reads_and_products_and_sum_twice_a_layer() -> None:
    one, four, eight = (terms_of(plain(tp), decode_load(4, 0, 1)) for tp in (1, 4, 8))
    assert four["dense weights"].seconds == pytest.approx(one["dense weights"].seconds / 4)
    assert four["launches"].seconds == one["launches"].seconds
    assert four["all-reduce"].seconds == pytest.approx(2 * 2 * (1 + 2 * 4 * 10 * 2 * 0.75 / 100))
    assert eight["all-reduce"].seconds == pytest.approx(2 * 2 * (1.5 + 2 * 4 * 10 * 2 * 7 / 8 / 100))  # over two trays
    assert "all-reduce" not in one


def test_experts_touched_are_the_mean_over_draws() -> None:
    """Counted over all pairs of tokens that pick 1 of 3 experts each: of 2 local ones, both, one or none are touched."""
    picks = [(first, second) for first in range(3) for second in range(3)]
    mean = sum(len({first, second} & {0, 1}) for first, second in picks) / len(picks)
    assert touched(3, 1, 2, 2) == pytest.approx(mean)


def test_one_sequence_with_five_drafts_touches_the_published_number_of_experts() -> None:
    assert touched(384, 6, 384, 6) == pytest.approx(34.6, abs=0.05)


@given(st.floats(0, 500), st.floats(0, 500))
@settings(derandomize=True, max_examples=50, deadline=None)
def test_more_tokens_never_touch_fewer_experts_nor_more_than_there_are(few: float, more: float) -> None:
    low, high = sorted((few, more))
    assert 0 <= touched(384, 6, 24, low) <= touched(384, 6, 24, high) <= 24


def test_shared_experts_inside_routed_products_save_the_published_time_up_to_sixteen_rows() -> None:
    model = flash("vr", "decode", tp=8, kernels="rubin-single")
    apart = StepModel(
        Setup(
            architecture=model.setup.architecture,
            chip=model.setup.chip,
            kernels=with_kernels("rubin-single", inline_rows=0),
            role="decode",
            tp=8,
        )
    )

    def launches(of: StepModel, rows: int) -> float:
        terms = {term.name: term.seconds for term in of.terms([decode_load(1, 10_000, rows)])}
        return terms["launches"]

    assert launches(apart, 6) - launches(model, 6) == pytest.approx(220e-6, rel=0.01)
    assert launches(apart, 17) == launches(model, 17)
    assert launches(apart, 16) > launches(model, 16)


def test_gathers_in_flight_shorten_attention_on_few_tokens() -> None:
    def attention(kernels: str) -> float:
        terms = {term.name: term for term in flash("vr", "decode", ep=32, kernels=kernels).terms([decode_load(1, 1e5, 6)])}
        return terms["attention"].seconds / 40 * 1e6

    assert attention("rubin-first") == pytest.approx(27, abs=1.5)
    assert 15 <= attention("rubin") <= 20


def test_local_stripes_speed_up_residual_streams_where_bytes_bound_them() -> None:
    def streams(kernels: str) -> float:
        terms = {term.name: term for term in flash("vr", "decode", ep=32, kernels=kernels).terms([decode_load(400, 4e6, 6)])}
        assert terms["residual streams"].bound == "memory"
        return terms["residual streams"].seconds

    assert streams("rubin") / streams("rubin-first") == pytest.approx(0.85)
