// Attention over paged K and V on a CPU, for one step and one layer. Compiled once per element type (-DBF16=0 or 1).
//
// Every query row is computed by the same sequence of operations whatever else is in the step: scores of positions in
// pages of P, softmax over the whole visible range with sums per position modulo 16, then a sum over positions in
// order. So the bits of a row depend on its query and on what it sees, not on chunks, batches or threads.
//
// K lies as [N, kv_heads, D, P], so that 16 positions are one vector; V lies as [N, kv_heads, P, W], W the value width
// rounded up to 16.
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define COLUMNS 4  // vectors of V that one pass over the positions sums up

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2)));

#if BF16
typedef uint16_t element;
INLINE float to_float(element x) {
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}
INLINE element from_float(float x) {  // round to nearest even; NaN stays NaN
    union { float f; uint32_t i; } u = {x};
    if (x != x) return 0x7fc0;
    return (element)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}
INLINE vec load(const element *p) {
    uvec wide = __builtin_convertvector(*(const hvec *)p, uvec) << 16;
    return (vec)wide;
}
#else
typedef float element;
INLINE float to_float(element x) { return x; }
INLINE element from_float(float x) { return x; }
INLINE vec load(const element *p) { return *(const vec *)p; }
#endif

typedef struct {
    int64_t num_heads, num_kv_heads, key_dim, value_dim, value_width, window;  // window 0: none
    float scaling, softcap;                                                    // softcap 0: none
    const float *sinks, *slopes;                                               // [num_heads] or NULL
    element *keys, *values;
} Layer;

typedef struct {
    int64_t num_segments, num_tokens, page_size, page_stride, num_items, scratch;
    const int32_t *starts, *first_rows, *counts;  // [R] first position, first row of T, number of tokens
    const int32_t *pages;                         // [R, page_stride]
    const int32_t *items;                         // [num_items, 3] segment, first token of the segment, tokens
    const int64_t *slots;                         // [T] page * P + offset
    float *memory;                                // [num_threads, scratch]
} Step;

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec select_vec(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

// exp for x <= 0; below -87 it is 0.
INLINE vec exp_vec(vec x) {
    ivec tiny = x < splat(-87.0f);
    vec t = select_vec(tiny, splat(-87.0f), x);
    vec z = t * splat(1.44269504088896341f) + splat(12582912.0f);  // round to nearest by magic number
    ivec n = (ivec)z - (ivec)splat(12582912.0f);
    vec f = z - splat(12582912.0f);
    t = t - f * splat(0.693359375f);
    t = t - f * splat(-2.12194440e-4f);
    vec y = splat(1.9875691500e-4f);
    y = y * t + splat(1.3981999507e-3f);
    y = y * t + splat(8.3334519073e-3f);
    y = y * t + splat(4.1665795894e-2f);
    y = y * t + splat(1.6666665459e-1f);
    y = y * t + splat(5.0000001201e-1f);
    y = y * t * t + t + splat(1.0f);
    vec power = (vec)((n + 127) << 23);
    return select_vec(tiny, splat(0.0f), y * power);
}

// scores[r][0..2*LANES) of `rows` query rows against 2*LANES positions of one page.
// `next` is read soon: the processor itself looks ahead within 4 KiB only.
INLINE void score_block(int rows, const float *q, int64_t dim, const element *k, int64_t page_size, float *out,
                        int64_t stride, const element *next) {
    vec low[8], high[8];
    for (int r = 0; r < rows; r++) low[r] = high[r] = splat(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        vec a = load(k + d * page_size), b = load(k + d * page_size + LANES);
        __builtin_prefetch(next + d * page_size);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vec x = splat(q[r * dim + d]);
            low[r] += x * a;
            high[r] += x * b;
        }
    }
    for (int r = 0; r < rows; r++) {
        *(vec *)(out + r * stride) = low[r];
        *(vec *)(out + r * stride + LANES) = high[r];
    }
}

