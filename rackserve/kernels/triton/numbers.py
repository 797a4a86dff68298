"""Number formats inside kernels: e4m3, e2m1 and e8m0 codes, their scales, and the three roundings of a model's rows.

The codes are those of the reference's casts, to the bit: nearest, ties to the even code.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_codes(x):
    """Codes (uint8) of float32 within +-448. By hand: older chips have no such cast, and the interpreter's drops subnormals."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Adding 2^14 leaves multiples of 2^-9, e4m3's least step, in the low bits, rounded right.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def e4m3_numbers(codes):
    """Float32 of codes (uint8). Not a number stays so on a GPU; the interpreter reads it as 480."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_codes(x):
    """Codes 0 to 15 (int32) of float32; beyond 6 is 6."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_numbers(codes):
    """Float32 of codes 0 to 15 (int32)."""
    size = codes & 7
    bits = tl.where(size < 2, size * 0x3F000000, (size + 252) << 22)
    return (bits | ((codes & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_numbers(codes):
    """Float32 2^(code - 127) of exponent bytes."""
    return (codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def power_above(scale):
    """Exponent byte (int32) of the smallest power of two that is at least `scale`, a positive normal number."""
    bits = scale.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def round_fp8(groups):
    """Q1 of float32 [n, 32]: codes uint8 [n, 32] and exponent bytes int32 [n]."""
    largest = tl.maximum(tl.max(tl.abs(groups), 1), 1e-4)
    exponents = power_above(largest * 0.002232142857142857)
    x = tl.div_rn(groups, e8m0_numbers(exponents)[:, None])
    bounded = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return e4m3_codes(bounded), exponents


@triton.jit
def round_fp4(groups):
    """Q2 of float32 [n, 32]: codes int32 [n, 32] and exponent bytes int32 [n]."""
    largest = tl.maximum(tl.max(tl.abs(groups), 1), 7.052966104933725e-38)
    exponents = power_above(largest * 0.16666666666666666)
    return e2m1_codes(tl.div_rn(groups, e8m0_numbers(exponents)[:, None])), exponents


@triton.jit
def round_fp4_fine(groups):
    """Q3 of float32 [n, 16]: codes int32 [n, 16] and e4m3 codes of the scales, uint8 [n]."""
    largest = tl.maximum(tl.max(tl.abs(groups), 1), 0.01171875)
    scale = e4m3_codes(tl.minimum(tl.div_rn(largest, 6.0), 448.0))
    return e2m1_codes(tl.div_rn(groups, e4m3_numbers(scale)[:, None])), scale


@triton.jit
def grouped(values, scales, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """`values` [ROWS, GROUPS * SIZE] times `scales` [ROWS, GROUPS], one per SIZE channels."""
    parts = tl.reshape(values, [ROWS, GROUPS, SIZE]) * scales[:, :, None]
    return tl.reshape(parts, [ROWS, GROUPS * SIZE])


@triton.jit
def fp8_rows(base, there, DIM: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Float32 [ROWS, WIDE] of Q1 rows at the pointers `base` [ROWS]; zero where not `there` (not read) and beyond DIM."""
    channel, group = tl.arange(0, WIDE), tl.arange(0, WIDE // 32)
    codes = tl.load(base[:, None] + channel[None], mask=there[:, None] & (channel < DIM)[None], other=0)
    scales = tl.load(base[:, None] + DIM + group[None], mask=there[:, None] & (group < DIM // 32)[None], other=0)
    return grouped(e4m3_numbers(codes), e8m0_numbers(scales), ROWS, WIDE // 32, 32)


@triton.jit
def fp4_pairs(base, there, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Float32 [rows, WIDE] of e2m1 pairs, low half first, at the pointers `base`; zero where not `there` and beyond DIM."""
    pair = tl.arange(0, WIDE // 2)
    codes = tl.load(base[:, None] + pair[None], mask=there[:, None] & (pair < DIM // 2)[None], other=0).to(tl.int32)
    return tl.interleave(e2m1_numbers(codes & 15), e2m1_numbers(codes >> 4))


@triton.jit
def fp4_rows(base, there, DIM: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The same of Q2 rows: e2m1 with a power of two per 32."""
    group = tl.arange(0, WIDE // 32)
    mask = there[:, None] & (group < DIM // 32)[None]
    scales = tl.load(base[:, None] + DIM // 2 + group[None], mask=mask, other=0)
    return grouped(fp4_pairs(base, there, DIM, WIDE), e8m0_numbers(scales), ROWS, WIDE // 32, 32)


@triton.jit
def fp4_fine_rows(base, there, DIM: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The same of Q3 rows: e2m1 with an e4m3 scale per 16."""
    group = tl.arange(0, WIDE // 16)
    mask = there[:, None] & (group < DIM // 16)[None]
    scales = tl.load(base[:, None] + DIM // 2 + group[None], mask=mask, other=0)
    return grouped(fp4_pairs(base, there, DIM, WIDE), e4m3_numbers(scales), ROWS, WIDE // 16, 16)
