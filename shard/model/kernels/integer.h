// Matrix products of weights in 8 or 4 bits and activations that are rounded to 8 bits, on any CPU.
//
// Each 32 activations of a row have a scale. Products with one scale on each side are summed as integers, which is exact
// in any order; what follows in float32 has one order, and no product is fused with a sum. So every processor computes
// the same bits, for any number of rows.
//
// A panel is OUTPUTS rows of the matrix. Of each group it has the scales, the minimums if there are any, and the weights:
// a 32-bit word per row for each four terms of a sum in 8 bits, and for each eight in 4 bits, of which the first four are
// the low halves of its bytes. So a product of one row reads memory in one sequence.
#pragma once
#include <math.h>
#include <omp.h>
#include "system/simd.h"
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// Bytes of a vector, and what adds products to its sums. With WORDS each sum gets four products of bytes at once, of
// weights without a sign. Without, products exist only as sums of two that saturate at 16 bits. Where the weights of a
// panel differ by less than 32 or 64, as many such sums are added before they are widened as its depth says: the smallest
// weight is stored as 0, and 4 x 2 x 31 x 127 and 2 x 2 x 63 x 127 are less than 2^15. Of other panels the weights have a
// sign, which the activation takes for the product: 2 x 128 x 127 < 2^15.
#ifdef WITHOUT_AVX512  // for tests: as a processor with AVX2 alone
#undef __AVX512BW__
#undef __AVXVNNI__
#endif
#if defined(WITHOUT_INSTRUCTIONS)  // for tests: vectors of so many bytes
#define VECTOR WITHOUT_INSTRUCTIONS
#define WORDS
#elif defined(__AVX512BW__)
#define VECTOR 64
#define I512(x) (__m512i)(x)
#define ADD_WORDS(sum, weights, x) (ints)_mm512_dpbusd_epi32(I512(sum), I512(weights), I512(x))
#define ADD_PAIRS(a, b) (ints)_mm512_madd_epi16(I512(a), I512(b))
#define ADD_BYTES(a, b) (shorts)_mm512_maddubs_epi16(I512(a), I512(b))
#define ABSOLUTE(a) (words)_mm512_abs_epi8(I512(a))
#define SIGNED_BY(a, b) \
    (words)_mm512_mask_sub_epi8(I512(a), _mm512_movepi8_mask(I512(b)), _mm512_setzero_si512(), I512(a))
#ifdef __AVX512VNNI__
#define WORDS
#endif
#elif defined(__AVX2__)
#define VECTOR 32
#define I256(x) (__m256i)(x)
#define ADD_WORDS(sum, weights, x) (ints)_mm256_dpbusd_avx_epi32(I256(sum), I256(weights), I256(x))
#define ADD_PAIRS(a, b) (ints)_mm256_madd_epi16(I256(a), I256(b))
#define ADD_BYTES(a, b) (shorts)_mm256_maddubs_epi16(I256(a), I256(b))
#define ABSOLUTE(a) (words)_mm256_abs_epi8(I256(a))
#define SIGNED_BY(a, b) (words)_mm256_sign_epi8(I256(a), I256(b))
#ifdef __AVXVNNI__
#define WORDS
#endif
#elif defined(__SSSE3__)
#define VECTOR 16
#define ADD_PAIRS(a, b) (ints)_mm_madd_epi16((__m128i)(a), (__m128i)(b))
#define ADD_BYTES(a, b) (shorts)_mm_maddubs_epi16((__m128i)(a), (__m128i)(b))
#define ABSOLUTE(a) (words)_mm_abs_epi8((__m128i)(a))
#define SIGNED_BY(a, b) (words)_mm_sign_epi8((__m128i)(a), (__m128i)(b))
#else
#define VECTOR 16
#define WORDS
#endif
#if !defined(WORDS) || (defined(__ARM_NEON) && !defined(WITHOUT_INSTRUCTIONS))
#define LEAST 0  // what is subtracted from weights in 8 bits where depth is 0: products are of signed bytes
#else
#define LEAST -128
#endif
enum { LOW = 4, MIDDLE = 2 };  // depths
// Whether there is code for each depth. With large vectors it would take long to compile.
#if defined(WORDS) || VECTOR == 64
#define HAS_KINDS 0
#else
#define HAS_KINDS 1
#endif

