from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackserve.base.errors import ConfigError
from rackserve.sim.cost.architecture import plain_architectures
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.load import StepLoad, decode_load, prefill_load
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.hardware import chips
from tests.sim.cost.models import DUMMY, flash, prompt_s

DEP16 = flash("gb300", "decode", ep=16)
DEP32 = flash("vr", "decode", ep=32)
GB200 = flash("gb200", "prefill", ep=2)
SINGLE = flash("gb300", "decode")


def by_name(model: StepModel, load: StepLoad) -> dict[str, float]:
    return {term.name: term.seconds * 1e6 for term in model.terms([load])}


# ------------------------------------------------------------ what was fitted must come out


def test_component_times_of_one_gb300_are_those_they_were_fitted_to() -> None:
    terms = by_name(SINGLE, decode_load(1, 10_000, 6))
    assert terms["experts"] / 40 == pytest.approx(86, rel=0.02)
    assert (terms["dense weights"] + terms["launches"]) / 40 == pytest.approx(45, rel=0.02)
    assert terms["attention"] / 40 == pytest.approx(27, rel=0.02)
    assert terms["residual streams"] / 40 == pytest.approx(13)


def test_the_single_session_of_rubin_is_the_figure_it_was_fitted_to() -> None:
    model = flash("vr", "decode", tp=8, kernels="rubin-single")
    assert 3.51 / model.seconds([decode_load(1, 212_000, 6)]) == pytest.approx(1844, rel=0.002)


def test_prefill_of_rubin_is_the_rate_it_was_fitted_to() -> None:
    load = StepLoad(4.3, 32768, 4.3 * 128, 4.3 * 212e3, 32768 * 216e3)
    assert 32768 / flash("vr", "prefill", ep=2).seconds([load]) == pytest.approx(155_000, rel=0.01)


@pytest.mark.parametrize("prompt", [16384, 65536])
def test_prefill_of_gb300_is_the_rate_it_was_fitted_to(prompt: int) -> None:
    assert prompt / prompt_s(flash("gb300", "prefill"), prompt) == pytest.approx(60_500, rel=0.04)


@pytest.mark.parametrize(
    ("prompt", "replay", "milliseconds", "bound"),
    [
        (1024, True, 72.5, 0.05), (4096, True, 92.3, 0.16), (8192, True, 159.4, 0.07), (32768, True, 609.8, 0.07),
        (4096, False, 135.3, 0.11), (8192, False, 246.9, 0.07), (32768, False, 983, 0.05),
    ],
)  # fmt: skip
def test_prompts_on_a_gb200_pair_are_near_the_table_they_were_fitted_to(
    prompt: int, replay: bool, milliseconds: float, bound: float
) -> None:
    assert prompt_s(GB200, prompt, replay=replay) * 1e3 == pytest.approx(milliseconds, rel=bound)


# ------------------------------------------------------------ what nothing was fitted to


@pytest.mark.parametrize(("replay", "milliseconds"), [(True, 2460), (False, 3950)])
def test_a_prompt_of_128k_on_a_gb200_pair_is_predicted(replay: bool, milliseconds: float) -> None:
    assert prompt_s(GB200, 131072, replay=replay) * 1e3 == pytest.approx(milliseconds, rel=0.08)


@pytest.mark.parametrize(
    ("prompt", "replay", "milliseconds"),
    [(32768, True, 327.8), (131072, True, 1392), (32768, False, 540), (131072, False, 2267)],
)
def test_long_prompts_on_four_gb200_in_tensor_parallel_are_predicted(prompt: int, replay: bool, milliseconds: float) -> None:
    assert prompt_s(flash("gb200", "prefill", tp=4), prompt, replay=replay) * 1e3 == pytest.approx(milliseconds, rel=0.06)


@pytest.mark.parametrize(
    ("prompt", "replay", "milliseconds", "error"),
    [
        (1024, True, 103.3, -0.32), (4096, True, 107, -0.34), (8192, True, 112.5, -0.20),
        (1024, False, 160.9, -0.56), (4096, False, 165.4, -0.46), (8192, False, 170, -0.25),
    ],
)  # fmt: skip
def test_short_prompts_on_four_gb200_are_as_far_too_fast_as_the_documents_say(
    prompt: int, replay: bool, milliseconds: float, error: float
) -> None:
    seconds = prompt_s(flash("gb200", "prefill", tp=4), prompt, replay=replay)
    assert seconds * 1e3 / milliseconds - 1 == pytest.approx(error, abs=0.006)


def test_a_step_of_eight_sequences_on_one_gb300_is_half_too_long_as_the_documents_say() -> None:
    """18.6 ms were measured."""
    assert SINGLE.seconds([decode_load(8, 8 * 40_000, 6)]) * 1e3 == pytest.approx(27.9, abs=0.05)


@pytest.mark.parametrize("sequences", [1, 8, 16, 32, 57, 96])
def test_decode_of_sixteen_gb300_is_near_the_hand_made_line(sequences: int) -> None:
    """7.2 ms + 0.161 ms a sequence, added up by hand from the same component times, at the corpus' context."""
    terms = by_name(DEP16, decode_load(sequences, sequences * 150_000, 6))
    seconds = (sum(terms.values()) - terms["step base"]) * 1e-6
    assert seconds * 1e3 == pytest.approx(7.2 + 0.161 * sequences, rel=0.09)


@pytest.mark.parametrize("sequences", [1, 8, 32, 57, 96])
def test_decode_of_thirty_two_rubin_is_near_the_hand_made_line(sequences: int) -> None:
    """4.3 ms + 0.0576 ms a sequence, scaled by hand from GB300's."""
    seconds = DEP32.seconds([decode_load(sequences, sequences * 150_000, 6)])
    assert seconds * 1e3 == pytest.approx(4.3 + 0.0576 * sequences, rel=0.1)


