#include "matrix.h"

namespace rackserve {

namespace {

constexpr int BLOCK = 8;  // rows whose sums are kept in registers at once; no effect on any bit

inline int32_t quad_of(const int8_t* bytes) {
    int32_t quad;
    std::memcpy(&quad, bytes, 4);
    return quad;
}

// sum + products of the four unsigned bytes in each lane of `u` with those signed in `s`.
inline I32 dot_bytes(I32 sum, I32 u, I32 s) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#else
    for (int byte = 0; byte < 4; byte++) {
        const I32 left = (I32)(((U32)u >> (8 * byte)) & 0xff);
        const I32 right = (I32)((U32)s << (24 - 8 * byte)) >> 24;
        sum += left * right;
    }
    return sum;
#endif
}

template <int ROWS> void q4_block(const uint8_t* tile, int groups, const Inputs& in, int inputs, int row, F32* total) {
    for (int group = 0; group < groups; group++, tile += 320) {
#if defined(__AVX512F__)
        _mm_prefetch((const char*)tile + 4096, _MM_HINT_T0);
        _mm_prefetch((const char*)tile + 4160, _MM_HINT_T0);
        _mm_prefetch((const char*)tile + 4224, _MM_HINT_T0);
        _mm_prefetch((const char*)tile + 4288, _MM_HINT_T0);
        _mm_prefetch((const char*)tile + 4352, _MM_HINT_T0);
#endif
        const size_t begin = size_t(row) * inputs + group * GROUP;
        I32 sums[ROWS] = {}, fine[ROWS] = {};
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; quad++) {
            const U32 packed = load<U32>(tile + 64 * quad);
            const I32 low = (I32)(packed & 0x0f0f0f0f), high = (I32)((packed >> 4) & 0x0f0f0f0f);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const size_t at = begin + size_t(r) * inputs + 4 * quad;
                sums[r] = dot_bytes(sums[r], low, I32{} + quad_of(in.highs + at));
                fine[r] = dot_bytes(fine[r], low, I32{} + quad_of(in.lows + at));
                sums[r] = dot_bytes(sums[r], high, I32{} + quad_of(in.highs + at + 16));
                fine[r] = dot_bytes(fine[r], high, I32{} + quad_of(in.lows + at + 16));
            }
        }
        const F32 scale = from_half((const uint16_t*)(tile + 256)), offset = from_half((const uint16_t*)(tile + 288));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            total[r] = fma(to_float((sums[r] << 8) + fine[r]), scale, total[r]);
            total[r] = fma(offset, splat(in.sums[size_t(row + r) * groups + group]), total[r]);
        }
    }
}

// The same with 8-bit inputs. Where one row of a group has lows, all rows take that way: to others it adds nothing.
template <int ROWS> void eight_block(const uint8_t* tile, int groups, const Inputs& in, int inputs, int row, F32* total) {
    for (int group = 0; group < groups; group++, tile += 320) {
#if defined(__AVX512F__)
        for (int line = 0; line < 5; line++) _mm_prefetch((const char*)tile + 4096 + 64 * line, _MM_HINT_T0);
#endif
        const size_t begin = size_t(row) * inputs + group * GROUP;
        I32 sums[ROWS] = {};
        bool fine = false;
        for (int r = 0; r < ROWS; r++) fine |= in.fine[size_t(row + r) * groups + group] != 0;
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; quad++) {
            const U32 packed = load<U32>(tile + 64 * quad);
            const I32 low = (I32)(packed & 0x0f0f0f0f), high = (I32)((packed >> 4) & 0x0f0f0f0f);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const int8_t* at = in.highs + begin + size_t(r) * inputs + 4 * quad;
                sums[r] = dot_bytes(dot_bytes(sums[r], low, I32{} + quad_of(at)), high, I32{} + quad_of(at + 16));
            }
        }
        if (fine) {
            for (int r = 0; r < ROWS; r++) sums[r] <<= 8;
            for (int quad = 0; quad < 4; quad++) {
                const U32 packed = load<U32>(tile + 64 * quad);
                const I32 low = (I32)(packed & 0x0f0f0f0f), high = (I32)((packed >> 4) & 0x0f0f0f0f);
                for (int r = 0; r < ROWS; r++) {
                    const int8_t* at = in.lows + begin + size_t(r) * inputs + 4 * quad;
                    sums[r] = dot_bytes(dot_bytes(sums[r], low, I32{} + quad_of(at)), high, I32{} + quad_of(at + 16));
                }
            }
        }
        const F32 scale = from_half((const uint16_t*)(tile + 256)), offset = from_half((const uint16_t*)(tile + 288));
        const float unit = fine ? 1.0f / 256 : 1.0f;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const size_t at = size_t(row + r) * groups + group;
            total[r] = fma(to_float(sums[r]) * splat(in.scales[at] * unit), scale, total[r]);
            total[r] = fma(offset, splat(in.sums[at]), total[r]);
        }
    }
}

