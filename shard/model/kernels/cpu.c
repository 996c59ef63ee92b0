// Matrix products, gated MLP and, with decoder_layer.h, whole decoder layers in bfloat16 on a CPU: the products by
// AVX512-BF16, by AMX where the processor and the system have it, and elsewhere by multiplications in float32.
//
// Every output element is one sum in float32 over its row in order, one term at a time (two with AVX512-BF16, 32 with
// AMX), and is rounded once. So its bits do not depend on the number of rows, on chunks or on threads.
//
// A packed matrix is [out / 64, in / 2, 64, 2]: one pass over the inputs reads it sequentially.
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#define BF16 1
#include "model/kernels/decoder_layer.h"
#include "system/parts.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(WITH_AVX512) && !defined(WITHOUT_TILES)
#define WITH_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BLOCK 64      // outputs of a packed block: four vectors
#define VECTORS 4
#define TILE 6        // most rows of one pass: with AVX-512, 6 x 4 sums, 4 weights and a broadcast fill the 32 registers
#define MLP_ROWS 96   // rows whose gates are kept until their up projections
#define ALONE (1 << 18)  // multiplications below which a second thread costs more than it saves

#ifdef __AVX2__
// Eight pairs of eight rows, k apart -> eight vectors, BLOCK pairs apart, each with one pair of every row.
static inline void pack_eight(const bf16 *weight, int64_t k, bf16 *packed) {
    __m256i row[8], two[8], four[8];
    for (int r = 0; r < 8; r++) row[r] = _mm256_loadu_si256((const __m256i *)(weight + r * k));
    for (int r = 0; r < 8; r += 2) {
        two[r] = _mm256_unpacklo_epi32(row[r], row[r + 1]);
        two[r + 1] = _mm256_unpackhi_epi32(row[r], row[r + 1]);
    }
    for (int r = 0; r < 8; r += 4)
        for (int i = 0; i < 2; i++) {
            four[r + 2 * i] = _mm256_unpacklo_epi64(two[r + i], two[r + i + 2]);
            four[r + 2 * i + 1] = _mm256_unpackhi_epi64(two[r + i], two[r + i + 2]);
        }
    for (int p = 0; p < 4; p++) {
        _mm256_storeu_si256((__m256i *)(packed + p * BLOCK * 2), _mm256_permute2x128_si256(four[p], four[p + 4], 0x20));
        _mm256_storeu_si256((__m256i *)(packed + (p + 4) * BLOCK * 2),
                            _mm256_permute2x128_si256(four[p], four[p + 4], 0x31));
    }
}
#endif

// weight: `width` outputs of k -> a packed block, zeros beyond width
static void pack_block(const bf16 *weight, int64_t width, int64_t k, bf16 *packed) {
    const bf16 zeros[2] = {0, 0};
    int64_t p = 0;
#ifdef __AVX2__
    for (; width == BLOCK && p + 8 <= k / 2; p += 8)
        for (int64_t c = 0; c < BLOCK; c += 8) pack_eight(weight + c * k + 2 * p, k, packed + (p * BLOCK + c) * 2);
#endif
    for (; p < k / 2; p++)
        for (int64_t c = 0; c < BLOCK; c++)
            memcpy(packed + (p * BLOCK + c) * 2, c < width ? weight + c * k + 2 * p : zeros, 4);
}

static inline int64_t width_of(int64_t b, int64_t n) { return n - b * BLOCK > BLOCK ? BLOCK : n - b * BLOCK; }

// weight: [n, k] -> packed, zeros beyond n
void pack(const bf16 *weight, int64_t n, int64_t k, bf16 *packed) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for
    for (int64_t b = 0; b < blocks; b++)
        pack_block(weight + b * BLOCK * k, width_of(b, n), k, packed + b * BLOCK * k);
}

// Row `id` of a packed matrix -> y: [k]
static inline void take_row(const bf16 *packed, int64_t k, int64_t id, bf16 *y) {
    const bf16 *pair = packed + id / BLOCK * BLOCK * k + id % BLOCK * 2;
    for (int64_t c = 0; c < k; c += 2) memcpy(y + c, pair + c * BLOCK, 2 * sizeof *y);
}

// ids: [count] rows of a packed matrix [n, k] -> y: [count, k]. Returns whether all are rows of the matrix; else
// nothing is written.
int take_rows(const bf16 *packed, int64_t n, int64_t k, const int64_t *ids, int64_t count, bf16 *y, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= n) return 0;
    PARALLEL_FOR(count * k >= LONG, for (int64_t i = 0; i < count; i++) take_row(packed, k, ids[i], y + i * k);)
    return 1;
}

