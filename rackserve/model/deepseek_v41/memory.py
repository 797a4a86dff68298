"""Bytes of a DeepSeek-V4.1 model: of its whole checkpoint, and of what one device holds while it serves. No torch needed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from rackserve.base.errors import FileFormatError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.memory_plan import Line, MemoryPlan
from rackserve.base.topology import Role
from rackserve.base.units import blocks_for
from rackserve.model.config import read_json
from rackserve.model.deepseek_v41.config import DeepseekV41Config
from rackserve.model.deepseek_v41.inventory import TensorSpec, inventory, require_width
from rackserve.model.deepseek_v41.options import WeightMemory

Part = Literal["attention and shared", "routed experts", "embedding and head", "DSpark", "Engram projections", "Engram tables"]

PARTS: tuple[Part, ...] = (
    "attention and shared", "routed experts", "embedding and head", "DSpark", "Engram projections", "Engram tables",
)  # fmt: skip

VISION = "vision and aligner (estimate, not loaded)"


class Total(msgspec.Struct, frozen=True):
    """One part of a checkpoint."""

    name: str
    num_parameters: int
    num_bytes: int


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What one device of a group is asked to hold.

    tp_size, ep_size    devices that compute a rank together; ranks of the group, over which experts are spread
    num_blocks          KV blocks of its rank; every device of a rank holds all of them: keys and values have one head
    num_states          slots for resume state
    max_sequences       sequences that run at once
    max_batched_tokens  positions computed in one step
    num_draft           drafts verified per sequence and step
    weights             how matrices are held
    engram_shards       devices over which the rows of the Engram tables are cut; 0: the tables lie elsewhere
    """

    role: Role
    tp_size: int
    ep_size: int
    num_blocks: int
    num_states: int
    max_sequences: int
    max_batched_tokens: int
    num_draft: int
    weights: WeightMemory
    engram_shards: int


class VisionConfig(msgspec.Struct, frozen=True):
    """Sizes of the image encoder; for its bytes alone."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    patch_size: int
    downsample: int


def part_of(name: str) -> Part:
    """Which line of a plan a tensor counts to."""
    if name.startswith("mtp."):
        return "DSpark"
    if ".engram." in name:
        return "Engram tables" if ".embed." in name else "Engram projections"
    if ".ffn.experts." in name:
        return "routed experts"
    return "embedding and head" if name.startswith(("embed.", "head.")) else "attention and shared"


def checkpoint_totals(config: DeepseekV41Config) -> list[Total]:
    """Parameters and stored bytes of the text model, part by part."""
    parameters, stored = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for name, spec in inventory(config).items():
        part = part_of(name)
        parameters[part] += spec.num_parameters
        stored[part] += spec.num_bytes
    return [Total(part, parameters[part], stored[part]) for part in PARTS]


def vision_total(path: Path, config: DeepseekV41Config) -> Total | None:
    """About the size of the image encoder that the `config.json` at `path` describes, bf16; None if it describes none.

    An estimate: a patch embedding, per layer four attention matrices and a gated feed-forward, and two matrices from
    `downsample` x `downsample` joined patches to the text model's width.
    """
    fields = read_json(path).get("vision_config")
    if fields is None:
        return None
    try:
        vision = msgspec.convert(fields, VisionConfig)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{path}: vision_config: {error}; fetch the file again") from error
    width = vision.hidden_size
    layers = vision.num_hidden_layers * (4 * width * width + 3 * width * vision.intermediate_size)
    aligner = vision.downsample**2 * width * config.hidden_size + config.hidden_size**2
    count = 3 * vision.patch_size**2 * width + layers + aligner
    return Total(VISION, count, 2 * count)


def plan_device(config: DeepseekV41Config, layout: KvLayout, device: Device) -> MemoryPlan:
    """The memory of one device of a group. ConfigError if the model cannot be cut over the group."""
    require_width(config, device.tp_size, device.ep_size)
    held = dict.fromkeys(PARTS, 0)
    for name, spec in inventory(config).items():
        held[part_of(name)] += _held_bytes(name, spec, device)
    tp, ranks = f"topology.{device.role}_tp", f"topology.{device.role}_ranks"
    remedies: dict[Part, str] = {
        "attention and shared": f"raise {tp}",
        "routed experts": f"raise {ranks} or {tp}",
        "embedding and head": f"raise {tp}",
        "DSpark": f"raise {ranks} or {tp}",
        "Engram projections": f"every device holds them whole: raise {ranks} or {tp}, so that the rest takes less",
        "Engram tables": "raise --engram-shards, or set it to 0 to keep the tables outside the devices",
    }
    fixed = [Line(part, held[part], remedies[part]) for part in PARTS]
    per_state = layout.window_bytes
    changing = [
        Line("KV blocks", device.num_blocks * layout.block_bytes, f"lower topology.{device.role}_blocks"),
        Line("resume states", device.num_states * per_state, "lower topology.rank_windows"),
        Line("running windows", device.max_sequences * per_state, "lower scheduler.max_sequences"),
        Line("activations (estimate)", _activation_bytes(config, layout, device), "lower scheduler.max_batched_tokens"),
    ]
    return MemoryPlan(f"{device.role} device", (*fixed, *changing))


def _held_bytes(name: str, spec: TensorSpec, device: Device) -> int:
    """Bytes of a tensor on the group's first device; the others hold as much, but for a row of an Engram table."""
    if spec.table:
        rows, *columns = spec.shape
        assert len(columns) == 1
        return blocks_for(rows, device.engram_shards) * columns[0] if device.engram_shards else 0
    if spec.num_experts and spec.expert >= spec.num_experts // device.ep_size:
        return 0
    widened = device.weights == "widened" and not name.endswith("embed.weight")  # rows that are looked up stay as stored
    size = 4 * spec.num_parameters if widened else spec.num_bytes
    return size if spec.cut == "whole" else size // device.tp_size


def _activation_bytes(config: DeepseekV41Config, layout: KvLayout, device: Device) -> int:
    """About the most that a step needs besides, float32: an upper bound for kernels that do not gather cached rows.

    Per position: the streams three times (old, new, mixed), queries and outputs, attention scores, one score per cached row of
    the longest context, and the inner width of its experts; then the logits of all sequences and drafts.
    """
    heads = config.num_attention_heads // device.tp_size
    context = min(config.max_position_embeddings, device.num_blocks * layout.block_tokens)
    per_position = (
        3 * config.hc_mult * config.hidden_size
        + 2 * heads * config.head_dim
        + heads * (config.sliding_window + config.index_topk)
        + context
        + 3 * (config.num_experts_per_tok + 1) * config.moe_intermediate_size // device.tp_size
    )
    logits = device.max_sequences * (1 + device.num_draft) * config.vocab_size
    return 4 * (device.max_batched_tokens * per_position + logits)
