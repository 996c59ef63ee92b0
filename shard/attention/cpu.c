// Attention over paged K and V on a CPU, for one step and one layer. Compiled once per element type (-DBF16=0 or 1, and
// -DPAIRED=0 for bfloat16 without products of pairs).
//
// Every query row is computed by the same sequence of operations in any step: scores of positions in pages of P, softmax
// over the whole visible range with a sum per lane, then a sum over positions in order. So the bits of a row depend on
// its query and the keys it sees, not on chunks, batches or threads.
//
// A lane adds TERMS products at once: two with AVX512-BF16, where weights are rounded to bfloat16 too, else one.
// K is stored as [N, kv_heads, key_width / TERMS, P, TERMS], so that 16 positions are one vector, V as
// [N, kv_heads, P / TERMS, value_width, TERMS]; key_width is key_dim rounded up to 2, value_width rounded up to 16.
#include <math.h>
#include <omp.h>
#include "system/parts.h"
#if BF16 && PAIRED && defined(WITH_AVX512)
#define TERMS 2
#else
#define TERMS 1
#endif
#define LANES 16
#define BLOCK (2 * LANES)  // positions of a page are a multiple of it
#define AHEAD 256          // prefetch distance in positions
#define ALONE (1 << 18)    // multiplications below which a second thread costs more than it saves
// A product is computed in parts of WIDTH lanes. Sums, weights and a broadcast of one pass fill the registers: scores of
// SCORE_ROWS rows and SCORED positions, outputs of VALUE_ROWS rows and COLUMNS parts.
#ifdef __AVX512F__
#define SCORE_ROWS 8
#define VALUE_ROWS 4
#define COLUMNS 4
#else
#define SCORE_ROWS 6
#define VALUE_ROWS 6
#define COLUMNS 2
#endif
#define SCORED (2 * WIDTH)

// `operand`: the type of a query element or weight in a product; `terms`: TERMS operands per lane.
#if TERMS == 2
typedef element operand;
typedef __m512bh terms;
INLINE void put_query(operand *out, const element *query, int64_t dim) { memcpy(out, query, sizeof(element) * dim); }
INLINE terms load(const element *p) { return (terms)_mm512_loadu_si512(p); }
INLINE terms load_first(const element *p) {  // with 0 for the second of each pair
    return (terms)_mm512_maskz_loadu_epi16(0x55555555, p);
}
INLINE terms spread(const operand *p) {
    int32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return (terms)_mm512_set1_epi32(pair);
}
INLINE part add_products(part sum, terms a, terms b) { return (part)_mm512_dpbf16_ps((__m512)sum, a, b); }
// The weights x of BLOCK positions as operands; `sums` adds the rounded weights.
INLINE void keep_weights(operand *out, const part *x, part *sums) {
    const terms both = _mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
    _mm512_storeu_si512(out, (__m512i)both);
    *sums = add_products(*sums, both, (terms)_mm512_set1_epi16(0x3f80));
}
// exp(x - most) for x <= most; its relative error of 1e-6 is far below the rounding to bfloat16.
INLINE part weigh(part x, float most) {
    const float log2e = 1.44269504088896341f;
    const __m512 z = _mm512_max_ps(splat(-200.0f), x * splat(log2e) - splat(most * log2e));  // a NaN stays
    const __m512 n = _mm512_roundscale_ps(z, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = z - n;
    part y = splat(1.3264727214e-3f);
    y = y * f + splat(9.6715128126e-3f);
    y = y * f + splat(5.5507337448e-2f);
    y = y * f + splat(2.4022242083e-1f);
    y = y * f + splat(6.9314697760e-1f);
    return _mm512_scalef_ps(y * f + splat(1.0f), n);
}
INLINE part larger(part x, part than) { return _mm512_max_ps(x, than); }  // `than` where x is NaN
INLINE float largest(part x) { return _mm512_reduce_max_ps(x); }
INLINE float total(const part *sums) { return _mm512_reduce_add_ps(*sums); }
INLINE void store_first(element *out, part x, int64_t count) { store_lanes(out, first_lanes(count), (__m512)x); }
// Writes a position's V to its half of the pairs at `out` only: another thread may write the other half.
INLINE void put_value(element *out, const element *value, int64_t dim, int64_t half) {
    for (int64_t c = 0; c < dim; c += LANES) {
        const __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(dim - c), value + c));
        _mm512_mask_storeu_epi16(out + c * TERMS, 0x55555555u << half, _mm512_slli_epi32(x, 16 * half));
    }
}
INLINE void put_key(element *out, const element *key, int64_t dim, int64_t page_size) {
    for (int64_t d = 0; d + 1 < dim; d += 2) memcpy(out + d * page_size, key + d, 2 * sizeof(element));
    if (dim % 2) memcpy(out + (dim - 1) * page_size, (const element[]){key[dim - 1], 0}, 2 * sizeof(element));
}
#else
typedef float operand;
typedef part terms;
INLINE terms load(const element *p) { return load_part(p); }
INLINE terms load_first(const element *p) { return load(p); }
INLINE void put_query(operand *out, const element *query, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) out[d] = to_float(query[d]);
}
INLINE terms spread(const operand *p) { return splat(*p); }
INLINE part add_products(part sum, terms a, terms b) { return sum + a * b; }
INLINE part larger(part x, part than) { return select_part(x > than, x, than); }
INLINE float largest(part x) {
    float most = x[0];
    for (int i = 1; i < WIDTH; i++) most = x[i] > most ? x[i] : most;
    return most;
}
INLINE float total(const part *sums) { return total16(sums); }
INLINE part weigh(part x, float most) { return exp_part(x - splat(most)); }
INLINE void keep_weights(operand *out, const part *x, part *sums) {
    for (int i = 0; i < BLOCK / WIDTH; i++) {
        *(part *)(out + i * WIDTH) = x[i];
        sums[i % (LANES / WIDTH)] += x[i];
    }
}
INLINE void put_value(element *out, const element *value, int64_t dim, int64_t half) {
    memcpy(out + half, value, sizeof(element) * dim);
}
INLINE void put_key(element *out, const element *key, int64_t dim, int64_t page_size) {
    for (int64_t d = 0; d < dim; d++) out[d * page_size] = key[d];
    if (dim % 2) out[dim * page_size] = 0;
}
INLINE void store_first(element *out, part x, int64_t count) { store_partial(out, x, count); }
#endif