template <int ROWS> void q8_block(const uint8_t* tile, int groups, const Inputs& in, int inputs, int row, F32* total) {
    for (int group = 0; group < groups; group++, tile += 576) {
#if defined(__AVX512F__)
        for (int line = 0; line < 9; line++) _mm_prefetch((const char*)tile + 4608 + 64 * line, _MM_HINT_T0);
#endif
        const size_t begin = size_t(row) * inputs + group * GROUP;
        // The inputs, moved by 128, are the unsigned side; what that adds is taken off with the sums of the weights.
        const I32 moved = __builtin_convertvector(load<U16>(tile + 544), I32) << 16 >> 16;
        I32 sums[ROWS], fine[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r] = fine[r] = -(moved << 7);
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++) {
            const I32 weights = load<I32>(tile + 64 * quad);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const size_t at = begin + size_t(r) * inputs + 4 * quad;
                sums[r] = dot_bytes(sums[r], I32{} + (quad_of(in.highs + at) ^ int32_t(0x80808080)), weights);
                fine[r] = dot_bytes(fine[r], I32{} + (quad_of(in.lows + at) ^ int32_t(0x80808080)), weights);
            }
        }
        const F32 scale = from_half((const uint16_t*)(tile + 512));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) total[r] = fma(to_float((sums[r] << 8) + fine[r]), scale, total[r]);
    }
}

template <int ROWS> void bf16_block(const uint8_t* tile, int groups, const Inputs& in, int inputs, int row, F32* total) {
    const float* rows = in.rows + size_t(row) * inputs;
    for (int inner = 0; inner < groups * GROUP; inner++, tile += 32) {
        const F32 weights = from_bf16(load<U16>(tile));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) total[r] = fma(weights, splat(rows[size_t(r) * inputs + inner]), total[r]);
    }
}

template <int ROWS>
void block(const Matrix& m, const Inputs& in, int row, int output, float* out, int stride, bool add) {
    const int groups = m.inputs / GROUP;
    const uint8_t* tile = m.data + size_t(output / LANES) * groups * group_bytes(m.kind);
    F32 total[ROWS] = {};
    if (m.kind == Q4) q4_block<ROWS>(tile, groups, in, m.inputs, row, total);
    else if (m.kind == Q4_EIGHT) eight_block<ROWS>(tile, groups, in, m.inputs, row, total);
    else if (m.kind == Q8) q8_block<ROWS>(tile, groups, in, m.inputs, row, total);
    else bf16_block<ROWS>(tile, groups, in, m.inputs, row, total);
    for (int r = 0; r < ROWS; r++)
        finish(out + size_t(row + r) * stride + output, total[r], has_row_scales(m) ? in.scales[row + r] : 1.0f, add);
}

}  // namespace

void quantise(const float* values, const Matrix& m, int row, const Inputs& to) {
    const size_t groups = m.inputs / GROUP, at = row * groups;
    int8_t *highs = to.highs + at * GROUP, *lows = to.lows + at * GROUP;
    if (m.kind == Q4_EIGHT) {
        GroupRounding rounding(values, m.inputs);
        for (size_t group = 0; group < groups; group++, highs += GROUP, lows += GROUP) {
            rounding.group(values + group * GROUP, highs, lows);
            to.scales[at + group] = rounding.scale;
            to.sums[at + group] = rounding.sum;
            to.fine[at + group] = rounding.fine;
        }
        return;
    }
    const Rounding rounding(values, m.inputs);
    to.scales[row] = rounding.scale;
    I32 whole[2];
    for (size_t group = 0; group < groups; group++) {
        to.sums[at + group] = rounding.group(values + group * GROUP, whole);
        for (int half = 0; half < 2; half++, highs += LANES, lows += LANES) store_halves(whole[half], highs, lows);
    }
}

void product(const Matrix& m, const Inputs& in, int rows, int first, int end, float* out, int stride, bool add) {
    for (int output = first; output < end; output += LANES) {
        int row = 0;
        for (; row + BLOCK <= rows; row += BLOCK) block<BLOCK>(m, in, row, output, out, stride, add);
        if (row + 4 <= rows) block<4>(m, in, row, output, out, stride, add), row += 4;
        if (row + 2 <= rows) block<2>(m, in, row, output, out, stride, add), row += 2;
        if (row < rows) block<1>(m, in, row, output, out, stride, add);
    }
}

void unpack_row(const Matrix& m, int output, float* row) {
    const int groups = m.inputs / GROUP, lane = output % LANES;
    const uint8_t* tile = m.data + size_t(output / LANES) * groups * group_bytes(m.kind);
    for (int group = 0; group < groups; group++, tile += group_bytes(m.kind), row += GROUP) {
        for (int inner = 0; inner < GROUP; inner++) {
            const int quad = inner / 4, place = lane * 4 + inner % 4;
            if (m.kind == Q4 || m.kind == Q4_EIGHT) {
                const uint8_t byte = tile[(quad % 4) * 64 + place];
                const float nibble = float(quad < 4 ? byte & 15 : byte >> 4);
                const uint16_t* half = (const uint16_t*)(tile + 256);
                row[inner] = nibble * half_to_float(half[lane]) + half_to_float(half[LANES + lane]);
            } else if (m.kind == Q8) {
                row[inner] = float((int8_t)tile[quad * 64 + place]) * half_to_float(((const uint16_t*)(tile + 512))[lane]);
            } else {
                uint32_t bits = uint32_t(((const uint16_t*)tile)[inner * LANES + lane]) << 16;
                std::memcpy(row + inner, &bits, 4);
            }
        }
    }
}

}  // namespace rackserve
