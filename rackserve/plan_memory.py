"""The command `plan-memory`: what a DeepSeek-V4.1 model takes in all and on one device of each role. Reads no weights."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rackserve.arguments import at_least, number_within
from rackserve.base.errors import ConfigError
from rackserve.base.kv_layout import KvLayout
from rackserve.base.memory_plan import USABLE, MemoryPlan
from rackserve.base.topology import ROLES, Role, Topology
from rackserve.config import Settings, load_settings
from rackserve.live.runner import RunnerSpec
from rackserve.model import deepseek_v41
from rackserve.model.deepseek_v41.config import DeepseekV41Config, read_config
from rackserve.model.deepseek_v41.layout import kv_layout
from rackserve.model.deepseek_v41.memory import Device, Total, checkpoint_totals, plan_device, vision_total
from rackserve.sim.hardware import chips

SHIPPED = "deepseek-v4.1-flash"
"""The released model, whose config.json is part of the package."""

PLANNED = Settings(
    topology=Topology(rank_windows=64, segment_windows=64),
    runner=RunnerSpec(kind="deepseek_v41", model=SHIPPED, block_tokens=256, weights="stored"),
)
"""What `--set` changes: the settings of `serve`, with blocks and weights as a rack of GPUs would hold them."""

UNITS = {"": 1, "b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}  # fmt: skip


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument(
        "--config",
        metavar="FILE",
        help="the model's config.json or its folder (default: deepseek-v4.1-flash, which is shipped)",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="overrides",
        help="one setting, such as topology.prefill_tp=8",
    )
    device = command.add_mutually_exclusive_group()
    device.add_argument("--device-memory", metavar="SIZE", help="refuse what does not fit: 141GB, 80GiB or a number of bytes")
    device.add_argument("--device", metavar="NAME", help="the same by a device's name, such as h200")
    command.add_argument(
        "--usable",
        type=number_within(0.01, 1),
        default=USABLE,
        metavar="SHARE",
        help=f"share of that memory to plan with (default {USABLE:g})",
    )
    command.add_argument(
        "--engram-shards",
        type=at_least(0),
        metavar="N",
        help="devices that share the Engram tables (default: those of a group; 0: tables outside the devices)",
    )


def plan_memory(options: argparse.Namespace) -> int:
    """Print the totals and the plans. ResourceError, after all of it, naming the line of a plan that does not fit."""
    path = config_path(options.config)
    config = read_config(path)
    settings = load_settings(None, options.overrides, PLANNED)
    capacity = capacity_bytes(options.device_memory, options.device, options.usable)
    layout = kv_layout(config, settings.runner.block_tokens, settings.runner.resume)
    settings.check_layout(layout)
    if settings.scheduler.num_draft > config.dspark_block_size:
        raise ConfigError(
            f"scheduler.num_draft is {settings.scheduler.num_draft}: this model drafts {config.dspark_block_size} tokens a step"
        )
    vision = vision_total(path, config)
    print(f"checkpoint of {path}")
    _print_totals([*checkpoint_totals(config), *([vision] if vision else [])])
    _print_state(config, settings)
    plans = [_plan(config, layout, device_of(settings, role, options.engram_shards)) for role in ROLES]
    for role, plan in zip(ROLES, plans, strict=True):
        _print_plan(settings.topology, role, plan)
        if capacity is not None:
            more = plan.num_more(capacity, layout.block_bytes)
            print(f"  of {capacity:,} bytes: {max(capacity - plan.total_bytes, 0):,} left, room for {more:,} more KV blocks")
    if capacity is not None:
        for plan in plans:
            plan.require_fit(capacity)
        print("fits")
    return 0


def config_path(name: str | None) -> Path:
    """The config.json that `--config` names: a file, a folder with one, or the released model's name (the default)."""
    if name is None or name == SHIPPED:
        return Path(deepseek_v41.__file__).with_name("flash.json")
    path = Path(name)
    return path / "config.json" if path.is_dir() else path