#define LANES (VECTOR / 4)
#if VECTOR == 64  // 32 registers hold the sums and totals of a tile
#define OUTPUTS 32
#define TILE 6  // rows of one pass
#else
#define OUTPUTS 16
#define TILE 4
#endif
#define VECTORS (OUTPUTS / LANES)
#define BLOCK 32            // activations with one scale; in 4 bits their products fit 16 bits: 16 x 15 x 127 < 2^15
#define FEW 4               // rows that are rounded before threads start
#define ALONE (1 << 18)     // multiplications below which a second thread costs more than it saves
#define SMALLEST 0x1p-100f  // blocks of smaller values count as zeros

typedef int32_t ints __attribute__((vector_size(VECTOR), aligned(4)));
typedef uint32_t words __attribute__((vector_size(VECTOR), aligned(4)));
typedef int16_t shorts __attribute__((vector_size(VECTOR), aligned(4)));
typedef float floats __attribute__((vector_size(VECTOR), aligned(4)));

typedef struct {
    int64_t num_out, num_in, group, bits;  // group: 16, a multiple of BLOCK, or num_in
    int64_t has_halves;                    // whether scales and minimums are in half precision
    int64_t has_minimums;                  // which are added to the weights of a group
    uint8_t *packed;                       // [panels, groups] of scales [OUTPUTS], minimums [OUTPUTS], weights
    int8_t *least;                         // [panels]: what is added to each stored weight
    uint8_t *depths;                       // [panels]
    const float *bias;                     // [num_out] or NULL
} Matrix;

// A row of activations, rounded. A part is the terms with one scale of activations and one of weights.
typedef struct {
    float *scales;    // [blocks]
    float *offsets;   // [groups]: sums of rounded activations
    int32_t *sums;    // [parts]: the sum of a part's integers
    int8_t *values;   // [blocks, BLOCK]
} Row;

int64_t outputs_of_a_panel(void) { return OUTPUTS; }

// Whether scales may be in half precision: vectors of them are widened by one instruction.
#if VECTOR == 32 && defined(__F16C__) && !defined(WITHOUT_INSTRUCTIONS)
#define WIDEN_HALVES(p) (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
int64_t reads_halves(void) { return 1; }
#elif VECTOR == 64 && !defined(WITHOUT_INSTRUCTIONS)
#define WIDEN_HALVES(p) (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
int64_t reads_halves(void) { return 1; }
#else
#define WIDEN_HALVES(p) (floats){0}
int64_t reads_halves(void) { return 0; }
#endif

static inline int64_t num_blocks(int64_t num_in) { return (num_in + BLOCK - 1) / BLOCK; }
static inline int64_t num_groups(const Matrix *m) { return m->num_in / m->group; }
static inline int part_size(const Matrix *m) { return m->group == BLOCK / 2 ? BLOCK / 2 : BLOCK; }
static inline int64_t num_parts(const Matrix *m) { return num_blocks(m->num_in) * (BLOCK / part_size(m)); }

static inline int64_t values_at(const Matrix *m) {
    return (4 * (num_blocks(m->num_in) + num_groups(m) + num_parts(m)) + 63) / 64 * 64;
}

static inline Row row_at(const Matrix *m, const uint8_t *place) {
    float *scales = (float *)place, *offsets = scales + num_blocks(m->num_in);
    return (Row){scales, offsets, (int32_t *)(offsets + num_groups(m)), (int8_t *)place + values_at(m)};
}

