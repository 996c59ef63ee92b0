// Matrix products in float32 on a CPU, and what stands between the products of an encoder: layer norms and GELU.
//
// Every output element is a sum over its row in order, in pieces of DEPTH terms, whatever the other rows are: its bits do
// not depend on the number of rows, on chunks or on threads.
//
// A packed matrix is [out / BLOCK, in, BLOCK], zeros beyond the last output.
#include <math.h>
#include <omp.h>
#include "system/parts.h"

#define BLOCK (2 * WIDTH)
// Most rows of one pass: their sums, the weights and a broadcast fill the registers.
#if WIDTH == 16
#define ROWS 12
#else
#define ROWS 6
#endif
#define DEPTH 384         // terms of one pass: their weights fit the first-level cache
#define CHUNK (8 * ROWS)  // rows of a task: their inputs fit the second-level cache
#define TASKS 8           // per thread, so that a thread that is interrupted holds up no other one
#define ALONE (1 << 18)   // multiplications below which a second thread costs more than it saves

int block_size(void) { return BLOCK; }

// weight: [n, k] -> packed
void pack(const float *weight, int64_t n, int64_t k, float *packed) {
#pragma omp parallel for
    for (int64_t b = 0; b < (n + BLOCK - 1) / BLOCK; b++)
        for (int64_t p = 0; p < k; p++)
            for (int64_t c = 0; c < BLOCK; c++)
                packed[(b * k + p) * BLOCK + c] = b * BLOCK + c < n ? weight[(b * BLOCK + c) * k + p] : 0;
}

// x (1 + erf(x / sqrt 2)) / 2 by erfc(z) = t q(t) exp(-z z), t = 1 / (1 + p z) (Abramowitz and Stegun, 7.1.26). The
// absolute error of erf is below 2e-7.
INLINE part gelu_part(part x) {
    const part z = (part)((ipart)x & 0x7fffffff) * splat(0.70710678118654752f);
    const part t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * z);
    part q = splat(1.061405429f);
    q = q * t - splat(1.453152027f);
    q = q * t + splat(1.421413741f);
    q = q * t - splat(0.284496736f);
    q = q * t + splat(0.254829592f);
    const part half = splat(0.5f) * x * (q * t * exp_part(-z * z));
    return select_part(x < splat(0.0f), half, x - half);
}

typedef struct {
    const float *x, *packed, *bias;  // bias: [n] or NULL
    float *y;
    int64_t x_stride, n, k;
    int is_gelu;
} Product;

// One pass of R rows: y[r, 0..BLOCK) (+)= x[r, 0..depth) . block; the last pass adds the bias.
#define DEFINE_PASS(R)                                                                                         \
    static void pass##R(const float *x, int64_t x_stride, const float *block, int64_t depth, float *y,        \
                        int64_t y_stride, int is_first, const float *bias, int is_gelu) {                      \
        part low[R], high[R];                                                                                  \
        for (int r = 0; r < R; r++) low[r] = high[r] = splat(0.0f);                                            \
        for (int64_t p = 0; p < depth; p++) {                                                                  \
            const part a = *(const part *)(block + p * BLOCK), b = *(const part *)(block + p * BLOCK + WIDTH); \
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                             \
                const part term = splat(x[r * x_stride + p]);                                                  \
                low[r] += a * term;                                                                            \
                high[r] += b * term;                                                                           \
            }                                                                                                  \
        }                                                                                                      \
        for (int r = 0; r < R; r++) {                                                                          \
            part *out = (part *)(y + r * y_stride), first = low[r], second = high[r];                          \
            if (!is_first) first += out[0], second += out[1];                                                  \
            if (bias) first += *(const part *)bias, second += *(const part *)(bias + WIDTH);                   \
            if (is_gelu) first = gelu_part(first), second = gelu_part(second);                                 \
            out[0] = first, out[1] = second;                                                                   \
        }                                                                                                      \
    }
DEFINE_PASS(1) DEFINE_PASS(2) DEFINE_PASS(3) DEFINE_PASS(4) DEFINE_PASS(5) DEFINE_PASS(6)
#if ROWS == 12
DEFINE_PASS(7) DEFINE_PASS(8) DEFINE_PASS(9) DEFINE_PASS(10) DEFINE_PASS(11) DEFINE_PASS(12)
#endif

typedef void (*pass)(const float *, int64_t, const float *, int64_t, float *, int64_t, int, const float *, int);
static const pass passes[ROWS] = {
    pass1, pass2, pass3, pass4, pass5, pass6,
#if ROWS == 12
    pass7, pass8, pass9, pass10, pass11, pass12,
#endif
};

