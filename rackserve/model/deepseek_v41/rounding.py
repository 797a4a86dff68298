"""The model's three roundings, as the bytes that a rounded row is stored in.

They are part of the model, not of the storage: a row is packed where the model rounds it, and everything reads unpacked bytes,
so a row that was cached, pushed or fetched has the very values of one just computed. Blocks of channels with a common scale run
along the last dimension. e2m1 magnitudes are 0, .5, 1, 1.5, 2, 3, 4 and 6; ties go to the even code, as e4m3 casts do.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
WIDE = 32
"""Channels per scale of the power-of-two roundings."""

NARROW = 16
"""Channels per scale of a main row."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float32)
"""The number of each e2m1 code: bit 3 is the sign."""

_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float32)
_TIES_UP = torch.tensor([False, True, False, True, False, True, False])
"""At which bounds the larger neighbour has the even code."""


def pack_fp8(x: Tensor) -> Tensor:
    """Q1, window rows: float32 [..., n * 32] -> uint8 [..., e4m3 channels, then one e8m0 (power of two) per 32]."""
    scale = _power_above(_largest(x, WIDE, 1e-4) * torch.tensor(1 / E4M3_MAX, dtype=torch.float32))
    codes = (x.unflatten(-1, (-1, WIDE)) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8).flatten(-2), _e8m0(scale)), -1)


def unpack_fp8(rows: Tensor, channels: int) -> Tensor:
    """Float32 [..., channels] of rows from `pack_fp8`."""
    values = rows[..., :channels].contiguous().view(torch.float8_e4m3fn).float()
    return (values.unflatten(-1, (-1, WIDE)) * _power_of_two(rows[..., channels:])).flatten(-2)


def pack_fp4(x: Tensor) -> Tensor:
    """Q2, index keys: float32 [..., n * 32] -> uint8 [..., pairs of e2m1 (low nibble first), then one e8m0 per 32]."""
    scale = _power_above(_largest(x, WIDE, E2M1_MAX * 2.0**-126) * torch.tensor(1 / E2M1_MAX, dtype=torch.float32))
    return torch.cat((_nibbles(x.unflatten(-1, (-1, WIDE)) / scale), _e8m0(scale)), -1)


def unpack_fp4(rows: Tensor, channels: int) -> Tensor:
    """Float32 [..., channels] of rows from `pack_fp4`."""
    values = _from_nibbles(rows[..., : channels // 2])
    return (values.unflatten(-1, (-1, WIDE)) * _power_of_two(rows[..., channels // 2 :])).flatten(-2)


def pack_fp4_fine(x: Tensor) -> Tensor:
    """Q3, main rows: float32 [..., n * 16] -> uint8 [..., pairs of e2m1, then one e4m3 scale per 16 channels]."""
    scale = (_largest(x, NARROW, E2M1_MAX * 2.0**-9) / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    codes = _nibbles(x.unflatten(-1, (-1, NARROW)) / scale.float())
    return torch.cat((codes, scale[..., 0].contiguous().view(torch.uint8)), -1)


def unpack_fp4_fine(rows: Tensor, channels: int) -> Tensor:
    """Float32 [..., channels] of rows from `pack_fp4_fine`."""
    values = _from_nibbles(rows[..., : channels // 2])
    scales = rows[..., channels // 2 :].contiguous().view(torch.float8_e4m3fn).float()
    return (values.unflatten(-1, (-1, NARROW)) * scales[..., None]).flatten(-2)


def round_fp8(x: Tensor) -> Tensor:
    """Q1 of `x` as values: inputs of products with quantised weights."""
    return unpack_fp8(pack_fp8(x), x.shape[-1])


def round_fp4(x: Tensor) -> Tensor:
    """Q2 of `x` as values: index queries."""
    return unpack_fp4(pack_fp4(x), x.shape[-1])


def _largest(x: Tensor, size: int, least: float) -> Tensor:
    """Largest magnitude of each block: [..., n / size, 1]."""
    return x.unflatten(-1, (-1, size)).abs().amax(-1, keepdim=True).clamp(min=least)


def _power_above(scale: Tensor) -> Tensor:
    """The smallest power of two that is at least `scale`, a positive normal number."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _e8m0(scale: Tensor) -> Tensor:
    """The exponent bytes of powers of two [..., n, 1]: uint8 [..., n]."""
    return (scale[..., 0].contiguous().view(torch.int32) >> 23).to(torch.uint8)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^(b - 127) of uint8 [..., n], as [..., n, 1]."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)[..., None]


def _nibbles(x: Tensor) -> Tensor:
    """The nearest e2m1 codes of [..., blocks, channels], two to a byte: uint8 [..., blocks * channels / 2]."""
    size = x.abs()[..., None]
    code = torch.where(_TIES_UP, size >= _BOUNDS, size > _BOUNDS).sum(-1) + 8 * torch.signbit(x)
    pairs = code.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _from_nibbles(pairs: Tensor) -> Tensor:
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return E2M1[codes.to(torch.int64)]