static inline int64_t scale_size(const Matrix *m) { return m->has_halves ? 2 : 4; }
static inline int64_t parts_of_a_group(const Matrix *m) { return (m->group + part_size(m) - 1) / part_size(m); }

// Bytes before the weights of a group.
static inline int64_t scales_bytes(const Matrix *m) { return OUTPUTS * scale_size(m) * (m->has_minimums ? 2 : 1); }

static inline int64_t group_bytes(const Matrix *m) {
    return scales_bytes(m) + parts_of_a_group(m) * part_size(m) * m->bits / 8 * OUTPUTS;
}

int64_t panel_bytes(const Matrix *m) { return num_groups(m) * group_bytes(m); }

// Bytes of a row of activations
int64_t row_bytes(const Matrix *m) { return values_at(m) + num_blocks(m->num_in) * BLOCK; }

// How the weights of a panel are stored: without `*least`. rows: `count` rows of weights. Returns the depth.
static int depth_of(const int8_t *rows, int64_t count, int64_t num_in, int64_t group, int8_t *least) {
    *least = LEAST;
#if HAS_KINDS
    int low = 127, high = -128;
    for (int64_t i = 0; i < count * num_in; i++) {
        low = rows[i] < low ? rows[i] : low;
        high = rows[i] > high ? rows[i] : high;
    }
    if (group > BLOCK || high - low > 63) return 0;
    *least = low;
    return high - low > 31 || group < BLOCK ? MIDDLE : LOW;
#else
    return 0;
#endif
}

// values: of a group of `count` rows, `groups` apart, each of `size` bytes -> [OUTPUTS], zeros beyond count
static void pack_scales(const uint8_t *values, int64_t count, int64_t groups, int64_t size, uint8_t *packed) {
    memset(packed, 0, OUTPUTS * size);
    for (int64_t c = 0; c < count; c++) memcpy(packed + c * size, values + c * groups * size, size);
}

// rows: `count` rows of weights -> the words of a group whose first term is `first`. `taken`: what 8 bits are stored
// without; `filler`: what stands for zero.
static void pack_words(const Matrix *m, const int8_t *rows, int64_t count, int64_t first, int8_t taken, uint8_t filler,
                       uint8_t *packed) {
    const int64_t num_in = m->num_in, terms = m->bits == 8 ? 4 : 8, end = first + parts_of_a_group(m) * part_size(m);
    for (int64_t p = first; p < end; p += terms)
        for (int64_t c = 0; c < OUTPUTS; c++)
            for (int64_t k = p; k < p + 4; k++) {
                const int8_t *row = rows + c * num_in;
                uint8_t byte = c < count && k < num_in ? (uint8_t)(row[k] - taken) : filler;
                if (m->bits == 4) byte |= (c < count && k + 4 < num_in ? (uint8_t)row[k + 4] : filler) << 4;
                *packed++ = byte;
            }
}

// Pack `count` rows of the matrix from `start` on, which begins a panel, in whole panels. weights: [count, num_in], of 8
// bits, or of 4 bits without `of_four`; scales, minimums: [count, groups], in half precision where the matrix has it.
void pack(const Matrix *m, int64_t start, int64_t count, int64_t of_four, const int8_t *weights, const uint8_t *scales,
          const uint8_t *minimums) {
    const int64_t groups = num_groups(m), size = scale_size(m);
#pragma omp parallel for
    for (int64_t first = 0; first < count; first += OUTPUTS) {
        const int64_t panel = (start + first) / OUTPUTS, width = count - first < OUTPUTS ? count - first : OUTPUTS;
        const int8_t *rows = weights + first * m->num_in;
        int8_t *least = m->least + panel;
        *least = of_four;
        m->depths[panel] = m->bits == 8 ? depth_of(rows, width, m->num_in, m->group, least) : 0;
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *place = m->packed + panel * panel_bytes(m) + g * group_bytes(m);
            pack_scales(scales + (first * groups + g) * size, width, groups, size, place);
            if (minimums) pack_scales(minimums + (first * groups + g) * size, width, groups, size, place + OUTPUTS * size);
            pack_words(m, rows, width, g * m->group, m->bits == 8 ? *least : 0, -*least, place + scales_bytes(m));
        }
    }
}