// Rows [from, to) of one block of outputs, whose last ones may be missing.
static void block_product(const Product *of, int64_t from, int64_t to, int64_t block) {
    const int64_t n = of->n, k = of->k, at = block * BLOCK, width = n - at < BLOCK ? n - at : BLOCK;
    float sums[CHUNK * BLOCK], shifts[BLOCK] = {0};
    const float *bias = of->bias ? of->bias + at : NULL;
    const int is_whole = width == BLOCK;
    float *y = is_whole ? of->y + from * n + at : sums;
    const int64_t stride = is_whole ? n : BLOCK;
    if (bias && !is_whole) bias = memcpy(shifts, bias, width * sizeof(float));
    for (int64_t p = 0; p < k; p += DEPTH) {
        const int64_t depth = k - p < DEPTH ? k - p : DEPTH;
        const int is_last = p + depth == k;
        for (int64_t r = from; r < to; r += ROWS) {
            const int64_t count = to - r < ROWS ? to - r : ROWS;
            passes[count - 1](of->x + r * of->x_stride + p, of->x_stride, of->packed + (block * k + p) * BLOCK, depth,
                              y + (r - from) * stride, stride, p == 0, is_last ? bias : NULL, is_last && of->is_gelu);
        }
    }
    for (int64_t r = from; !is_whole && r < to; r++)
        memcpy(of->y + r * n + at, sums + (r - from) * BLOCK, width * sizeof(float));
}

// This thread's part of a product, whose outputs are divided into `parts`.
static void linear_part(const Product *of, int64_t rows, int64_t parts) {
    const int64_t blocks = (of->n + BLOCK - 1) / BLOCK, chunks = (rows + CHUNK - 1) / CHUNK;
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < chunks * parts; task++) {
        const int64_t from = task / parts * CHUNK, to = from + CHUNK < rows ? from + CHUNK : rows, i = task % parts;
        for (int64_t block = blocks * i / parts; block < blocks * (i + 1) / parts; block++)
            block_product(of, from, to, block);
    }
}

// x: [rows, k], packed [n, k], bias: [n] or NULL -> y: [rows, n], or gelu(y)
void linear(const float *x, int64_t rows, int64_t x_stride, const float *packed, int64_t n, int64_t k,
            const float *bias, float *y, int is_gelu, int threads) {
    if (rows == 0) return;
    const Product of = {x, packed, bias, y, x_stride, n, k, is_gelu};
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, chunks = (rows + CHUNK - 1) / CHUNK;
    if (rows * n * k < ALONE) threads = 1;
    int64_t parts = (TASKS * threads + chunks - 1) / chunks;  // of the blocks
    if (parts > blocks) parts = blocks;
    PARALLEL(1, linear_part(&of, rows, parts);)
}

// x: [rows, n] -> y
void gelu(const float *x, int64_t count, float *y, int threads) {
    PARALLEL_FOR(count >= ALONE,
                 for (int64_t i = 0; i < count / WIDTH; i++) ((part *)y)[i] = gelu_part(((const part *)x)[i]);)
    if (count % WIDTH) {
        float last[WIDTH] = {0};
        const int64_t at = count - count % WIDTH;
        memcpy(last, x + at, count % WIDTH * sizeof(float));
        *(part *)last = gelu_part(*(part *)last);
        memcpy(y + at, last, count % WIDTH * sizeof(float));
    }
}

// The sum of the lanes of two vectors, by halves.
INLINE float total(part a, part b) {
    part x = a + b;
    for (int w = WIDTH / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] += x[i + w];
    return x[0];
}

// A row of `layer_norm`.
static void norm_row(const float *x, const float *added, int64_t width, const float *weight, const float *bias,
                     float epsilon, float *y) {
    const part *in = (const part *)x, *other = (const part *)added;
    part *out = (part *)y;
    part low = splat(0.0f), high = splat(0.0f);
    for (int64_t i = 0; i < width / WIDTH; i += 2) {
        const part a = other ? in[i] + other[i] : in[i], b = other ? in[i + 1] + other[i + 1] : in[i + 1];
        out[i] = a, out[i + 1] = b;
        low += a, high += b;
    }
    const float mean = total(low, high) / width;
    low = high = splat(0.0f);
    for (int64_t i = 0; i < width / WIDTH; i += 2) {
        const part a = out[i] - splat(mean), b = out[i + 1] - splat(mean);
        low += a * a, high += b * b;
    }
    const part scale = splat(1.0f / sqrtf(total(low, high) / width + epsilon));
    for (int64_t i = 0; i < width / WIDTH; i++) {
        const part z = (out[i] - splat(mean)) * scale * ((const part *)weight)[i];
        out[i] = bias ? z + ((const part *)bias)[i] : z;
    }
}

// y = (s - mean s) / sqrt(variance of s + epsilon) * weight + bias, s = x + added (or x). All rows have `width`
// elements, which 2 * WIDTH divides; bias: [width] or NULL.
void layer_norm(const float *x, const float *added, int64_t rows, int64_t width, const float *weight,
                const float *bias, float epsilon, float *y, int threads) {
    PARALLEL_FOR(rows * width >= ALONE / 4,
                 for (int64_t r = 0; r < rows; r++)
                     norm_row(x + r * width, added ? added + r * width : NULL, width, weight, bias, epsilon, y + r * width);)
}
