from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_blocks
from safetensors.torch import save_file

from rackserve.base.errors import ConfigError, FileFormatError, InvariantError, ResourceError
from rackserve.base.request import SamplingParams
from rackserve.base.step import ItemResult, StepItem
from rackserve.kernels.cpu import library
from rackserve.kernels.cpu.decoder import Decoder
from rackserve.model.attention import Span
from rackserve.model.config import LlamaConfig
from rackserve.model.files import open_model
from rackserve.model.kv_arena import KvArena
from rackserve.model.layout import kv_layout
from rackserve.model.llama import Llama, load_weights
from rackserve.model.loader.blocks import BLOCKS_FILE
from rackserve.model.native import NativeLlama, load_native
from rackserve.model.sampler import Picks, likeliest
from tests.kernels.cpu.variants import q4_1
from tests.model.test_runner import Rank, prompt_of
from tests.model.tiny import write_folder

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    max_positions=128, rope_theta=1e4, norm_eps=1e-5, tied=False,
)  # fmt: skip

TIED = replace(CONFIG, tied=True)


def folder(path: Path, *, blocks: bool) -> Path:
    """Random weights; with `blocks` some matrices are the very values of Q4_1 blocks, which lie beside them."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    hidden, heads, kv = CONFIG.hidden_size, CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    shapes = {"model.embed_tokens": (96, hidden), "lm_head": (96, hidden)}
    for number in range(CONFIG.num_layers):
        base = f"model.layers.{number}."
        shapes |= {
            f"{base}self_attn.{name}": (rows, hidden) for name, rows in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv))
        }
        shapes |= {f"{base}self_attn.o_proj": (hidden, heads), f"{base}mlp.down_proj": (hidden, CONFIG.ffn_size)}
        shapes |= {f"{base}mlp.{name}": (CONFIG.ffn_size, hidden) for name in ("gate_proj", "up_proj")}
    tensors, stored = {}, {}
    for name, (rows, inner) in shapes.items():
        weight = torch.randn(rows, inner) * inner**-0.5
        if blocks and "mlp" in name:
            stored[f"{name}.q4_1"], values = q4_1(rng, rows, inner)
            weight = torch.from_numpy(values) * 0.05
            scaled = np.ascontiguousarray(stored[f"{name}.q4_1"][..., :4]).view(np.float16) * np.float16(0.05)
            stored[f"{name}.q4_1"][..., :4] = scaled.view(np.uint8)
        tensors[f"{name}.weight"] = weight.to(torch.bfloat16)
    norms = [
        f"model.layers.{n}.{name}" for n in range(CONFIG.num_layers) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {f"{name}.weight": torch.rand(hidden).add(0.5).to(torch.bfloat16) for name in [*norms, "model.norm"]}
    save_file(tensors, str(path / "model.safetensors"))
    if stored:
        save_blocks(stored, str(path / BLOCKS_FILE))
    return path


@pytest.fixture(autouse=True)
def _built() -> None:
    if library.find() is None:
        pytest.skip("no kernels are built here")


def logits(path: Path, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The native logits of a prompt, and torch's."""
    block_tokens, size = 8, 16 * kv_layout(CONFIG, 8, dtype).block_bytes  # type: ignore[arg-type]
    spans, tokens = [Span(list(range(16)), 0, 100)], torch.arange(100) % 96
    native = NativeLlama(load_native(path, CONFIG), memoryview(bytearray(size)), block_tokens, dtype)  # type: ignore[arg-type]
    arena = KvArena(memoryview(bytearray(size)), CONFIG, 16, block_tokens, dtype)  # type: ignore[arg-type]
    plain = Llama(load_weights(path, CONFIG), arena)
    with torch.inference_mode():
        found = native.logits(native.forward(tokens, spans), torch.arange(100))
        return found, plain.logits(plain.forward(tokens, spans), torch.arange(100))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bf16_weights_give_what_torch_gives(tmp_path: Path, dtype: str) -> None:
    found, wanted = logits(folder(tmp_path, blocks=False), dtype)
    limit = 1e-4 if dtype == "fp32" else 0.03  # KV that lies between two bf16 may round to either
    assert (found - wanted).abs().max() < limit * wanted.abs().max()