// Compute x here: nothing that follows is computed together with it. gcc adds up integers in an order of its own, with
// more products at once than there are registers.
#if defined(__aarch64__) && VECTOR == 16
#define IN_ORDER(x) __asm__("" : "+w"(x))
#elif VECTOR == 16 || (VECTOR == 32 && defined(__AVX__)) || defined(__AVX512F__)
#define IN_ORDER(x) __asm__("" : "+v"(x))
#else
#define IN_ORDER(x) __asm__("" : "+m"(x))
#endif

// a * b, rounded: the compiler cannot fuse it with a sum
INLINE floats times(floats a, floats b) {
    floats made = a * b;
    IN_ORDER(made);
    return made;
}

// A vector of a panel's scales or minimums.
INLINE floats load_scales(const Matrix *m, const uint8_t *scales, int v) {
    return m->has_halves ? WIDEN_HALVES((const uint16_t *)scales + v * LANES) : ((const floats *)scales)[v];
}

INLINE float times_one(float a, float b) { return times(a - (floats){0}, b - (floats){0})[0]; }

INLINE floats splat(float x) { return x - (floats){0}; }

INLINE words splat_word(const void *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word - (words){0};
}

#ifdef WORDS
// Add to each sum the products of four weights and four activations.
INLINE ints add_words(ints sum, words weights, words x) {
#if defined(WITHOUT_INSTRUCTIONS) || !(defined(__x86_64__) || defined(__ARM_NEON))
    for (int shift = 0; shift < 32; shift += 8)
        sum += (ints)(weights >> shift & 255) * ((ints)(x << (24 - shift)) >> 24);
    return sum;
#elif defined(__ARM_FEATURE_DOTPROD)
    return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)x);
#elif defined(__ARM_NEON)
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)weights), vget_low_s8((int8x16_t)x));
    const int16x8_t high = vmull_high_s8((int8x16_t)weights, (int8x16_t)x);
    return sum + (ints)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
    return ADD_WORDS(sum, weights, x);
#endif
}
#endif

// sums[r][v] += products of `count` words of weights in 8 bits, from `w` on, with the rows from `x` on.
INLINE void sum_8(const int rows, const int depth, const uint8_t *w, const int8_t *x, int64_t stride, int64_t count,
                  ints sums[TILE][VECTORS]) {
#ifdef WORDS
    for (int64_t p = 0; p < count; p++, w += 4 * OUTPUTS) {
        words weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = *(const words *)(w + v * VECTOR);
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
            const words four = splat_word(x + r * stride + 4 * p);
            for (int v = 0; v < VECTORS; v++) {
                sums[r][v] = add_words(sums[r][v], weights[v], four);
                IN_ORDER(sums[r][v]);
            }
        }
    }
#else
    for (int64_t p = 0; p < count && !depth; p++, w += 4 * OUTPUTS) {
        words weights[VECTORS], absolute[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            weights[v] = *(const words *)(w + v * VECTOR);
            absolute[v] = ABSOLUTE(weights[v]);
        }
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
            const words four = splat_word(x + r * stride + 4 * p);
            for (int v = 0; v < VECTORS; v++) {
                sums[r][v] += ADD_PAIRS(ADD_BYTES(absolute[v], SIGNED_BY(four, weights[v])), (shorts){0} + 1);
                IN_ORDER(sums[r][v]);
            }
        }
    }
    _Pragma("GCC unroll 4") for (int64_t p = 0; p < count && depth; p += depth) {
        shorts pairs[TILE][VECTORS];
        _Pragma("GCC unroll 4") for (int i = 0; i < depth; i++, w += 4 * OUTPUTS) {
            words weights[VECTORS];
            for (int v = 0; v < VECTORS; v++) weights[v] = *(const words *)(w + v * VECTOR);
            _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
                const words four = splat_word(x + r * stride + 4 * (p + i));
                for (int v = 0; v < VECTORS; v++) {
                    const shorts products = ADD_BYTES(weights[v], four);
                    pairs[r][v] = i ? pairs[r][v] + products : products;
                    IN_ORDER(pairs[r][v]);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) {
                sums[r][v] += ADD_PAIRS(pairs[r][v], (shorts){0} + 1);
                IN_ORDER(sums[r][v]);
            }
    }
#endif
}

