from __future__ import annotations

from typing import Any

import pytest
import torch

from rackserve.model.deepseek_v41 import rounding
from tests.kernels.triton.drawn import edges, poisoned

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
numbers = pytest.importorskip("rackserve.kernels.triton.numbers")

CODES = torch.arange(256, dtype=torch.uint8)
READ = {
    "window": (rounding.pack_fp8, rounding.unpack_fp8), "index": (rounding.pack_fp4, rounding.unpack_fp4),
    "main": (rounding.pack_fp4_fine, rounding.unpack_fp4_fine),
}  # fmt: skip


@triton.jit
def _decode(codes: Any, fp8: Any, fp4: Any, powers: Any, again: Any):
    at = tl.arange(0, 256)
    code = tl.load(codes + at)
    values = numbers.e4m3_numbers(code)
    tl.store(fp8 + at, values)
    tl.store(again + at, numbers.e4m3_codes(values))
    tl.store(fp4 + at, numbers.e2m1_numbers(code.to(tl.int32) & 15))
    tl.store(powers + at, numbers.e8m0_numbers(code))


@triton.jit
def _read(packed: Any, there: Any, out: Any, DIM: tl.constexpr, BYTES: tl.constexpr, KIND: tl.constexpr):
    row, channel = tl.arange(0, 16), tl.arange(0, 128)
    base, exists = packed + row * BYTES, tl.load(there + row) != 0
    if KIND == 0:
        values = numbers.fp8_rows(base, exists, DIM, 16, 128)
    elif KIND == 1:
        values = numbers.fp4_rows(base, exists, DIM, 16, 128)
    else:
        values = numbers.fp4_fine_rows(base, exists, DIM, 16, 128)
    tl.store(out + row[:, None] * 128 + channel[None], values)


def test_every_code_has_the_value_that_the_reference_reads() -> None:
    fp8, fp4, powers, again = torch.zeros(256), torch.zeros(256), torch.zeros(256), torch.zeros(256, dtype=torch.uint8)
    _decode[(1,)](CODES, fp8, fp4, powers, again)
    number = (CODES & 0x7F) != 0x7F
    assert torch.equal(fp8[number], CODES.view(torch.float8_e4m3fn).float()[number])
    assert torch.equal(again[number], CODES[number])
    assert torch.equal(fp4, rounding.E2M1[(CODES & 15).long()])
    assert torch.equal(torch.signbit(fp4), torch.signbit(rounding.E2M1[(CODES & 15).long()]))
    assert torch.equal(powers[1:255], torch.exp2(CODES[1:255].double() - 127).float())


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("channels", [32, 96, 128])
def test_rows_are_read_as_the_reference_reads_them_and_missing_ones_not_at_all(kind: str, channels: int) -> None:
    pack, unpack = READ[kind]
    packed = pack(edges(channels)[-16:])
    there = torch.arange(16) % 3 != 1
    packed[~there] = poisoned(packed.shape[1])
    out = torch.full((16, 128), torch.nan)
    _read[(1,)](packed, there.int(), out, DIM=channels, BYTES=packed.shape[1], KIND=list(READ).index(kind))
    wanted = torch.zeros(16, 128)
    wanted[there, :channels] = unpack(packed[there], channels)
    assert torch.equal(out, wanted)
