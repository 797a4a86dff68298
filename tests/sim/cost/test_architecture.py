from __future__ import annotations

import pytest

from rackserve.sim.cost.architecture import Attention, Indexer, plain_architectures


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("llama-3.1-8b", 8.03, 2 * 8 * 128 * 32 * 2),
        ("qwen3-30b-a3b", 30.5, 2 * 4 * 128 * 48 * 2),
        ("qwen3-32b", 32.8, 2 * 8 * 128 * 64 * 2),
        ("deepseek-v3", 671, 576 * 61 * 2),
    ],
)
def test_sizes_give_the_published_parameters_and_cache(name: str, billions: float, kv_bytes: float) -> None:
    model = plain_architectures()[name]
    segments = model.segments
    parameters = model.head.parameters + model.embedding.parameters
    parameters += sum(segment.dense.parameters + segment.shared.parameters for segment in segments)
    parameters += sum(each.num_layers * each.experts.num * each.experts.parameters for each in segments if each.experts)
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.kv_bytes == kv_bytes


def test_latent_attention_reads_one_row_for_all_heads() -> None:
    model = plain_architectures()["deepseek-v3"]
    kind = model.segments[-1].attention[0]
    assert (kind.row_bytes, kind.kv_heads) == (576 * 2, 1)
    assert kind.pair_flops == 2 * 128 * (576 + 512)


def test_selected_rows_end_at_their_limit_and_the_window_at_its_width() -> None:
    kind = Attention(1, 1, 288, 1, ratio=2, limit=512, window=128, window_row_bytes=528)
    assert kind.selected
    assert [kind.rows(context) for context in (0, 100, 500, 1024, 10**6)] == [0, 150, 378, 640, 640]
    assert kind.gathered_bytes(10**6) == 512 * 288 + 128 * 528


def test_attention_without_a_limit_reads_all_rows() -> None:
    kind = Attention(1, 1, 100, 8)
    assert not kind.selected and kind.rows(12345) == 12345


def test_an_indexer_scores_all_keys_or_its_candidates() -> None:
    assert Indexer(1, 1, 68, 2).keys(10**6) == 500_000
    assert Indexer(1, 1, 68, 1, 16384).keys(10**6) == 16384
    assert Indexer(1, 1, 68, 1, 16384).keys(100) == 100