// The same for weights in 4 bits, of at most BLOCK terms.
INLINE void sum_4(const int rows, const uint8_t *w, const int8_t *x, int64_t stride, int64_t count,
                  ints sums[TILE][VECTORS]) {
#ifndef WORDS
    shorts pairs[TILE][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) pairs[r][v] = (shorts){0};
#endif
    _Pragma("GCC unroll 4") for (int64_t p = 0; p < count; p++, w += 4 * OUTPUTS) {
        _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
            words weights[VECTORS];
            for (int v = 0; v < VECTORS; v++) weights[v] = *(const words *)(w + v * VECTOR) >> 4 * half & 0x0f0f0f0f;
            _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
                const words four = splat_word(x + r * stride + 8 * p + 4 * half);
                for (int v = 0; v < VECTORS; v++) {
#ifdef WORDS
                    sums[r][v] = add_words(sums[r][v], weights[v], four);
                    IN_ORDER(sums[r][v]);
#else
                    pairs[r][v] += ADD_BYTES(weights[v], four);
                    IN_ORDER(pairs[r][v]);
#endif
                }
            }
        }
    }
#ifndef WORDS
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] += ADD_PAIRS(pairs[r][v], (shorts){0} + 1);
#endif
}

// y[r, 0..width) of one panel. Of each group: the integer sums of its parts, each times the scale of its activations;
// then times the scale of the weights, plus the sum of activations times the minimum. Last the bias. `is_part`: whether a
// group is one part; `has_least`: whether something is added to stored weights.
INLINE void panel_rows(const int rows, const int bits, const int depth, const int part, const int is_part,
                       const int has_least, const Matrix *m, int64_t panel, const uint8_t *x, int64_t stride,
                       element *y) {
    const int64_t groups = num_groups(m), parts = is_part ? 1 : parts_of_a_group(m);
    const int64_t of_scales = scales_bytes(m), of_weights = parts * part * bits / 8 * OUTPUTS;
    const uint8_t *w = m->packed + panel * groups * (of_scales + of_weights);
    const Row first_row = row_at(m, x);
    const int8_t *values = first_row.values;
    const int32_t least = m->least[panel];
    floats totals[TILE][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) totals[r][v] = (floats){0};
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *scales_of_group = w, *minimums_of_group = w + OUTPUTS * scale_size(m);
        w += of_scales;
        floats of_group[TILE][VECTORS];
        for (int r = 0; r < rows && !is_part; r++)
            for (int v = 0; v < VECTORS; v++) of_group[r][v] = (floats){0};
        for (int64_t p = g * parts; p < (g + 1) * parts; p++) {
            ints sums[TILE][VECTORS];
            for (int r = 0; r < rows; r++) {
                const int32_t *sum = (const int32_t *)((const uint8_t *)(first_row.sums + p) + r * stride);
                for (int v = 0; v < VECTORS; v++) sums[r][v] = (has_least ? least * *sum : 0) - (ints){0};
            }
            if (bits == 8)
                sum_8(rows, depth, w, values, stride, part / 4, sums);
            else
                sum_4(rows, w, values, stride, part / 8, sums);
            w += part * bits / 8 * OUTPUTS;
            values += part;
            for (int r = 0; r < rows; r++) {
                const float *scale = first_row.scales + p * part / BLOCK;
                const floats scales = splat(*(const float *)((const uint8_t *)scale + r * stride));
                for (int v = 0; v < VECTORS; v++) {
                    const floats of_part = times(scales, __builtin_convertvector(sums[r][v], floats));
                    of_group[r][v] = is_part ? of_part : of_group[r][v] + of_part;
                }
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            const floats scales = load_scales(m, scales_of_group, v);
            for (int r = 0; r < rows; r++) totals[r][v] += times(scales, of_group[r][v]);
        }
        if (m->has_minimums)
            for (int v = 0; v < VECTORS; v++) {
                const floats minimums = load_scales(m, minimums_of_group, v);
                for (int r = 0; r < rows; r++) {
                    const float offset = *(const float *)((const uint8_t *)(first_row.offsets + g) + r * stride);
                    totals[r][v] += times(minimums, splat(offset));
                }
            }
    }
    const int64_t first = panel * OUTPUTS, width = m->num_out - first < OUTPUTS ? m->num_out - first : OUTPUTS;
    float made[OUTPUTS];
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < VECTORS; v++) *(floats *)(made + v * LANES) = totals[r][v];
        if (m->bias)
            for (int64_t c = 0; c < width; c++) made[c] += m->bias[first + c];
        for (int64_t c = 0; c < width; c++) y[r * m->num_out + first + c] = from_float(made[c]);
    }
}