def test_blocks_are_used_where_they_lie_beside_the_weights(tmp_path: Path) -> None:
    found, wanted = logits(folder(tmp_path, blocks=True), "fp32")
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert 1e-4 < error < 0.1  # the weights were not rounded to bf16 again


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 95}, r"model\.embed_tokens\.q8_0 has shape .* asks for 95 x 64"),
        ({"vocab_size": 80}, r"model\.embed_tokens\.q8_0 .* asks for 80 x 64"),
        ({"vocab_size": 112}, r"model\.embed_tokens\.q8_0 .* asks for 112 x 64"),
        ({"hidden_size": 96}, r"model\.embed_tokens\.q8_0 .* asks for 96 x 96"),
        ({"ffn_size": 128}, r"model\.layers\.0\.mlp\.gate_proj\.q4_1 .* asks for 128 x 64"),
    ],
)
def test_blocks_that_are_not_what_the_configuration_says_are_no_model(
    tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    path = folder(tmp_path, blocks=True)
    stored = load_file(path / BLOCKS_FILE)
    save_blocks(stored | {"model.embed_tokens.q8_0": np.zeros((96, 2, 34), np.uint8)}, str(path / BLOCKS_FILE))
    load_native(path, CONFIG)
    with pytest.raises(FileFormatError, match=words):
        load_native(path, replace(CONFIG, **changes))


def test_rows_that_fill_no_tile_are_left_to_torch(tmp_path: Path) -> None:
    files = open_model(str(write_folder(tmp_path, config=replace(TIED, vocab_size=90))))
    blocks = {"model.embed_tokens.q8_0": np.zeros((90, 2, 34), np.uint8)}
    for stored in ({}, blocks):
        save_blocks(stored, str(tmp_path / BLOCKS_FILE))
        assert Rank(files, None, kernels="auto").runner.path == "torch"
        with pytest.raises(ConfigError, match="cannot be packed"):
            Rank(files, None, kernels="native")


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"vocab_size": 80}, "model.embed_tokens"),
        ({"ffn_size": 64}, "model.layers.0.mlp.gate_proj"),
        ({"num_kv_heads": 4}, "model.layers.0.self_attn.k_proj"),
        ({"head_dim": 2**30}, "model.layers.0.self_attn.q_proj"),
        ({"num_layers": 3}, "model.layers.2.input_layernorm"),
    ],
)
def test_bf16_matrices_that_are_not_what_the_configuration_says_are_no_model(
    tmp_path: Path, changes: dict[str, int], tensor: str
) -> None:
    with pytest.raises(FileFormatError, match=rf"{tensor}\.weight "):
        load_native(folder(tmp_path, blocks=False), replace(CONFIG, **changes))


def test_a_longer_step_than_the_buffers_makes_larger_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path, blocks=False)
    whole, _ = logits(path, "fp32")
    monkeypatch.setattr("rackserve.model.native.MAX_ROWS", 16)
    assert torch.equal(logits(path, "fp32")[0], whole)


