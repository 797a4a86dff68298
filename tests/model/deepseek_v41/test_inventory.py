"""The layout is that of the golden checkpoint and of the published sizes, and a group's shares cover it once."""

from __future__ import annotations

from math import prod

import pytest

from rackserve.base.errors import ConfigError
from rackserve.model.deepseek_v41.config import read_config
from rackserve.model.deepseek_v41.inventory import inventory, is_skipped, owned, require_width
from rackserve.model.loader.folder import SINGLE_NAME
from rackserve.model.parallel import Share

from .safetensors_files import GOLDEN, golden_config, read_file
from .test_config import FLASH


def test_the_golden_checkpoint_holds_the_inventory_and_nothing_else() -> None:
    header, _ = read_file(GOLDEN / SINGLE_NAME)
    listed = {name: (spec.dtype, list(spec.shape), spec.num_bytes) for name, spec in inventory(golden_config()).items()}
    stored = {
        name: (fields["dtype"], fields["shape"], fields["data_offsets"][1] - fields["data_offsets"][0])
        for name, fields in header.items()
    }
    assert listed == stored


def test_the_released_model_has_its_published_shapes() -> None:
    tensors = inventory(read_config(FLASH))
    shapes = {
        "layers.39.attn.wq_b.weight": (32768, 1280),
        "layers.0.attn.wo_a.scale": (256, 128),
        "layers.36.attn.indexer.wq_b.weight": (4096, 1280),
        "layers.20.attn.indexer.wk.weight": (128, 512),
        "layers.5.ffn.experts.383.w1.weight": (2304, 2560),
        "layers.5.ffn.experts.383.w2.scale": (5120, 72),
        "layers.14.engram.embed.scale": (384016682, 8),
        "layers.1.engram.wkv.weight": (25600, 6144),
        "mtp.0.main_proj.scale": (160, 480),
        "mtp.2.confidence_head.proj.weight": (1, 5376),
    }
    assert {name: tensors[name].shape for name in shapes} == shapes
    absent = {
        "layers.20.attn.compressor.wgate.weight", "layers.24.attn.indexer.wk.weight", "layers.3.attn.compressor.wkv.weight",
        "mtp.1.main_proj.weight", "mtp.0.norm.weight", "layers.2.engram.wkv.weight", "layers.5.ffn.experts.384.w1.weight",
    }  # fmt: skip
    assert not absent & tensors.keys()


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_the_devices_of_a_group_hold_every_cut_tensor_once_and_every_other_whole(tp: int, ep: int) -> None:
    shares = [Share(t, tp, e, ep) for e in range(ep) for t in range(tp)]
    for name, spec in inventory(golden_config()).items():
        parts = [part for share in shares if (part := owned(spec, share)) is not None]
        if spec.table:
            assert parts == [], name
            continue
        size = sum(prod(cut.stop - cut.start for cut in part) for part in parts)
        holders = tp if spec.num_experts else tp * ep
        copies = holders if spec.cut == "whole" else holders // tp
        assert (len(parts), size) == (holders, copies * prod(spec.shape)), name
        if spec.cut != "whole":
            at = 0 if spec.cut == "rows" else 1
            assert {part[at].start for part in parts} == {t * spec.shape[at] // tp for t in range(tp)}, name


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_scales_are_cut_with_the_numbers_they_scale(tp: int) -> None:
    tensors, share = inventory(read_config(FLASH)), Share(tp - 1, tp)
    for name in ("attn.wq_b", "attn.wo_a", "attn.wo_b", "ffn.experts.7.w1", "ffn.experts.7.w2", "ffn.shared_experts.w2"):
        weight, scale = (tensors[f"layers.3.{name}.{kind}"] for kind in ("weight", "scale"))
        held, scaled = owned(weight, share), owned(scale, share)
        assert held is not None and scaled is not None
        for size, scales, cut, scale_cut in zip(weight.shape, scale.shape, held, scaled, strict=True):
            step = size // scales
            assert (cut.start, cut.stop) == (scale_cut.start * step, scale_cut.stop * step), name


@pytest.mark.parametrize(
    ("tp", "ep", "says"),
    [
        (16, 1, "tensor parallel 16: o_groups is 8"),
        (3, 1, "tensor parallel 3: o_groups is 8"),
        (1, 5, "expert parallel 5: n_routed_experts is 384"),
        (1, 3, "expert parallel 3: dspark_n_routed_experts is 128"),
    ],
)
def test_a_group_that_cannot_share_evenly_is_refused(tp: int, ep: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        require_width(read_config(FLASH), tp, ep)


def test_the_released_model_runs_on_groups_up_to_8_by_128() -> None:
    for tp in (1, 2, 4, 8):
        for ep in (1, 2, 8, 64, 128):
            require_width(read_config(FLASH), tp, ep)


def test_an_expert_is_cut_in_whole_scale_blocks_only() -> None:
    require_width(golden_config(), 2, 4)
    with pytest.raises(ConfigError, match="tensor parallel 4: o_groups"):
        require_width(golden_config(), 4, 1)


def test_the_image_part_is_known_but_not_part_of_the_text_model() -> None:
    skipped = ["vision.blocks.0.wq.weight", "aligner.0.weight", "image_start", "image_newline"]
    assert all(map(is_skipped, skipped)) and not is_skipped("layers.0.vision.weight")