def test_a_single_session_on_four_rubin_before_the_rewrites_is_predicted() -> None:
    seconds = flash("vr", "decode", tp=4).seconds([decode_load(1, 212_000, 6)])
    assert 3.51 / seconds == pytest.approx(1117, rel=0.05)


def test_a_single_step_of_one_gb300_takes_what_was_measured_around_its_kernels() -> None:
    assert SINGLE.seconds([decode_load(1, 40_000, 6)]) == pytest.approx(9.87e-3, rel=0.01)


def test_a_single_gb300_decodes_about_as_fast_as_measured() -> None:
    """1,520 and 1,747 tok/s at 16 and 24 sequences."""
    for sequences, rate in ((16, 1520), (24, 1747)):
        tokens_per_step = rate * SINGLE.seconds([decode_load(sequences, sequences * 40_000, 6)]) / sequences
        assert 2.8 < tokens_per_step < 3.7  # acceptance that these rates would need


# ------------------------------------------------------------ laws

PREFILL_MODELS = [GB200, flash("vr", "prefill", ep=2, table_shards=18), flash("h200", "prefill", tp=4, ep=2)]
DECODE_MODELS = [DEP16, DEP32, flash("vr", "decode", tp=8, kernels="rubin-single"), flash("h100", "decode", ep=8)]


@given(st.sampled_from(DECODE_MODELS), st.integers(0, 200), st.integers(0, 10**6), st.integers(1, 8))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_more_sequences_longer_contexts_and_more_drafts_never_make_a_step_shorter(
    model: StepModel, sequences: int, context: int, positions: int
) -> None:
    seconds = model.seconds([decode_load(sequences, sequences * context, positions)])
    assert 0 < seconds <= model.seconds([decode_load(sequences + 1, (sequences + 1) * context, positions)])
    assert seconds <= model.seconds([decode_load(sequences, sequences * (context + 500), positions)])
    assert seconds <= model.seconds([decode_load(sequences, sequences * context, positions + 1)])


@given(st.sampled_from(PREFILL_MODELS), st.integers(1, 40_000), st.integers(0, 10**6))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_longer_chunks_and_contexts_never_make_a_prefill_step_shorter(model: StepModel, tokens: int, start: int) -> None:
    seconds = model.seconds([prefill_load(tokens, start, 1)])
    assert seconds <= model.seconds([prefill_load(tokens + 100, start, 1)])
    assert seconds <= model.seconds([prefill_load(tokens, start + 1000, 1)])
    assert seconds <= model.seconds([prefill_load(tokens, start, tokens)])


@given(st.lists(st.integers(0, 30), min_size=4, max_size=4))
@settings(derandomize=True, max_examples=30, deadline=None)
def test_a_group_ends_with_its_busiest_rank_and_even_work_is_fastest(counts: list[int]) -> None:
    model = flash("gb300", "decode", ep=4)
    loads = [decode_load(count, count * 50_000, 6) for count in counts]
    mean = sum(counts) / 4
    even = model.seconds([decode_load(mean, mean * 50_000, 6)])
    assert even <= model.seconds(loads) * (1 + 1e-9)
    assert model.seconds(loads) == pytest.approx(model.seconds(list(reversed(loads))))


def test_faster_memory_and_products_never_make_a_step_longer() -> None:
    order = [flash(name, "decode", ep=8).seconds([decode_load(16, 16 * 100_000, 6)]) for name in ("h100", "h200", "b200", "vr")]
    assert order == sorted(order, reverse=True)


def test_experts_of_a_busy_rank_are_computed_by_its_idle_partner_too() -> None:
    alone = by_name(flash("gb200", "prefill"), prefill_load(8192, 0, 0))
    pair = {term.name: term.seconds * 1e6 for term in GB200.terms([prefill_load(8192, 0, 0), DUMMY])}
    assert pair["experts"] == pytest.approx(alone["experts"] / 2)
    assert pair["dense weights"] == alone["dense weights"]


def test_nobody_runs_the_late_layers_while_no_prompt_ends() -> None:
    middle, end = (GB200.seconds([prefill_load(8192, 0, tail), DUMMY]) for tail in (0, 128))
    assert middle < end < GB200.seconds([prefill_load(8192, 0), DUMMY])


def test_a_dummy_step_takes_the_latencies_of_all_layers() -> None:
    assert 3e-3 < DEP16.seconds([DUMMY]) < DEP16.seconds([decode_load(1, 1000, 1)])
    assert GB200.seconds([DUMMY]) < GB200.seconds([prefill_load(1, 0)])


def test_no_prefill_step_with_tokens_is_shorter_than_its_least() -> None:
    assert GB200.seconds([prefill_load(1, 0, 0)]) == pytest.approx(0.07)


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="a step of 3 ranks does not fit a group of ep 2"):
        GB200.seconds([DUMMY] * 3)


@pytest.mark.parametrize("name", plain_architectures())
@pytest.mark.parametrize("chip", ["h100", "rtx-pro-6000", "gb300", "vr"])
def test_plain_models_have_a_step_time_on_every_chip(name: str, chip: str) -> None:
    found = chips()[chip]
    setup = Setup(
        architecture=plain_architectures()[name], chip=found, kernels=kernel_sets()[found.kernels], role="decode", tp=4
    )
    least = plain_architectures()[name].num_bytes / 4 / found.number("memory_bytes_per_s")
    dense = not any(segment.experts for segment in setup.architecture.segments)
    seconds = StepModel(setup).seconds([decode_load(1, 1000, 1)])
    assert 0 < seconds < 1
    assert not dense or seconds > 0.9 * least