#ifdef WITH_AVX512
static inline void store(bf16 *y, int64_t width, const vec16 *sums, const float *bias) {
    for (int v = 0; v < VECTORS && 16 * v < width; v++) {
        mask16 mask = first_lanes(width - 16 * v);
        vec16 sum = sums[v];
        if (bias) sum = sum + load_floats(bias + 16 * v, mask);
        store_lanes(y + 16 * v, mask, sum);
    }
}

// y[r, 0..width) = x[r, :] . block + bias, for R rows. AHEAD cache lines per step of the next block are prefetched.
#define DEFINE_ROWS(R, AHEAD)                                                                                   \
    static void rows##R##_##AHEAD(const bf16 *x, int64_t x_stride, const bf16 *block, int64_t pairs, bf16 *y,   \
                                  int64_t y_stride, int64_t width, const float *bias, const bf16 *ahead) {      \
        __m512 sums[R][VECTORS];                                                                                \
        for (int r = 0; r < R; r++)                                                                             \
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_setzero_ps();                                 \
        for (int64_t p = 0; p < pairs; p++) {                                                                   \
            const bf16 *w = block + p * BLOCK * 2;                                                              \
            if (AHEAD > 0) _mm_prefetch((const char *)(ahead + p * AHEAD * 32), _MM_HINT_T1);                   \
            if (AHEAD > 1) _mm_prefetch((const char *)(ahead + p * AHEAD * 32 + 32), _MM_HINT_T1);              \
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32);           \
            __m512bh w2 = (__m512bh)_mm512_loadu_si512(w + 64), w3 = (__m512bh)_mm512_loadu_si512(w + 96);      \
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                               \
                __m512bh a = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(x + r * x_stride + 2 * p));         \
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, a);                                               \
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, a);                                               \
                sums[r][2] = _mm512_dpbf16_ps(sums[r][2], w2, a);                                               \
                sums[r][3] = _mm512_dpbf16_ps(sums[r][3], w3, a);                                               \
            }                                                                                                   \
        }                                                                                                       \
        for (int r = 0; r < R; r++) store(y + r * y_stride, width, sums[r], bias);                              \
    }
#define DEFINE_AHEAD(R) DEFINE_ROWS(R, 0) DEFINE_ROWS(R, 1) DEFINE_ROWS(R, 2)
DEFINE_AHEAD(1) DEFINE_AHEAD(2) DEFINE_AHEAD(3) DEFINE_AHEAD(4) DEFINE_AHEAD(5) DEFINE_AHEAD(6)

typedef void (*some_rows)(const bf16 *, int64_t, const bf16 *, int64_t, bf16 *, int64_t, int64_t, const float *,
                          const bf16 *);
#define BY_AHEAD(R) {rows##R##_0, rows##R##_1, rows##R##_2}
static const some_rows by_rows[TILE][3] = {BY_AHEAD(1), BY_AHEAD(2), BY_AHEAD(3), BY_AHEAD(4), BY_AHEAD(5), BY_AHEAD(6)};

// `next`: the block that the same thread reads after this one, or NULL. It is prefetched while this one, by then in the
// second-level cache, is multiplied by more rows; a block that is read once is left to the hardware prefetcher.
static void vector_product(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *block, int64_t k, bf16 *y,
                           int64_t y_stride, int64_t width, const float *bias, const bf16 *next) {
    const int64_t pairs = k / 2, lines = rows <= 3 * TILE ? 2 : 1;
    int64_t missing = rows > TILE && next ? pairs * VECTORS : 0;  // lines of the next block
    for (int64_t r = 0; r < rows;) {
        int64_t left = rows - r, count = left == 7 || left == 8 ? 4 : left > TILE ? TILE : left;
        int64_t ahead = missing >= pairs * lines ? lines : 0;
        by_rows[count - 1][ahead](x + r * x_stride, x_stride, block, pairs, y + r * y_stride, y_stride, width, bias, next);
        if (ahead) next += pairs * ahead * 32;
        missing -= pairs * ahead;
        r += count;
    }
}
#else
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));

#define PAIRS 64  // of one pass: their weights fit the first-level cache
#define PANEL 60  // rows that read the weights of a pass: their sums fit the first-level cache