// out[r][0..columns*LANES) += sum over positions of p[r][j] * v[j].
INLINE void value_block(int rows, int columns, const float *p, int64_t stride, const element *v, int64_t width,
                        int64_t count, float *out, const element *next) {
    vec sum[4][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = *(vec *)(out + r * width + c * LANES);
    for (int64_t j = 0; j < count; j++) {
        vec x[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) x[c] = load(v + j * width + c * LANES);
        __builtin_prefetch(next + j * width);
        if (sizeof(element) * columns * LANES > 64) __builtin_prefetch(next + j * width + 32);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vec weight = splat(p[r * stride + j]);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sum[r][c] += weight * x[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(vec *)(out + r * width + c * LANES) = sum[r][c];
}

// tanh by exp; absolute error about 1e-7.
INLINE vec tanh_vec(vec x) {
    ivec sign = (ivec)x & (int32_t)0x80000000;
    vec e = exp_vec((vec)((ivec)(x + x) | (int32_t)0x80000000));
    vec y = (splat(1.0f) - e) / (splat(1.0f) + e);
    return select_vec((ivec)(x != x), x, (vec)((ivec)y | sign));
}

// Scores to weights, in place, over the block-aligned positions [from, to), of which [low, high) are visible.
// Returns the sum of the weights.
static float softmax(const Layer *layer, float *row, int64_t from, int64_t to, int64_t low, int64_t high,
                     int64_t head) {
    const vec least = splat(-INFINITY);
    const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vec scaling = splat(layer->scaling), cap = splat(layer->softcap);
    const vec slope = splat(layer->slopes ? layer->slopes[head] : 0.0f);
    vec top = least, sums = splat(0.0f);
    for (int64_t j = from; j < to; j += LANES) {
        const ivec position = lanes + (int32_t)j;
        vec x = *(vec *)(row + j - from) * scaling;
        if (layer->softcap != 0) x = cap * tanh_vec(x / cap);
        if (layer->slopes) x -= slope * __builtin_convertvector((int32_t)high - 1 - position, vec);
        x = select_vec((position < (int32_t)low) | (position >= (int32_t)high), least, x);
        *(vec *)(row + j - from) = x;
        top = select_vec((x > top) | (x != x), x, top);  // a NaN must reach the output, not vanish in comparisons
    }
    float most = layer->sinks ? layer->sinks[head] : -INFINITY;
    for (int i = 0; i < LANES; i++) most = (top[i] > most || top[i] != top[i]) ? top[i] : most;
    for (int64_t j = 0; j < to - from; j += LANES) {
        vec x = *(vec *)(row + j) - splat(most);
        vec e = select_vec((ivec)(x != x), x, exp_vec(x));
        *(vec *)(row + j) = e;
        sums += e;
    }
    float sum = layer->sinks ? expf(layer->sinks[head] - most) : 0.0f;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

// One tile: `count` tokens of one segment for one kv head.
static void attend_tile(const Layer *layer, const Step *step, const int32_t *item, int64_t kv_head, const element *query,
                        int64_t token_stride, int64_t head_stride, element *output, float *scratch) {
    const int64_t segment = item[0], first = item[1], count = item[2];
    const int64_t group = layer->num_heads / layer->num_kv_heads, rows = count * group;
    const int64_t dim = layer->key_dim, width = layer->value_width, P = step->page_size;
    const int64_t start = step->starts[segment] + first, end = start + count;  // positions of the tile's tokens
    const int64_t lowest = layer->window && start + 1 > layer->window ? start + 1 - layer->window : 0;
    const int64_t from = lowest / P * P, to = (end + P - 1) / P * P, span = to - from;
    const int32_t *pages = step->pages + segment * step->page_stride;
    const int64_t row0 = step->first_rows[segment] + first;
    float *q = scratch, *scores = q + rows * dim, *sums = scores + rows * span, *out = sums + rows;

    for (int64_t r = 0; r < rows; r++) {
        const element *source = query + (row0 + r / group) * token_stride + (kv_head * group + r % group) * head_stride;
        for (int64_t d = 0; d < dim; d++) q[r * dim + d] = to_float(source[d]);
    }
    for (int64_t j = from; j < to; j += 2 * LANES) {
        const element *k = layer->keys + (pages[j / P] * layer->num_kv_heads + kv_head) * dim * P + j % P;
        const element *next = j + 2 * LANES < to ? layer->keys + (pages[(j + 2 * LANES) / P] * layer->num_kv_heads + kv_head) * dim * P + (j + 2 * LANES) % P
                                                 : layer->values + (pages[from / P] * layer->num_kv_heads + kv_head) * width * P;
        float *s = scores + j - from;
        int64_t r = 0;
        for (; r + 8 <= rows; r += 8) score_block(8, q + r * dim, dim, k, P, s + r * span, span, next);
        for (; r + 4 <= rows; r += 4) score_block(4, q + r * dim, dim, k, P, s + r * span, span, next);
        for (; r < rows; r++) score_block(1, q + r * dim, dim, k, P, s + r * span, span, next);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t position = start + r / group;
        const int64_t low = layer->window && position + 1 > layer->window ? position + 1 - layer->window : 0;
        sums[r] = softmax(layer, scores + r * span, from, to, low, position + 1, kv_head * group + r % group);
    }
    memset(out, 0, sizeof(float) * rows * width);
    for (int64_t j = from; j < end; j += P) {
        const element *v = layer->values + (pages[j / P] * layer->num_kv_heads + kv_head) * width * P;
        const element *next = j + P < end ? layer->values + (pages[j / P + 1] * layer->num_kv_heads + kv_head) * width * P : v;
        const int64_t n = end - j < P ? end - j : P;
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) {
            int64_t c = 0;
            for (; c + COLUMNS * LANES <= width; c += COLUMNS * LANES)
                value_block(4, COLUMNS, scores + r * span + j - from, span, v + c, width, n, out + r * width + c, next + c);
            for (; c < width; c += LANES)
                value_block(4, 1, scores + r * span + j - from, span, v + c, width, n, out + r * width + c, next + c);
        }
        for (; r < rows; r++) {
            int64_t c = 0;
            for (; c + COLUMNS * LANES <= width; c += COLUMNS * LANES)
                value_block(1, COLUMNS, scores + r * span + j - from, span, v + c, width, n, out + r * width + c, next + c);
            for (; c < width; c += LANES)
                value_block(1, 1, scores + r * span + j - from, span, v + c, width, n, out + r * width + c, next + c);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const float scale = 1.0f / sums[r];
        element *target =
            output + ((row0 + r / group) * layer->num_heads + kv_head * group + r % group) * layer->value_dim;
        for (int64_t d = 0; d < layer->value_dim; d++) target[d] = from_float(out[r * width + d] * scale);
    }
}

// key and value: [T, kv_heads, dim] by strides, written to the pages of their tokens.
static void store(const Layer *layer, const Step *step, const element *key, const int64_t *ks, const element *value,
                  const int64_t *vs, int64_t token) {
    const int64_t P = step->page_size, page = step->slots[token] / P, offset = step->slots[token] % P;
    for (int64_t head = 0; head < layer->num_kv_heads; head++) {
        element *k = layer->keys + (page * layer->num_kv_heads + head) * layer->key_dim * P + offset;
        element *v = layer->values + ((page * layer->num_kv_heads + head) * P + offset) * layer->value_width;
        const element *source = key + token * ks[0] + head * ks[1];
        for (int64_t d = 0; d < layer->key_dim; d++) k[d * P] = source[d];
        memcpy(v, value + token * vs[0] + head * vs[1], sizeof(element) * layer->value_dim);
    }
}

// strides: token and head stride of query, key and value.
void attend(const Layer *layer, const Step *step, const element *query, const element *key, const element *value,
            const int64_t *strides, element *output, int num_threads) {
    const int64_t items = step->num_items * layer->num_kv_heads;
#pragma omp parallel num_threads(num_threads)
    {
        float *scratch = step->memory + omp_get_thread_num() * step->scratch;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < step->num_tokens; token++)
            store(layer, step, key, strides + 2, value, strides + 4, token);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < items; i++)
            attend_tile(layer, step, step->items + i / layer->num_kv_heads * 3, i % layer->num_kv_heads, query,
                        strides[0], strides[1], output, scratch);
    }
}