#define PANEL(...) panel_rows(__VA_ARGS__, m, panel, x, stride, y)
#define DEFINE_ROWS(R)                                                                                       \
    static void rows_##R(const Matrix *m, int64_t panel, const uint8_t *x, int64_t stride, element *y) {     \
        const int is_half = part_size(m) != BLOCK, is_part = m->group == BLOCK;                              \
        const int depth = HAS_KINDS ? m->depths[panel] : 0;                                                  \
        if (m->bits == 8 && is_half && depth)                                                                \
            PANEL(R, 8, MIDDLE, BLOCK / 2, 1, 1);                                                            \
        else if (m->bits == 8 && is_half)                                                                    \
            PANEL(R, 8, 0, BLOCK / 2, 1, LEAST != 0);                                                        \
        else if (depth == LOW)                                                                               \
            PANEL(R, 8, LOW, BLOCK, 1, 1);                                                                   \
        else if (depth == MIDDLE)                                                                            \
            PANEL(R, 8, MIDDLE, BLOCK, 1, 1);                                                                \
        else if (m->bits == 8 && is_part)                                                                    \
            PANEL(R, 8, 0, BLOCK, 1, LEAST != 0);                                                            \
        else if (m->bits == 8)                                                                               \
            PANEL(R, 8, 0, BLOCK, 0, LEAST != 0);                                                            \
        else if (is_half)                                                                                    \
            PANEL(R, 4, 0, BLOCK / 2, 1, 1);                                                                 \
        else if (!is_part)                                                                                   \
            PANEL(R, 4, 0, BLOCK, 0, 1);                                                                     \
        else if (m->least[panel])                                                                            \
            PANEL(R, 4, 0, BLOCK, 1, 1);                                                                     \
        else                                                                                                 \
            PANEL(R, 4, 0, BLOCK, 1, 0);                                                                     \
    }
DEFINE_ROWS(1) DEFINE_ROWS(2) DEFINE_ROWS(3) DEFINE_ROWS(4)
typedef void some_rows(const Matrix *, int64_t, const uint8_t *, int64_t, element *);
#if TILE == 6
DEFINE_ROWS(5) DEFINE_ROWS(6)
static some_rows *const by_rows[TILE] = {rows_1, rows_2, rows_3, rows_4, rows_5, rows_6};
#else
static some_rows *const by_rows[TILE] = {rows_1, rows_2, rows_3, rows_4};
#endif

