from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rackserve.base.errors import InvariantError
from rackserve.model.deepseek_v41.streams import rms_norm
from tests.kernels.triton.drawn import noise

reduction = pytest.importorskip("rackserve.kernels.triton.reduction")


def parts_of(devices: int, count: int, d: int) -> list[Tensor]:
    return [noise(count, d, seed=device) for device in range(devices)]


class Symmetric:
    """Stands in for the handle of symmetric memory."""

    def __init__(self) -> None:
        self.channels: list[int] = []

    def barrier(self, channel: int) -> None:
        self.channels.append(channel)


@pytest.mark.parametrize(("devices", "count", "d"), [(1, 1, 32), (2, 5, 96), (4, 3, 160)])
def test_every_device_gets_the_sum_in_device_order_with_the_residual_and_the_norm(devices: int, count: int, d: int) -> None:
    parts, residual, weight = parts_of(devices, count, d), noise(count, d, seed=50), noise(d, seed=51)
    wanted = parts[0]
    for part in parts[1:]:
        wanted = wanted + part
    wanted = wanted + residual
    gathered = reduction.GatheredParts(lambda part: parts)
    total, normed = reduction.reduce_norm(parts[-1], gathered, residual, weight, 1e-6)
    assert torch.equal(total, wanted)
    assert torch.allclose(normed, rms_norm(wanted, weight, 1e-6), rtol=1e-6, atol=1e-6)


def test_residual_and_norm_may_be_left_out_and_gathered_parts_may_lie_apart() -> None:
    parts = [torch.stack((part, part), 1)[:, 0] for part in parts_of(3, 4, 32)]
    total, normed = reduction.reduce_norm(parts[0].contiguous(), reduction.GatheredParts(lambda part: parts), None, None, 0.0)
    assert torch.equal(total, parts[0] + parts[1] + parts[2])
    assert normed is total


def test_parts_in_symmetric_memory_are_read_between_two_barriers() -> None:
    """The order of copying, barriers and reading; that the memory is truly shared is for GPUs to show."""
    parts, weight = parts_of(2, 3, 64), noise(64, seed=9)
    buffers = [torch.full((300,), torch.nan) for _ in parts]
    buffers[1][: parts[1].numel()] = parts[1].flatten()
    mine = reduction.SymmetricParts.__new__(reduction.SymmetricParts)
    mine._buffer, mine._handle = buffers[0], Symmetric()
    mine._addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    total, normed = reduction.reduce_norm(parts[0], mine, None, weight, 1e-6)
    again, plain = reduction.reduce_norm(parts[0], reduction.GatheredParts(lambda part: parts), None, weight, 1e-6)
    assert torch.equal(total, again)
    assert torch.equal(normed, plain)
    assert mine._handle.channels == [0, 1]
    with pytest.raises(InvariantError, match="make more room"):
        mine.shared(torch.zeros(301))


def test_served_formats_are_added_in_float32_and_rounded_once() -> None:
    parts = [part.half() for part in parts_of(3, 2, 64)]
    weight = noise(64, seed=9)
    total, normed = reduction.reduce_norm(parts[0], reduction.GatheredParts(lambda part: parts), parts[1], weight, 1e-6)
    wanted = parts[0].float() + parts[1].float() + parts[2].float() + parts[1].float()
    assert torch.equal(total, wanted.half())
    assert torch.equal(normed, rms_norm(total.float(), weight, 1e-6).half())


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    parts, weight = parts_of(2, 6, 96), noise(96, seed=9)
    _, together = reduction.reduce_norm(parts[0], reduction.GatheredParts(lambda part: parts), None, weight, 1e-6)
    last = [part[5:].contiguous() for part in parts]
    _, alone = reduction.reduce_norm(last[0], reduction.GatheredParts(lambda part: last), None, weight, 1e-6)
    assert torch.equal(alone[0], together[5])


def test_no_rows_and_wrong_parts() -> None:
    none = torch.empty(0, 32)
    assert reduction.reduce_norm(none, reduction.GatheredParts(lambda part: [none]), None, None, 0.0)[0].shape == (0, 32)
    with pytest.raises(InvariantError, match="the part of device 1 is "):
        reduction.reduce_norm(noise(2, 32), reduction.GatheredParts(lambda part: [part, part[:1]]), None, None, 0.0)