// sums[r, 0..V * WIDTH) += x[r, :] . outputs of a block that begin at `block`, for R rows and V vectors. As many bytes
// as it reads are prefetched from `ahead`. The first terms of a pair are added for all rows before the second ones, so
// that sums and the weights of one term fill the registers. The compiler, which would mix them, keeps this order only
// where it does not know that both addresses are neighbours.
#define KEEP_SUMS __attribute__((optimize("ira-loop-pressure")))  // in registers
#define ADD_TERMS(R, V, WEIGHT)                                                                  \
    {                                                                                            \
        part weights[V];                                                                         \
        _Pragma("GCC unroll 8") for (int v = 0; v < V; v++) {                                    \
            bits both;                                                                           \
            memcpy(&both, block + v * WIDTH * 2, sizeof both);                                   \
            weights[v] = (part)(WEIGHT);                                                         \
        }                                                                                        \
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                    \
            const float term = x[r * 2 * PAIRS];                                                 \
            _Pragma("GCC unroll 8") for (int v = 0; v < V; v++) made[r][v] += weights[v] * term; \
        }                                                                                        \
    }
#define DEFINE_ROWS(R, V)                                                                                \
    KEEP_SUMS static void rows##R(const float *x, const bf16 *block, int64_t pairs, float *sums,         \
                                  const bf16 *ahead) {                                                   \
        const bits high = (bits){0} + 0xffff0000;                                                        \
        part made[R][V];                                                                                 \
        for (int r = 0; r < R; r++)                                                                      \
            for (int v = 0; v < V; v++) made[r][v] = *(const part *)(sums + r * BLOCK + v * WIDTH);      \
        for (int64_t p = 0; p < pairs; p++, ahead += 2 * V * WIDTH) {                                    \
            for (int line = 0; line < 2 * V * WIDTH; line += 32) __builtin_prefetch(ahead + line, 0, 2); \
            ADD_TERMS(R, V, both << 16)                                                                  \
            x++;                                                                                         \
            __asm__ volatile("" : "+r"(x), "+r"(block));                                                 \
            ADD_TERMS(R, V, both & high)                                                                 \
            x++, block += 2 * BLOCK;                                                                     \
        }                                                                                                \
        for (int r = 0; r < R; r++)                                                                      \
            for (int v = 0; v < V; v++) *(part *)(sums + r * BLOCK + v * WIDTH) = made[r][v];            \
    }
#if WIDTH == 16
#define GROUP TILE
#define OUTPUTS {64, 64, 64, 64, 32, 32}
DEFINE_ROWS(1, 4) DEFINE_ROWS(2, 4) DEFINE_ROWS(3, 4) DEFINE_ROWS(4, 4) DEFINE_ROWS(5, 2) DEFINE_ROWS(6, 2)
#else
#define GROUP 5  // rows of a group where more follow: measured to be faster than 4 and 6
#define OUTPUTS {64, 32, 16, 16, 16, 16}  // of one pass, by rows: sums and weights fill the 16 registers
DEFINE_ROWS(1, 8) DEFINE_ROWS(2, 4) DEFINE_ROWS(3, 2) DEFINE_ROWS(4, 2) DEFINE_ROWS(5, 2) DEFINE_ROWS(6, 2)
#endif

typedef void (*some_rows)(const float *, const bf16 *, int64_t, float *, const bf16 *);
static const some_rows by_rows[TILE] = {rows1, rows2, rows3, rows4, rows5, rows6};
static const int64_t outputs_of_pass[TILE] = OUTPUTS;

// sums[0..rows, :] += x . `pairs` pairs of a block
static void add_pairs(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *block, int64_t pairs, int64_t width,
                      float (*sums)[BLOCK], const bf16 *ahead) {
    _Alignas(64) float wide[TILE][2 * PAIRS];
    for (int64_t r = 0; r < rows;) {
        int64_t left = rows - r, count = left == 7 || left == 8 ? 4 : left > TILE ? GROUP : left;
        const int64_t outputs = outputs_of_pass[count - 1];
        for (int64_t i = 0; i < count; i++)
            for (int64_t c = 0; c < 2 * pairs; c++) wide[i][c] = to_float(x[(r + i) * x_stride + c]);
        for (int64_t at = 0; at < width; at += outputs)
            by_rows[count - 1](wide[0], block + at * 2, pairs, sums[r] + at, r ? block : ahead + at * 2 * pairs);
        r += count;
    }
}

