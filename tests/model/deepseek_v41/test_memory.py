"""Memory plans reproduce the published sizes, equal what is loaded, and refuse by name what cannot fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rackserve.base.errors import ConfigError, FileFormatError, ResourceError
from rackserve.base.memory_plan import MemoryPlan
from rackserve.model.deepseek_v41.config import read_config
from rackserve.model.deepseek_v41.inventory import inventory
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.model.deepseek_v41.memory import (
    Device,
    checkpoint_totals,
    part_of,
    plan_device,
    vision_total,
)
from rackserve.model.deepseek_v41.options import WeightMemory
from rackserve.model.deepseek_v41.weights import load_weights
from rackserve.model.parallel import Share

from .safetensors_files import GOLDEN, golden_config
from .test_config import FLASH

FLASH_CONFIG = read_config(FLASH)
LAYOUT = kv_layout(FLASH_CONFIG, 256)
DEVICE = Device(
    role="decode", tp_size=1, ep_size=1, num_blocks=1000, num_states=100, max_sequences=32, max_batched_tokens=512,
    num_draft=5, weights="stored", engram_shards=1,
)  # fmt: skip
WEIGHTS = ("attention and shared", "routed experts", "embedding and head", "DSpark", "Engram projections")


@pytest.fixture(scope="module")
def lone() -> MemoryPlan:
    """The released model on one device."""
    return plan_device(FLASH_CONFIG, LAYOUT, DEVICE)


def sizes(plan: MemoryPlan) -> dict[str, int]:
    return {line.name: line.num_bytes for line in plan.lines}


def changed(**fields: object) -> Device:
    return Device(**{name: getattr(DEVICE, name) for name in Device.__struct_fields__} | fields)  # type: ignore[arg-type]


def test_the_released_checkpoint_has_its_published_sizes() -> None:
    totals = {total.name: total for total in checkpoint_totals(FLASH_CONFIG)}
    assert totals["routed experts"].num_bytes == 384 * 40 * 18_800_640
    assert totals["Engram tables"].num_bytes == 101_377_628_352 + 101_380_404_048
    assert round(totals["DSpark"].num_bytes / 1e9, 3) == 7.933
    backbone = [totals[name] for name in WEIGHTS[:3]]
    assert round(sum(total.num_bytes for total in backbone) / 1e9, 2) == 298.31
    assert round(sum(total.num_parameters for total in backbone) / 1e9, 2) == 551.57
    assert round(totals["Engram tables"].num_parameters / 1e9, 2) == 196.61
    assert int(totals["DSpark"].num_parameters / 1e7) / 100 == 14.22
    vision = vision_total(FLASH, FLASH_CONFIG)
    assert vision is not None and round(vision.num_parameters / 1e9, 3) == 0.485 and "estimate" in vision.name
    both = [vision, *totals.values()]
    assert round(sum(total.num_bytes for total in both) / 1e9, 1) == 510.3
    assert round(sum(total.num_parameters for total in both) / 1e9, 1) == 763.2


def test_each_tensor_counts_once() -> None:
    assert sum(total.num_bytes for total in checkpoint_totals(FLASH_CONFIG)) == sum(
        spec.num_bytes for spec in inventory(FLASH_CONFIG).values()
    )
    assert part_of("layers.0.ffn.shared_experts.w1.weight") == part_of("norm.weight") == "attention and shared"
    assert part_of("mtp.2.markov_head.embed.weight") == part_of("mtp.0.ffn.experts.1.w1.weight") == "DSpark"


def test_a_lone_device_holds_the_whole_checkpoint_and_what_it_serves_with(lone: MemoryPlan) -> None:
    held = sizes(lone)
    assert {name: held[name] for name in WEIGHTS} == {
        total.name: total.num_bytes for total in checkpoint_totals(FLASH_CONFIG) if total.name in WEIGHTS
    }
    assert held["Engram tables"] == 202_758_032_400
    assert held["KV blocks"] == 1000 * 256 * 890
    assert held["resume states"] == 100 * (2_703_360 + 202_752 + 12_288)
    assert held["running windows"] == 32 * (2_703_360 + 202_752 + 12_288)
    assert lone.total_bytes == sum(held.values())


@pytest.mark.parametrize("memory", ["widened", "stored"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_every_device_of_a_group_holds_what_was_planned(tp: int, ep: int, memory: WeightMemory) -> None:
    config = golden_config()
    layout = kv_layout(config, 32)
    held = sizes(plan_device(config, layout, changed(tp_size=tp, ep_size=ep, weights=memory)))
    for share in (Share(t, tp, e, ep) for t in range(tp) for e in range(ep)):
        weights = load_weights(GOLDEN, config, share, memory)
        loaded = dict.fromkeys(WEIGHTS, 0)
        for name, spec in inventory(config).items():
            short = name.removesuffix(".weight")
            if spec.table or name.endswith(".scale") or not weights.has(short):
                continue
            loaded[part_of(name)] += held_bytes(weights, short, memory)
        assert loaded == {name: held[name] for name in WEIGHTS}, share


def held_bytes(weights: object, name: str, memory: WeightMemory) -> int:
    """Bytes of the tensors behind `name`, as this device holds them; a vector counts as stored in a stored plan."""
    for tables in (weights._matrices, weights._tables, weights._vectors):  # type: ignore[attr-defined]
        if name in tables:
            found = tables[name]
            break
    if isinstance(found, torch.Tensor):
        stored = weights.checkpoint.tensors  # type: ignore[attr-defined]
        spec = stored[name if name in stored else f"{name}.weight"]
        return found.numel() * (2 if spec.dtype == "BF16" and memory == "stored" else found.element_size())
    kept = [found._right] if memory == "widened" else [found._packed.weight, found._packed.scale]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor is not None)


def test_engram_rows_are_cut_over_the_shards_and_may_lie_elsewhere() -> None:
    config = golden_config()
    layout = kv_layout(config, 32)
    for shards in (1, 2, 7, 1000):
        held = sizes(plan_device(config, layout, changed(engram_shards=shards)))
        assert held["Engram tables"] == 33 * (-(-462 // shards) + -(-630 // shards))
    assert sizes(plan_device(config, layout, changed(engram_shards=0)))["Engram tables"] == 0


def test_a_plan_that_fits_to_the_byte_fits_and_one_byte_less_does_not(lone: MemoryPlan) -> None:
    lone.require_fit(lone.total_bytes)
    with pytest.raises(ResourceError, match="activations"):
        lone.require_fit(lone.total_bytes - 1)


def test_the_line_that_breaks_is_named_with_what_to_change(lone: MemoryPlan) -> None:
    remedies = {
        "attention and shared": "raise topology.decode_tp",
        "routed experts": "raise topology.decode_ranks or topology.decode_tp",
        "embedding and head": "raise topology.decode_tp",
        "DSpark": "raise topology.decode_ranks",
        "Engram projections": "holds them whole: raise topology.decode_ranks",
        "Engram tables": "raise --engram-shards",
        "KV blocks": "lower topology.decode_blocks",
        "resume states": "lower topology.rank_windows",
        "running windows": "lower scheduler.max_sequences",
        "activations (estimate)": "lower scheduler.max_batched_tokens",
    }
    taken = 0
    for line in lone.lines:
        with pytest.raises(ResourceError) as caught:
            lone.require_fit(taken + line.num_bytes - 1)
        assert f"decode device: no room for {line.name}: {line.num_bytes:,} bytes" in str(caught.value)
        assert remedies.pop(line.name) in str(caught.value)
        taken += line.num_bytes
    assert not remedies


def test_what_is_lowered_takes_less() -> None:
    config = golden_config()
    layout = kv_layout(config, 32)
    full = sizes(plan_device(config, layout, DEVICE))
    for line, fields in {
        "attention and shared": {"tp_size": 2},
        "embedding and head": {"tp_size": 2},
        "routed experts": {"ep_size": 2},
        "DSpark": {"ep_size": 2},
        "KV blocks": {"num_blocks": 999},
        "resume states": {"num_states": 99},
        "running windows": {"max_sequences": 31},
        "activations (estimate)": {"max_batched_tokens": 511},
    }.items():
        assert sizes(plan_device(config, layout, changed(**fields)))[line] < full[line], line


def test_a_group_that_cannot_share_evenly_has_no_plan() -> None:
    with pytest.raises(ConfigError, match="tensor parallel 3"):
        plan_device(FLASH_CONFIG, LAYOUT, changed(tp_size=3))


def test_an_image_encoder_that_is_absent_or_malformed(tmp_path: Path) -> None:
    assert vision_total(GOLDEN / "config.json", golden_config()) is None
    fields = json.loads(FLASH.read_text())
    fields["vision_config"]["patch_size"] = "14"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(FileFormatError, match=r"vision_config.*patch_size"):
        vision_total(tmp_path / "config.json", FLASH_CONFIG)