// Round a block of x by its own largest value, zeros beyond `count`. Returns its scale, NaN without a finite one.
static inline float round_block(const element *x, int64_t count, int8_t *values) {
    float block[BLOCK] = {0};
    uint32_t largest = 0;  // bits of absolute values have their order, NaN above all
    for (int64_t c = 0; c < count; c++) block[c] = to_float(x[c]);
    for (int c = 0; c < BLOCK; c++) {
        uint32_t bits;
        memcpy(&bits, block + c, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float top;
    memcpy(&top, &largest, 4);
    const int is_finite = largest < 0x7f800000, is_zero = top < SMALLEST;
    memset(values, 0, BLOCK);
    if (is_finite && !is_zero) {
        const float inverse = 127.f / top;
        for (int c = 0; c < BLOCK; c++) values[c] = (int8_t)(int32_t)rintf(block[c] * inverse);
    }
    return !is_finite ? NAN : is_zero ? 0 : top / 127.f;
}

// x: [num_in] -> a rounded row
static void round_row(const Matrix *m, const element *x, uint8_t *place) {
    const Row row = row_at(m, place);
    const int64_t k = m->num_in, blocks = num_blocks(k), groups = num_groups(m);
    const int part = part_size(m);
    for (int64_t g = 0; g < groups; g++) row.offsets[g] = 0;
    for (int64_t b = 0; b < blocks; b++) {
        int8_t values[BLOCK];
        row.scales[b] = round_block(x + b * BLOCK, k - b * BLOCK < BLOCK ? k - b * BLOCK : BLOCK, values);
        for (int first = 0; first < BLOCK; first += part) {
            int32_t sum = 0;
            for (int c = first; c < first + part; c++) sum += values[c];
            row.sums[(b * BLOCK + first) / part] = sum;
            const int64_t g = (b * BLOCK + first) / m->group;
            if (g < groups) row.offsets[g] += times_one(row.scales[b], (float)sum);
        }
        memcpy(row.values + b * BLOCK, values, BLOCK);
    }
}

// This thread's part of `multiply_all`; `is_rounded`: the inputs are in `scratch`.
static void multiply_part(const Matrix *const *matrices, int count, const element *x, int64_t rows, int64_t x_stride,
                          int is_rounded, uint8_t *scratch, element *const *ys) {
    const int64_t stride = row_bytes(matrices[0]);
    if (!is_rounded) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) round_row(matrices[0], x + r * x_stride, scratch + r * stride);
    }
    for (int i = 0; i < count; i++) {
        const Matrix *m = matrices[i];
        const int64_t panels = (m->num_out + OUTPUTS - 1) / OUTPUTS;
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < panels; b++)
            for (int64_t r = 0; r < rows; r += TILE) {
                const int64_t some = rows - r < TILE ? rows - r : TILE;
                by_rows[some - 1](m, b, scratch + r * stride, stride, ys[i] + r * m->num_out);
            }
    }
}

// The products of matrices of the same shape of rows with one input. x: [rows, num_in]; scratch: [rows, row_bytes]
// -> ys[i]: [rows, num_out]
static void multiply_all(const Matrix *const *matrices, int count, const element *x, int64_t rows, int64_t x_stride,
                         uint8_t *scratch, element *const *ys, int threads) {
    const Matrix *first = matrices[0];
    const int64_t stride = row_bytes(first);
    const int is_early = rows <= FEW;
    int64_t outputs = 0;
    for (int i = 0; i < count; i++) outputs += matrices[i]->num_out;
    for (int64_t r = 0; is_early && r < rows; r++) round_row(first, x + r * x_stride, scratch + r * stride);
    PARALLEL(rows * outputs * first->num_in >= ALONE,
             multiply_part(matrices, count, x, rows, x_stride, is_early, scratch, ys);)
}
