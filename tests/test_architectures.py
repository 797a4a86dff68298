from __future__ import annotations

from pathlib import Path

import pytest

from rackserve.architectures import FLASH, architecture_named, architecture_names, v41_architecture
from rackserve.base.errors import ConfigError
from rackserve.base.topology import Role
from rackserve.model import deepseek_v41
from rackserve.model.deepseek_v41.config import DeepseekV41Config, read_config
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.model.deepseek_v41.memory import Device, checkpoint_totals, plan_device
from rackserve.sim.cost.memory import budget
from tests.sim.cost.models import flash

CONFIG = read_config(Path(deepseek_v41.__file__).with_name("flash.json"))
FLASH_MODEL = architecture_named(FLASH)
TINY = Path(__file__).parent / "golden" / "deepseek_v41_tiny" / "config.json"


@pytest.mark.parametrize("config", [CONFIG, read_config(TINY)], ids=["flash", "tiny"])
def test_no_byte_and_no_parameter_of_the_checkpoint_is_lost_or_counted_twice(
    config: DeepseekV41Config,
) -> None:
    model = v41_architecture(config, "x")
    totals = checkpoint_totals(config)
    norm = 2 * config.hidden_size  # the last norm belongs to no layer
    assert model.num_bytes + model.table_bytes + norm == pytest.approx(sum(total.num_bytes for total in totals), abs=1)
    assert model.draft is not None
    segments = [*model.segments, model.draft.segment]
    parameters = model.head.parameters + model.embedding.parameters
    parameters += sum(each.dense.parameters + each.shared.parameters for each in segments)
    parameters += sum(each.num_layers * each.experts.num * each.experts.parameters for each in segments if each.experts)
    wanted = sum(total.num_parameters for total in totals if total.name != "Engram tables")
    assert parameters + config.hidden_size == pytest.approx(wanted, abs=1)


def test_the_released_model_has_its_published_sizes() -> None:
    encoder, decoder = FLASH_MODEL.segments
    assert encoder.experts is not None
    assert (FLASH_MODEL.kv_bytes, FLASH_MODEL.table_row_bytes) == (890, 12_672)
    assert FLASH_MODEL.table_bytes / 2 / 2**30 == pytest.approx(94.4, abs=0.05)
    assert encoder.experts.num_bytes / 1e6 == pytest.approx(18.8, abs=0.01)
    active = encoder.dense.parameters + encoder.shared.parameters + 20 * 6 * encoder.experts.parameters
    assert active / 1e9 == pytest.approx(7.9, abs=0.15)  # a prompt's early positions pass the first half alone
    assert (encoder.tail_only, decoder.tail_only) == (False, True)


def test_who_selects_rows_is_read_from_the_roles_of_layers() -> None:
    encoder, decoder = FLASH_MODEL.segments
    assert [(kind.num_layers, kind.ratio, kind.limit) for kind in encoder.attention] == [(2, 1, 0), (18, 2, 512)]
    assert [(kind.num_layers, kind.ratio, kind.limit) for kind in decoder.attention] == [(20, 1, 512)]
    assert [(kind.num_layers, kind.ratio, kind.limit) for kind in encoder.indexers] == [(3, 2, 0)]
    assert [(kind.num_layers, kind.ratio, kind.limit) for kind in decoder.indexers] == [(1, 1, 0), (4, 1, 16384)]
    assert FLASH_MODEL.draft is not None and FLASH_MODEL.draft.segment.indexers == ()


@pytest.mark.parametrize(("role", "tp", "ep", "shards"), [("prefill", 1, 2, 16), ("decode", 1, 32, 0), ("decode", 8, 1, 8)])
def test_weights_on_a_chip_are_those_that_the_engine_plans_with(role: Role, tp: int, ep: int, shards: int) -> None:
    device = Device(
        role=role,
        tp_size=tp,
        ep_size=ep,
        num_blocks=1,
        num_states=0,
        max_sequences=1,
        max_batched_tokens=1,
        num_draft=5,
        weights="stored",
        engram_shards=shards,
    )
    lines = plan_device(CONFIG, kv_layout(CONFIG, 256), device).lines
    engine = sum(line.num_bytes for line in lines[:6])
    plan = budget(flash("vr", role, tp=tp, ep=ep, table_shards=shards).setup).plan
    assert sum(line.num_bytes for line in plan.lines) == pytest.approx(engine, rel=1e-5)


def test_a_model_nobody_described_is_answered_with_those_that_are() -> None:
    assert {FLASH, "deepseek-v3", "llama-3.1-8b", "qwen3-30b-a3b"} <= set(architecture_names())
    assert architecture_named("deepseek-v3").name == "deepseek-v3"
    with pytest.raises(ConfigError, match="--model 'gpt-9' is unknown; choose one of deepseek-v4"):
        architecture_named("gpt-9")
