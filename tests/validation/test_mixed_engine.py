from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from rackserve.architectures import architecture_named
from rackserve.base.errors import FileFormatError, InvariantError
from rackserve.sim.cost.kernels import kernel_sets
from rackserve.sim.cost.load import decode_load, prefill_load
from rackserve.sim.cost.setup import Setup
from rackserve.sim.cost.step_model import StepModel
from rackserve.sim.hardware import chips
from rackserve.validation.mixed_engine import Timing, compare_timings, read_timings, simulate_mixed


def model(ranks: int) -> StepModel:
    chip = chips()["rtx-pro-6000"]
    kernels = kernel_sets()[chip.kernels]
    return StepModel(
        Setup(architecture=architecture_named("qwen3-30b-a3b"), chip=chip, kernels=kernels, role="decode", ep=ranks)
    )


def arrivals(*requests: tuple[float, int, int]) -> list[Timing]:
    return [Timing(prompt, output, at, 0.0, 0.0) for at, prompt, output in requests]


def test_a_request_alone_takes_its_prompt_and_then_a_step_a_token() -> None:
    steps = model(1)
    (found,) = simulate_mixed(arrivals((1.0, 100, 3)), steps, 8, 512)
    assert found.ttft_s == pytest.approx(steps.seconds([prefill_load(100)]), rel=1e-6)
    decode = sum(steps.seconds([decode_load(1, context, 1)]) for context in (100, 101))
    assert found.last_s - found.first_s == pytest.approx(decode, rel=1e-6)
    assert found.tpot_s == pytest.approx(decode / 2, rel=1e-6) and found.e2e_s == pytest.approx(found.ttft_s + decode, rel=1e-6)


def test_a_prompt_slows_down_those_who_generate() -> None:
    alone, _ = simulate_mixed(arrivals((0.0, 100, 20), (100.0, 4000, 2)), model(1), 8, 512)
    beside, _ = simulate_mixed(arrivals((0.0, 100, 20), (0.05, 4000, 2)), model(1), 8, 512)
    assert beside.last_s > alone.last_s and beside.first_s == alone.first_s


def test_a_full_engine_makes_others_wait_in_order() -> None:
    found = simulate_mixed(arrivals(*[(0.0, 64, 5)] * 4), model(1), 1, 512)
    for before, after in pairwise(found):
        assert after.first_s > before.last_s


def test_ranks_share_requests_and_wait_for_each_other() -> None:
    requests = arrivals((0.0, 64, 5), (0.0, 64, 50))
    found = simulate_mixed(requests, model(2), 1, 512)
    assert found[0].first_s == found[1].first_s  # side by side, one on each rank
    assert found[0].last_s < found[1].last_s


def test_a_request_that_never_fits_is_an_error() -> None:
    with pytest.raises(InvariantError, match="never comes"):
        simulate_mixed(arrivals((0.0, 10_000_000, 2)), model(1), 8, 512)


def test_agreement_is_perfect_with_itself_and_sees_a_slower_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("requests")
    ours = simulate_mixed(arrivals(*[(at / 20, 50 * at + 20, 10) for at in range(6)]), model(2), 128, 2048)
    for slower in (1.0, 2.0):
        lines = [
            {
                "input_toks": part.prompt_tokens,
                "output_toks": part.output_tokens,
                "queued_ts": 7 + part.arrived_s,
                "first_token_ts": 7 + part.arrived_s + slower * part.ttft_s,
                "last_token_ts": 7 + part.arrived_s + slower * part.e2e_s,
            }
            for part in ours
        ]
        path = folder / f"{slower}.jsonl"
        path.write_bytes(b"\n".join(map(msgspec.json.encode, reversed(lines))))
        found = compare_timings(path)
        assert found.ttft.median_signed == pytest.approx(1 / slower - 1, abs=1e-6)
        assert found.e2e.median_signed == pytest.approx(1 / slower - 1, abs=1e-6)
        assert found.tpot.tau == pytest.approx(1.0)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"input_toks": 3, "output_toks": 1, "queued_ts": 1, "first_token_ts": 2, "last_token_ts": 2}'],
)
def test_other_files_are_refused_by_name(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("requests") / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"other\.jsonl"):
        read_timings(path)