typedef struct {
    int64_t num_heads, num_kv_heads, key_dim, key_width, value_dim, value_width, window;  // window 0: none
    int64_t is_causal;                                                                    // 0: later tokens are seen too
    float scaling, softcap;                                                               // softcap 0: none
    const float *sinks, *slopes;                                                          // [num_heads] or NULL
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

// K or V of one tile's positions: page i of `count` begins at base + pages[i] * stride.
typedef struct {
    const element *base;
    const int32_t *pages;
    int64_t count, stride;
} Stream;

INLINE const element *page_of(const Stream *s, int64_t i) { return s->base + s->pages[i] * s->stride; }

// `count` tokens of one segment, from its token `first` on, for one kv head. Together they see the positions from page
// number `page` up to `end`.
typedef struct {
    int64_t segment, first, count, kv_head, start, end, page;
    Stream keys, values;
} Tile;

// The end of the positions that the token at `position` of a segment sees.
INLINE int64_t end_of(const Layer *layer, const Step *step, int64_t segment, int64_t position) {
    if (layer->is_causal) return position + 1;
    const int64_t all = step->starts[segment] + step->counts[segment];
    return layer->window && position + layer->window < all ? position + layer->window : all;
}

// The n-th tile: all items for the first `heads` kv heads, then all items for the next `heads`, and so on.
static Tile tile_of(const Layer *layer, const Step *step, int64_t n, int64_t heads) {
    const int32_t *item = step->items + n % (step->num_items * heads) / heads * 3;
    const int64_t kv_head = n / (step->num_items * heads) * heads + n % heads;
    const int64_t P = step->page_size, start = step->starts[item[0]] + item[1];
    const int64_t end = end_of(layer, step, item[0], start + item[2] - 1);
    const int64_t page = layer->window && start + 1 > layer->window ? (start + 1 - layer->window) / P : 0;
    const int64_t count = (end + P - 1) / P - page;
    const int64_t key_size = layer->key_width * P, value_size = layer->value_width * P;
    const int32_t *pages = step->pages + item[0] * step->page_stride + page;
    return (Tile){item[0], item[1], item[2], kv_head, start, end, page,
                  {layer->keys + kv_head * key_size, pages, count, layer->num_kv_heads * key_size},
                  {layer->values + kv_head * value_size, pages, count, layer->num_kv_heads * value_size}};
}

// The i-th page read from the start of a tile: its K, its V, then the K of the next tile.
INLINE const element *page_in_turn(const Tile *tile, const Tile *next, int64_t i) {
    const int64_t n = tile->keys.count, later = i - 2 * n;
    if (i < n) return page_of(&tile->keys, i);
    if (i < 2 * n) return page_of(&tile->values, i - n);
    return page_of(&next->keys, later < next->keys.count ? later : 0);
}

// Into the second-level cache: the first has too few miss buffers, and loads would wait for one.
INLINE void prefetch(const element *p, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(element)) __builtin_prefetch(p + i, 0, 2);
}