def capacity_bytes(memory: str | None, device: str | None, usable: float) -> int | None:
    """Bytes that a plan may take; None if no device is described. ConfigError if `memory` is no size or `device` unknown."""
    if device is not None:
        known = chips()
        if device.lower() not in known:
            raise ConfigError(f"--device {device[:40]!r} is unknown; choose {', '.join(known)} or give --device-memory")
        return int(known[device.lower()].number("memory_bytes") * usable)
    return None if memory is None else int(parse_size(memory) * usable)


def parse_size(text: str) -> int:
    """Bytes in a text such as 141GB (decimal), 80GiB (binary) or 141e9. ConfigError if it is no positive size."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?(?:e\d\d?)?)\s*([a-z]*)\s*", text.lower())
    unit = UNITS.get(match[2]) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ConfigError(
            f"--device-memory {text[:40]!r} is no size: give bytes, or a number with kB, MB, GB, TB or KiB ... TiB"
        )
    return size


def device_of(settings: Settings, role: Role, engram_shards: int | None) -> Device:
    """What the settings ask of one device of `role`; without `engram_shards` the tables are cut over its group."""
    topology, scheduler = settings.topology, settings.scheduler
    tp_size, ep_size = topology.tensor_parallel(role), topology.group_size(role)
    return Device(
        role=role,
        tp_size=tp_size,
        ep_size=ep_size,
        num_blocks=topology.num_blocks(role),
        num_states=topology.rank_windows,
        max_sequences=scheduler.max_sequences,
        max_batched_tokens=scheduler.max_batched_tokens,
        num_draft=scheduler.num_draft,
        weights=settings.runner.weights,
        engram_shards=tp_size * ep_size if engram_shards is None else engram_shards,
    )


def _plan(config: DeepseekV41Config, layout: KvLayout, device: Device) -> MemoryPlan:
    try:
        return plan_device(config, layout, device)
    except ConfigError as error:
        raise ConfigError(f"topology.{device.role}_tp or topology.{device.role}_ranks: {error}") from error


def _print_totals(totals: list[Total]) -> None:
    for total in [*totals, Total("all", sum(t.num_parameters for t in totals), sum(t.num_bytes for t in totals))]:
        size, count = total.num_bytes, total.num_parameters
        print(f"  {total.name:42} {size:17,} B {size / 1e9:8.3f} GB {count:19,} parameters ({count / 1e9:.3f} B)")
    backbone = sum(t.num_parameters for t in totals[:3])
    print(f"  backbone (attention, experts, embedding, head): {backbone / 1e9:.2f} B parameters")


def _print_state(config: DeepseekV41Config, settings: Settings) -> None:
    """What cached tokens and running sequences take."""
    layout = kv_layout(config, settings.runner.block_tokens)
    names = {"windows": "windows", "dspark_windows": "DSpark windows", "open_groups": "open groups, at most"}
    state = [f"{names[group.name]} {group.bytes_per_slot:,} B" for group in layout.groups if group.kind == "window"]
    print(f"cached state: {layout.block_bytes / layout.block_tokens:g} B per token; per sequence: {', '.join(state)}")
    tables = [rows * (config.engram_head_dim + config.engram_head_dim // 32) for rows in config.engram_num_embeddings]
    shown = (f"layer {layer} {size / 2**30:.3f} GiB" for layer, size in zip(config.engram_layer_ids, tables, strict=True))
    print(f"Engram tables: {', '.join(shown)}")


def _print_plan(topology: Topology, role: Role, plan: MemoryPlan) -> None:
    workers, ranks, tp = len(topology.workers(role)), topology.group_size(role), topology.tensor_parallel(role)
    print(f"{plan.who}: 1 of {workers * ranks * tp} ({workers} workers of {ranks} ranks of {tp} devices)")
    for name, size in [*((line.name, line.num_bytes) for line in plan.lines), ("total", plan.total_bytes)]:
        print(f"  {name:42} {size:17,} B {size / 1e9:8.3f} GB")