def grown(path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeLlama:
    """Buffers for 16 positions that a longer step must outgrow."""
    monkeypatch.setattr("rackserve.model.native.MAX_ROWS", 16)
    arena = memoryview(bytearray(16 * kv_layout(CONFIG, 8, "fp32").block_bytes))
    return NativeLlama(load_native(folder(path, blocks=False), CONFIG), arena, 8, "fp32")


def picks(native: NativeLlama, count: int) -> Picks:
    native.forward(list(range(count)), [Span(list(range(16)), 0, count)])
    return native.pick([count - 1], 0)[1]


def test_where_larger_buffers_cannot_be_had_the_old_ones_serve_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = grown(tmp_path, monkeypatch)
    before, make = picks(native, 10), native._make

    def fail_once(rows: int) -> Decoder:
        native._make = make
        raise ResourceError(f"no memory for {rows}")

    native._make = fail_once
    with pytest.raises(ResourceError, match="no memory for 90"):
        picks(native, 90)
    assert picks(native, 10) == before
    whole = picks(native, 90)
    assert native._decoder.max_rows == 90 and picks(native, 10) == before and picks(native, 90) == whole


def test_times_of_stages_count_on_when_buffers_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = grown(tmp_path, monkeypatch)
    picks(native, 10)
    assert not any(native.stage_times().values())
    native.time_stages(True)
    picks(native, 10)
    before = native.stage_times()
    picks(native, 90)
    after = native.stage_times()
    assert any(before.values()) and all(after[stage] >= before[stage] for stage in before)
    assert sum(after.values()) > sum(before.values())
    native.time_stages(False)
    ended = native.stage_times()
    picks(native, 100)
    assert native.stage_times() == ended
    native.time_stages(True)
    assert not any(native.stage_times().values())


def test_without_kernels_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_native(folder(tmp_path, blocks=False), CONFIG)
    monkeypatch.setattr(library, "find", lambda: None)
    with pytest.raises(ConfigError, match=r"rackserve\.kernels\.cpu\.build"):
        NativeLlama(weights, memoryview(bytearray(10)), 8, "bf16")


def test_picks_are_the_likeliest_of_the_logits_whichever_of_these_are_read(tmp_path: Path) -> None:
    arena = memoryview(bytearray(16 * kv_layout(CONFIG, 8, "fp32").block_bytes))
    native = NativeLlama(load_native(folder(tmp_path, blocks=True), CONFIG), arena, 8, "fp32", threads=2)
    hidden = native.forward(list(range(90)), [Span(list(range(16)), 0, 90)])
    every = native.logits(hidden, torch.arange(90)).clone()
    for num_read in (0, 3, 20):
        wanted = [at * 7 % 90 for at in range(20)]
        logits, picks = native.pick(wanted, num_read)
        assert torch.equal(torch.from_numpy(logits), every[wanted[:num_read]])
        assert (list(picks.tokens), list(picks.logits)) == likeliest(every[wanted])


MIXED: tuple[dict[str, Any], ...] = (
    {},
    {"sampling": SamplingParams(temperature=1.0, seed=3)},
    {"logprobs": 2},
    {"sampling": SamplingParams(repetition_penalty=1.3)},
    {},
    {"sampling": SamplingParams(temperature=0.8, top_k=20, seed=5), "logprobs": 0},
    {},
)


def test_greedy_rows_beside_rows_that_draw_give_what_each_gives_alone(tmp_path: Path) -> None:
    files = open_model(str(write_folder(tmp_path, config=TIED)))
    prompts = [prompt_of(number, 3 + 5 * number) for number in range(len(MIXED))]

    def item(rank: Rank, number: int, output: list[int], **more: Any) -> StepItem:
        tokens = [output[-1]] if output else prompts[number]
        context = array("i", prompts[number] + output).tobytes()
        start = len(prompts[number]) + len(output) - 1 if output else 0
        return rank.item(number, start, tokens, True, output_index=len(output), context=context, **MIXED[number] | more)

    def outputs(rank: Rank, chosen: list[int], **more: Any) -> list[list[ItemResult]]:
        results: list[list[ItemResult]] = [[] for _ in chosen]
        for _ in range(5):
            before = [[token for result in of for token in result.tokens] for of in results]
            items = [item(rank, number, output, **more) for number, output in zip(chosen, before, strict=True)]
            for of, result in zip(results, rank.run(*items), strict=True):
                of.append(result)
        return results

    together = outputs(Rank(files, None, kernels="native"), list(range(len(MIXED))))
    alone = [outputs(Rank(files, None, kernels="native"), [number])[0] for number in range(len(MIXED))]
    assert together == alone
    read = outputs(Rank(files, None, kernels="native"), [0, 4, 6], logprobs=0)  # the way through logits
    assert [[one.tokens for one in of] for of in read] == [[one.tokens for one in alone[number]] for number in (0, 4, 6)]


@pytest.mark.parametrize("logprobs", [-1, 0])
def test_a_block_never_written_is_an_error_not_a_token(tmp_path: Path, logprobs: int) -> None:
    rank = Rank(open_model(str(write_folder(tmp_path, config=TIED))), None, kernels="native")
    good = rank.item(1, 0, [4, 5], True)
    words = r"sequence 2: logits are not finite; the weights hold numbers .* or a block was read"
    with pytest.raises(InvariantError, match=words):
        rank.run(good, rank.item(2, 8, [5], True, logprobs=logprobs))