static void vector_product(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *block, int64_t k, bf16 *y,
                           int64_t y_stride, int64_t width, const float *bias, const bf16 *next) {
    for (int64_t r = 0; r < rows; r += PANEL) {
        const int64_t count = rows - r < PANEL ? rows - r : PANEL;
        _Alignas(64) float sums[PANEL][BLOCK];
        memset(sums, 0, count * sizeof *sums);
        for (int64_t p = 0; p < k / 2; p += PAIRS) {
            const int64_t pairs = k / 2 - p < PAIRS ? k / 2 - p : PAIRS;
            const bf16 *now = block + p * BLOCK * 2, *ahead = p + pairs < k / 2 ? now + pairs * BLOCK * 2 : next;
            add_pairs(x + r * x_stride + 2 * p, count, x_stride, now, pairs, width, sums, ahead ? ahead : now);
        }
        for (int64_t i = 0; i < count; i++)
            for (int64_t c = 0; c < width; c += WIDTH) {
                part sum = *(const part *)(sums[i] + c);
                if (bias) sum += load_partial_floats(bias + c, width - c);
                store_partial(y + (r + i) * y_stride + c, sum, width - c);
            }
    }
}
#endif

static int has_tiles;

#ifdef WITH_TILES
#define TILE_ROWS 16  // of a tile, and pairs of terms per instruction
enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };  // of arch_prctl
enum { SUMS, INPUT = VECTORS, WEIGHT, LAST_INPUT, LAST_WEIGHT };  // tiles
static _Thread_local int64_t tiles_are_for;

// Request the permission to use tiles, for every thread of the process. Returns whether products use tiles.
int prepare(void) {
    has_tiles = syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
    return has_tiles;
}

// Configure this thread's tiles: sums and inputs have `rows` rows; `last` pairs of terms follow the whole tiles.
static void shape_tiles(int64_t rows, int64_t last) {
    if (tiles_are_for == rows * 64 + last) return;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int tile = SUMS; tile <= LAST_WEIGHT; tile++) {
        shape.bytes[tile] = tile == LAST_INPUT ? 4 * (last ? last : 1) : 64;
        shape.rows[tile] = tile == WEIGHT ? TILE_ROWS : tile == LAST_WEIGHT ? (last ? last : 1) : rows;
    }
    _tile_loadconfig(&shape);
    tiles_are_for = rows * 64 + last;
}

// Release this thread's tiles after its products: tiles in use are saved at every context switch.
static void leave_tiles(void) {
    if (tiles_are_for) _tile_release();
    tiles_are_for = 0;
}

#define SUM_UP(INPUT_TILE, WEIGHT_TILE)                                                      \
    _tile_loadd(INPUT_TILE, x + r * x_stride + 2 * p, 2 * x_stride);                         \
    _tile_loadd(WEIGHT_TILE, block + p * BLOCK * 2, 4 * BLOCK);                              \
    _tile_dpbf16ps(0, INPUT_TILE, WEIGHT_TILE);                                              \
    _tile_loadd(WEIGHT_TILE, block + p * BLOCK * 2 + 32, 4 * BLOCK);                         \
    _tile_dpbf16ps(1, INPUT_TILE, WEIGHT_TILE);                                              \
    _tile_loadd(WEIGHT_TILE, block + p * BLOCK * 2 + 64, 4 * BLOCK);                         \
    _tile_dpbf16ps(2, INPUT_TILE, WEIGHT_TILE);                                              \
    _tile_loadd(WEIGHT_TILE, block + p * BLOCK * 2 + 96, 4 * BLOCK);                         \
    _tile_dpbf16ps(3, INPUT_TILE, WEIGHT_TILE);

static void tile_product(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *block, int64_t k, bf16 *y,
                         int64_t y_stride, int64_t width, const float *bias) {
    const int64_t last = k / 2 % TILE_ROWS, whole = k / 2 - last;
    _Alignas(64) float sums[VECTORS][TILE_ROWS][16];
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        const int64_t count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
        int64_t p = 0;
        shape_tiles(count, last);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (; p < whole; p += TILE_ROWS) {
            SUM_UP(4, 5)
        }
        if (last) {
            SUM_UP(6, 7)
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int64_t i = 0; i < count; i++) {
            __m512 row[VECTORS];
            for (int v = 0; v < VECTORS; v++) row[v] = _mm512_load_ps(sums[v][i]);
            store(y + (r + i) * y_stride, width, row, bias);
        }
    }
}
#else
int prepare(void) { return 0; }  // no tiles
static void leave_tiles(void) {}
static void tile_product(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *block, int64_t k, bf16 *y,
                         int64_t y_stride, int64_t width, const float *bias) {}
#endif