// Scaled scores out[r][0..SCORED) of `rows` query rows against SCORED positions of one page; prefetches `soon`, if any.
INLINE void score_block(int rows, const operand *q, int64_t dim, const element *k, int64_t page_size, float scaling,
                        float *out, int64_t stride, const element *soon) {
    part low[SCORE_ROWS] = {0}, high[SCORE_ROWS] = {0};
    for (int64_t d = 0; d < dim; d += TERMS) {
        const terms a = load(k + d * page_size), b = load(k + d * page_size + WIDTH * TERMS);
        if (soon) prefetch(soon + d * SCORED, SCORED * TERMS);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const terms x = spread(q + r * dim + d);
            low[r] = add_products(low[r], x, a);
            high[r] = add_products(high[r], x, b);
        }
    }
    for (int r = 0; r < rows; r++) {
        *(part *)(out + r * stride) = low[r] * splat(scaling);
        *(part *)(out + r * stride + WIDTH) = high[r] * splat(scaling);
    }
}

INLINE void add_terms(int rows, int columns, part (*sum)[COLUMNS], const operand *p, int64_t stride, const terms *x) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const terms weight = spread(p + r * stride);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) sum[r][c] = add_products(sum[r][c], weight, x[c]);
    }
}

// out[r][0..columns*WIDTH) = sum over the tile's positions, from the start of the first page, of p[r][j] * v[j].
INLINE void value_block(int rows, int columns, const operand *p, int64_t stride, const Tile *tile, const Tile *next,
                        int64_t column, int64_t page_size, int64_t width, int64_t ahead, float *out) {
    part sum[VALUE_ROWS][COLUMNS] = {0};
    int64_t count = tile->end - tile->page * page_size;
    for (int64_t i = 0; i < tile->values.count; i++, p += page_size, count -= page_size) {
        const element *v = page_of(&tile->values, i) + column * TERMS;
        const element *soon = page_in_turn(tile, next, tile->keys.count + i + ahead) + column * TERMS;
        const int64_t here = count < page_size ? count : page_size;
        int64_t j = 0;
        terms x[COLUMNS];
        for (; j + TERMS <= here; j += TERMS) {
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) x[c] = load(v + j * width + c * WIDTH * TERMS);
            prefetch(soon + j * width, columns * WIDTH * TERMS);
            add_terms(rows, columns, sum, p + j, stride, x);
        }
        if (j < here) {  // the last position is the first of a pair, whose second belongs to no visible position
            for (int c = 0; c < columns; c++) x[c] = load_first(v + j * width + c * WIDTH * TERMS);
            add_terms(rows, columns, sum, p + j, stride, x);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(part *)(out + r * width + c * WIDTH) = sum[r][c];
}

// tanh by exp; absolute error about 1e-7.
INLINE part tanh_part(part x) {
    ipart sign = (ipart)x & (int32_t)0x80000000;
    part e = exp_part((part)((ipart)(x + x) | (int32_t)0x80000000));
    part y = (splat(1.0f) - e) / (splat(1.0f) + e);
    return select_part((ipart)(x != x), x, (part)((ipart)y | sign));
}

// Scores of a row, from position j on, of which [low, high) are visible, with cap, slope and mask applied.
INLINE part shape_scores(const Layer *layer, part x, int64_t j, int64_t low, int64_t high, float slope) {
    const ipart position = (int32_t)j + (ipart)FROM_ZERO;
    if (layer->softcap != 0) x = splat(layer->softcap) * tanh_part(x / splat(layer->softcap));
    if (layer->slopes) x -= splat(slope) * __builtin_convertvector((int32_t)high - 1 - position, part);
    return select_part((position < (int32_t)low) | (position >= (int32_t)high), splat(-INFINITY), x);
}

// Scores to weights, in place, over the block-aligned positions [from, to), of which [low, high) are visible.
// Returns the sum of the weights. A visible NaN makes its weight and the sum NaN.
static float softmax(const Layer *layer, float *row, int64_t from, int64_t to, int64_t low, int64_t high,
                     int64_t head) {
    const float slope = layer->slopes ? layer->slopes[head] : 0.0f;
    const int plain = layer->softcap == 0 && !layer->slopes;
    part top = splat(-INFINITY), sums[LANES / WIDTH] = {0};
    for (int64_t j = from; j < to; j += WIDTH) {
        part x = *(part *)(row + j - from);
        if (!plain || j < low || j + WIDTH > high)
            *(part *)(row + j - from) = x = shape_scores(layer, x, j, low, high, slope);
        top = larger(x, top);
    }
    float most = largest(top);
    if (layer->sinks && layer->sinks[head] > most) most = layer->sinks[head];
    for (int64_t j = 0; j < to - from; j += BLOCK) {
        part x[BLOCK / WIDTH];
        for (int i = 0; i < BLOCK / WIDTH; i++) x[i] = weigh(*(part *)(row + j + i * WIDTH), most);
        keep_weights((operand *)row + j, x, sums);
    }
    return total(sums) + (layer->sinks ? expf(layer->sinks[head] - most) : 0.0f);
}

// Output of a tile's rows, token by token and for each the heads of the group.
static void attend_tile(const Layer *layer, const Step *step, const Tile *tile, const Tile *next,
                        const element *query, const int64_t *strides, element *output, float *scratch) {
    const int64_t group = layer->num_heads / layer->num_kv_heads, rows = tile->count * group, kv_head = tile->kv_head;
    const int64_t dim = layer->key_width, width = layer->value_width, P = step->page_size;
    const int64_t from = tile->page * P, span = tile->keys.count * P;
    const int64_t ahead = AHEAD < span ? (AHEAD + P - 1) / P : tile->keys.count;  // in pages
    const int64_t row0 = step->first_rows[tile->segment] + tile->first;
    float *out = scratch, *scores = out + rows * width, *sums = scores + rows * span;
    operand *q = (operand *)(sums + rows);

    for (int64_t r = 0; r < rows; r++) {
        const element *source = query + (row0 + r / group) * strides[0] + (kv_head * group + r % group) * strides[1];
        put_query(q + r * dim, source, layer->key_dim);
        for (int64_t d = layer->key_dim; d < dim; d++) q[r * dim + d] = 0;
    }
    for (int64_t j = 0; j < span; j += SCORED) {
        const element *k = page_of(&tile->keys, j / P) + j % P * TERMS;
        const element *soon = page_in_turn(tile, next, j / P + ahead) + j % P * dim;
        float *s = scores + j;
        int64_t r = 0;
#define SCORES(n) score_block(n, q + r * dim, dim, k, P, layer->scaling, s + r * span, span, r ? NULL : soon)
        for (; r + SCORE_ROWS <= rows; r += SCORE_ROWS) SCORES(SCORE_ROWS);
        for (; r + 4 <= rows; r += 4) SCORES(4);
        for (; r < rows; r++) SCORES(1);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t position = tile->start + r / group;
        const int64_t low = layer->window && position + 1 > layer->window ? position + 1 - layer->window : 0;
        const int64_t high = end_of(layer, step, tile->segment, position);
        sums[r] = softmax(layer, scores + r * span, from, from + span, low, high, kv_head * group + r % group);
    }
    const operand *p = (const operand *)scores;  // weights replace the scores
    const int64_t stride = span * (int64_t)(sizeof(float) / sizeof(operand));
    for (int64_t c = 0, r = 0, columns; c < width; c += columns * WIDTH, r = 0) {
        columns = c + COLUMNS * WIDTH <= width ? COLUMNS : LANES / WIDTH;
#define VALUES(R, C) value_block(R, C, p + r * stride, stride, tile, next, c, P, width, ahead, out + r * width + c)
        for (; r + VALUE_ROWS <= rows; r += VALUE_ROWS)
            if (columns == COLUMNS) VALUES(VALUE_ROWS, COLUMNS); else VALUES(VALUE_ROWS, LANES / WIDTH);
        for (; r < rows; r++)
            if (columns == COLUMNS) VALUES(1, COLUMNS); else VALUES(1, LANES / WIDTH);
    }
    for (int64_t r = 0; r < rows; r++) {
        const part scale = splat(1.0f / sums[r]);
        element *target =
            output + ((row0 + r / group) * layer->num_heads + kv_head * group + r % group) * layer->value_dim;
        for (int64_t c = 0; c < layer->value_dim; c += WIDTH)
            store_first(target + c, *(part *)(out + r * width + c) * scale, layer->value_dim - c);
    }
}

// key and value: [T, kv_heads, dim] by strides, written to the pages of their tokens.
static void store(const Layer *layer, const Step *step, const element *key, const int64_t *ks, const element *value,
                  const int64_t *vs, int64_t token) {
    const int64_t P = step->page_size, page = step->slots[token] / P, offset = step->slots[token] % P;
    for (int64_t head = 0; head < layer->num_kv_heads; head++) {
        element *k = layer->keys + (page * layer->num_kv_heads + head) * layer->key_width * P;
        element *v = layer->values + (page * layer->num_kv_heads + head) * layer->value_width * P;
        put_key(k + offset * TERMS, key + token * ks[0] + head * ks[1], layer->key_dim, P);
        put_value(v + offset / TERMS * TERMS * layer->value_width, value + token * vs[0] + head * vs[1],
                  layer->value_dim, offset % TERMS);
    }
}

// Whether a step has enough multiplications for several threads.
static int is_long(const Layer *layer, const Step *step) {
    const int64_t heads = layer->num_kv_heads, per_position = layer->num_heads * (layer->key_width + layer->value_width);
    int64_t work = 0;
    for (int64_t i = 0; i < step->num_items && work < ALONE; i++) {
        const Tile tile = tile_of(layer, step, i * heads, heads);
        work += tile.count * tile.keys.count * step->page_size * per_position;
    }
    return work >= ALONE;
}

// This thread's part of `attend`. Each thread computes its own heads where they can be divided evenly, else tiles are
// shared dynamically.
static void attend_part(const Layer *layer, const Step *step, const element *query, const element *key,
                        const element *value, const int64_t *strides, element *output) {
    const int64_t kv_heads = layer->num_kv_heads, tiles = step->num_items * kv_heads, threads = omp_get_num_threads();
    const int64_t even = kv_heads % threads == 0;
    const int64_t heads = even ? kv_heads / threads : kv_heads;
    const int64_t chunk = even ? step->num_items * heads : 1 + tiles / (8 * threads);
    float *scratch = step->memory + omp_get_thread_num() * step->scratch;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < step->num_tokens; token++)
        store(layer, step, key, strides + 2, value, strides + 4, token);
#pragma omp for schedule(dynamic, chunk) nowait
    for (int64_t i = 0; i < tiles; i++) {
        const Tile tile = tile_of(layer, step, i, heads), next = tile_of(layer, step, i + (i + 1 < tiles), heads);
        attend_tile(layer, step, &tile, &next, query, strides, output, scratch);
    }
}

// strides: token and head stride of query, key and value.
void attend(const Layer *layer, const Step *step, const element *query, const element *key, const element *value,
            const int64_t *strides, element *output, int threads) {
    if (step->num_items == 0) return;
    PARALLEL(is_long(layer, step), attend_part(layer, step, query, key, value, strides, output);)
}
