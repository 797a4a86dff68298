#include "v41_matrix.h"

#include <algorithm>

#include "v41_rows.h"

namespace rackserve::v41 {

namespace {

#if defined(__AVX512F__)
constexpr int WIDE[3] = {8, 4, 2};  // tiles whose sums are kept in registers at once: of one row, of 2 to 4, of 6
constexpr int MOST = 12;            // rows of one pass over unpacked weights
constexpr int WORDS = 4;            // unrolled
#else
constexpr int WIDE[3] = {2, 1, 1};
constexpr int MOST = 3;
constexpr int WORDS = 1;
#endif

constexpr int in_word(int kind) { return kind == F8 ? 4 : kind == F4 ? 8 : kind == B16 ? 2 : 1; }
constexpr int group_bytes(int kind) { return GROUP / in_word(kind) * LANES * 4; }

// The scales of a tile and group, one per lane.
template <int KIND> inline F32 scale_of(const Matrix& m, size_t group) {
    if (KIND == F8) return splat(((const float*)m.scales)[group]);
    if (KIND == F4) {
        typedef uint8_t U8 __attribute__((vector_size(16)));
        return (F32)(__builtin_convertvector(load<U8>(m.scales + group * LANES), U32) << 23);
    }
    return F32{};
}

// Number `part` of the words at `at`.
template <int KIND> inline F32 weight(const uint8_t* at, int part, F32 scale) {
    if (KIND == F8) return (F32)((load<I32>(at + part - 3) >> 4) & int32_t(0x87f00000)) * scale;  // its byte comes to the top
    if (KIND == F4) return e2m1(load<U32>(at) >> (4 * part)) * scale;
    if (KIND == B16) return (F32)(part ? load<U32>(at) & 0xffff0000u : load<U32>(at) << 16);
    return load<F32>(at);
}

struct Task {
    const Matrix* m;
    const float* x;
    size_t stride;
    float* out;
    size_t out_stride;
    int begin, end;  // groups of this part
    bool add;        // onto what is there
};

inline void put(float* at, F32 value, bool add) { store(at, add ? load<F32>(at) + value : value); }

template <int KIND, int ROWS, int TILES> void direct(const Task& t, int row, int tile) {
    constexpr int NUMBERS = in_word(KIND), BYTES = group_bytes(KIND);
    const Matrix& m = *t.m;
    const size_t groups = m.inputs / GROUP;
    const uint8_t* codes = m.codes + (size_t(tile) * groups + t.begin) * BYTES;
    const float* x = t.x + size_t(row) * t.stride + size_t(t.begin) * GROUP;
    F32 sums[ROWS][TILES] = {};
    for (int group = t.begin; group < t.end; group++, codes += BYTES) {
        F32 scale[TILES];
#pragma GCC unroll 8
        for (int i = 0; i < TILES; i++) scale[i] = scale_of<KIND>(m, (tile + i) * groups + group);
#pragma GCC unroll WORDS
        for (int word = 0; word < GROUP / NUMBERS; word++, x += NUMBERS)
#pragma GCC unroll 8
            for (int part = 0; part < NUMBERS; part++)
#pragma GCC unroll 8
                for (int i = 0; i < TILES; i++) {
                    const F32 w = weight<KIND>(codes + i * groups * BYTES + word * 64, part, scale[i]);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) sums[r][i] = fma(w, splat(x[r * t.stride + part]), sums[r][i]);
                }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < TILES; i++) put(t.out + (row + r) * t.out_stride + (tile + i) * LANES, sums[r][i], t.add);
}

template <int KIND, int ROWS, int TILES> void sweep(const Task& t, int row, int first, int end) {
    for (; first + TILES <= end; first += TILES) direct<KIND, ROWS, TILES>(t, row, first);
    if constexpr (TILES > 1)
        if (first < end) sweep<KIND, ROWS, TILES / 2>(t, row, first, end);
}

template <int KIND> void few(const Task& t, int rows, int first, int end) {
    int row = 0;
    for (; row + 6 <= rows; row += 6) sweep<KIND, 6, WIDE[2]>(t, row, first, end);
    if (row + 4 <= rows) sweep<KIND, 4, WIDE[1]>(t, row, first, end), row += 4;
    if (row + 2 <= rows) sweep<KIND, 2, WIDE[1]>(t, row, first, end), row += 2;
    if (row < rows) sweep<KIND, 1, WIDE[0]>(t, row, first, end);
}

// Weights of TILES tiles, [inner][TILES][16].
template <int KIND, int TILES> void unpack(const Task& t, int tile, float* panel) {
    constexpr int NUMBERS = in_word(KIND), BYTES = group_bytes(KIND);
    const size_t groups = t.m->inputs / GROUP;
    for (int group = t.begin; group < t.end; group++)
        for (int i = 0; i < TILES; i++) {
            const size_t at = size_t(tile + i) * groups + group;
            const uint8_t* codes = t.m->codes + at * BYTES;
            const F32 scale = scale_of<KIND>(*t.m, at);
            float* to = panel + (size_t(group - t.begin) * GROUP * TILES + i) * LANES;
            for (int word = 0; word < GROUP / NUMBERS; word++, codes += 64)
#pragma GCC unroll 8
                for (int part = 0; part < NUMBERS; part++, to += TILES * LANES) store(to, weight<KIND>(codes, part, scale));
        }
}

template <int ROWS, int TILES> void block(const Task& t, const float* panel, int row, int tile) {
    const float* x = t.x + size_t(row) * t.stride + size_t(t.begin) * GROUP;
    const int inner = (t.end - t.begin) * GROUP;
    F32 sums[ROWS][TILES] = {};
    for (int k = 0; k < inner; k++, panel += TILES * LANES) {
        F32 w[TILES];
#pragma GCC unroll 2
        for (int i = 0; i < TILES; i++) w[i] = load<F32>(panel + i * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int i = 0; i < TILES; i++) sums[r][i] = fma(w[i], splat(x[r * t.stride + k]), sums[r][i]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < TILES; i++) put(t.out + (row + r) * t.out_stride + (tile + i) * LANES, sums[r][i], t.add);
}

// A block of `rows` rows, which are ROWS at most.
template <int ROWS, int TILES> void block_of(const Task& t, const float* panel, int rows, int row, int tile) {
    if constexpr (ROWS > MOST / 2)
        if (rows < ROWS) return block_of<ROWS - 1, TILES>(t, panel, rows, row, tile);
    block<ROWS, TILES>(t, panel, row, tile);
}

// At least MANY rows in blocks of nearly one size: the sums of a small one would wait for each other.
template <int TILES> void blocks(const Task& t, const float* panel, int rows, int tile) {
    static_assert(MANY > MOST / 2, "no block has fewer rows than block_of knows");
    for (int row = 0, left = (rows + MOST - 1) / MOST; left > 0; left--) {
        const int size = (rows - row + left - 1) / left;
        block_of<MOST, TILES>(t, panel, size, row, tile);
        row += size;
    }
}

template <int KIND> void compute(const Task& t, int rows, int first, int end, float* panel) {
    if (rows < MANY) return few<KIND>(t, rows, first, end);
    for (; first + 2 <= end; first += 2) {
        unpack<KIND, 2>(t, first, panel);
        blocks<2>(t, panel, rows, first);
    }
    if (first < end) {
        unpack<KIND, 1>(t, first, panel);
        blocks<1>(t, panel, rows, first);
    }
}

}  // namespace

void product(const Matrix& m, const float* x, size_t stride, int rows, int first, int end, float* out, size_t out_stride, float* panel,
             bool add) {
    const int groups = m.inputs / GROUP, parts = (m.inputs + MAX_PART - 1) / MAX_PART, size = (groups + parts - 1) / parts;
    for (int begin = 0; begin < groups; begin += size) {
        const Task t{&m, x, stride, out, out_stride, begin, std::min(begin + size, groups), add || begin > 0};
        switch (m.kind) {
            case F8: compute<F8>(t, rows, first / LANES, end / LANES, panel); break;
            case F4: compute<F4>(t, rows, first / LANES, end / LANES, panel); break;
            case B16: compute<B16>(t, rows, first / LANES, end / LANES, panel); break;
            default: compute<FLOAT>(t, rows, first / LANES, end / LANES, panel);
        }
    }
}

}  // namespace rackserve::v41