static inline void block_product(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *block, int64_t k, bf16 *y,
                                 int64_t y_stride, int64_t width, const float *bias, const bf16 *next) {
    if (has_tiles)
        tile_product(x, rows, x_stride, block, k, y, y_stride, width, bias);
    else
        vector_product(x, rows, x_stride, block, k, y, y_stride, width, bias, next);
}

// This thread's part of `linear`.
static void linear_part(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *packed, int64_t n, int64_t k,
                        const float *bias, bf16 *y) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks; b++) {
        block_product(x, rows, x_stride, packed + b * BLOCK * k, k, y + b * BLOCK, n, width_of(b, n),
                      bias ? bias + b * BLOCK : 0, b + 1 < blocks ? packed + (b + 1) * BLOCK * k : 0);
    }
    leave_tiles();
}

// x: [rows, k], packed [n, k], bias: [n] or 0 -> y: [rows, n]
void linear(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *packed, int64_t n, int64_t k, const float *bias,
            bf16 *y, int threads) {
    PARALLEL(rows * n * k >= ALONE, linear_part(x, rows, x_stride, packed, n, k, bias, y);)
}

// This thread's part of `plain_linear`.
static void plain_linear_part(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *weight, int64_t n, int64_t k,
                              const float *bias, bf16 *y) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    // a block fits the second-level cache: packing it takes little longer than reading it
    bf16 *block = aligned_alloc(64, BLOCK * k * sizeof *block);
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks; b++) {
        pack_block(weight + b * BLOCK * k, width_of(b, n), k, block);
        block_product(x, rows, x_stride, block, k, y + b * BLOCK, n, width_of(b, n), bias ? bias + b * BLOCK : 0, 0);
    }
    leave_tiles();
    free(block);
}

// x: [rows, k], weight: [n, k] in its own order, bias: [n] or 0 -> y: [rows, n], with the bits of `linear`
void plain_linear(const bf16 *x, int64_t rows, int64_t x_stride, const bf16 *weight, int64_t n, int64_t k,
                  const float *bias, bf16 *y, int threads) {
    PARALLEL(rows * n * k >= ALONE, plain_linear_part(x, rows, x_stride, weight, n, k, bias, y);)
}

// This thread's part of hidden = act(gate x) * up x.
static void gated_part(const bf16 *x, int64_t rows, int64_t k, const bf16 *gate, const bf16 *up, int64_t n, int is_tanh,
                       bf16 *hidden) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    bf16 gates[MLP_ROWS * BLOCK], ups[MLP_ROWS * BLOCK];
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks; b++) {
        int64_t width = n - b * BLOCK > BLOCK ? BLOCK : n - b * BLOCK;
        for (int64_t r = 0; r < rows; r += MLP_ROWS) {
            const bf16 *its_gate = gate + b * BLOCK * k, *its_up = up + b * BLOCK * k;
            int64_t count = rows - r > MLP_ROWS ? MLP_ROWS : rows - r;
            const bf16 *next = r + count < rows ? its_gate : b + 1 < blocks ? its_gate + BLOCK * k : 0;
            block_product(x + r * k, count, k, its_gate, k, gates, BLOCK, BLOCK, 0, its_up);
            block_product(x + r * k, count, k, its_up, k, ups, BLOCK, BLOCK, 0, next);
            for (int64_t i = 0; i < count; i++)
                gate_row(gates + i * BLOCK, ups + i * BLOCK, hidden + (r + i) * n + b * BLOCK, width, is_tanh);
        }
    }
    leave_tiles();
}

// y = down(act(gate x) * up x); x: [rows, k], gate and up packed [n, k], down packed [m, n], hidden: [rows, n] scratch
void gated_mlp(const bf16 *x, int64_t rows, int64_t k, const bf16 *gate, const bf16 *up, int64_t n, const bf16 *down,
               int64_t m, int is_tanh, bf16 *hidden, bf16 *y, int threads) {
    PARALLEL(rows * n * k >= ALONE, gated_part(x, rows, k, gate, up, n, is_tanh, hidden);)
    linear(hidden, rows, n, down, m, n, 0, y, threads);
}

static void multiply(const bf16 *x, int64_t rows, int64_t k, const void *packed, int64_t n, const float *bias,
                     void *spare, bf16 *y, int threads) {
    linear(x, rows, k, packed, n, k, bias, y, threads);
}

static void plain_mlp(const DecoderLayer *layer, const bf16 *x, int64_t rows, bf16 *hidden, void *spare, bf16 *y,
                      int threads) {
    gated_mlp(x, rows, layer->width, layer->gate, layer->up, layer->num_hidden, layer->down, layer->width,
              layer->is_tanh, hidden, y, threads);
}
