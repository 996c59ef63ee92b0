// RMS norm, rotary positions, gates, and whole decoder layers in one call, in bfloat16, for the products of cpu.c and of
// integer.c, which define `multiply` and `plain_mlp`.
#pragma once
#include <math.h>
#include <omp.h>
#include "model/lora/targets.h"

#define LONG 32768  // elements from which on several threads compute what takes little time for each

#ifdef WITH_AVX512
// e to the x, within 2 units in the last place, by powers of two and a polynomial
static inline __m512 exp16(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.f)), _mm512_set1_ps(88.f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(f, f), _mm512_add_ps(f, _mm512_set1_ps(1.f)));
    return _mm512_scalef_ps(p, n);
}
#else
static inline vec16 choose16(ivec16 mask, vec16 a, vec16 b) { return (vec16)((mask & (ivec16)a) | (~mask & (ivec16)b)); }

// e to the x, within 2 units in the last place, by powers of two and a polynomial
static inline vec16 exp16(vec16 x) {
    x = choose16(sign_mask16(x + splat16(87.f)), splat16(-87.f), x);
    x = choose16(sign_mask16(splat16(88.f) - x), splat16(88.f), x);
    const vec16 shifter = splat16(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    vec16 shifted = x * splat16(1.44269504f) + shifter, n = shifted - shifter;
    vec16 f = x - n * splat16(0.693359375f);
    f = f - n * splat16(-2.12194440e-4f);
    vec16 p = splat16(1.9875691500e-4f);
    p = p * f + splat16(1.3981999507e-3f);
    p = p * f + splat16(8.3334519073e-3f);
    p = p * f + splat16(4.1665795894e-2f);
    p = p * f + splat16(1.6666665459e-1f);
    p = p * f + splat16(5.0000001201e-1f);
    p = p * (f * f) + (f + splat16(1.f));
    return p * (vec16)(((uvec16)shifted - (uvec16)shifter + 127) << 23);
}
#endif

// h = act(gate) * up, each rounded as the plain modules round. act(x) = x / (1 + e^-s): of SiLU s is x, of GELU's tanh
// formula 2 sqrt(2 / pi) (x + 0.044715 x^3)
static inline void gate_row(const bf16 *gate, const bf16 *up, bf16 *h, int64_t width, int is_tanh) {
    for (int64_t c = 0; c < width; c += 16) {
        vec16 g = load16(gate + c), s = g;
        if (is_tanh) s = splat16(1.59576912f) * (g + splat16(0.044715f) * g * g * g);
        vec16 activated = round16(g / (splat16(1.f) + exp16(splat16(0.f) - s)));
        store_lanes(h + c, first_lanes(width - c), activated * load16(up + c));
    }
}

// h = act(gate) * up, all [rows, n]; h may be gate
void gate_times(const bf16 *gate, const bf16 *up, int64_t rows, int64_t n, int is_tanh, bf16 *h, int threads) {
    PARALLEL_FOR(rows * n >= LONG,
                 for (int64_t r = 0; r < rows; r++) gate_row(gate + r * n, up + r * n, h + r * n, n, is_tanh);)
}

// An RMS norm: (weight + offset) * x / rms(x), whose quotient may be rounded before it is multiplied.
typedef struct {
    const bf16 *weight;  // or NULL for no norm
    float epsilon, offset;
    int64_t rounds;
} Norm;

// x, y: [k], which may be one array; k a multiple of 16
static inline void norm_row(const bf16 *x, int64_t k, const Norm *norm, bf16 *y) {
    vec16 squares = splat16(0.f);
    for (int64_t c = 0; c < k; c += 16) {
        vec16 v = load16(x + c);
        squares = squares + v * v;
    }
    vec16 scale = splat16(1.f / sqrtf(sum16(squares) / (float)k + norm->epsilon)), offset = splat16(norm->offset);
    for (int64_t c = 0; c < k; c += 16) {
        vec16 v = load16(x + c) * scale;
        if (norm->rounds) v = round16(v);
        store16(y + c, v * (load16(norm->weight + c) + offset));
    }
}

// x, y: [rows, k], which may be one array
void rms_norm(const bf16 *x, int64_t rows, int64_t k, const Norm *norm, bf16 *y, int threads) {
    PARALLEL_FOR(rows * k >= LONG, for (int64_t r = 0; r < rows; r++) norm_row(x + r * k, k, norm, y + r * k);)
}

// The norm of each head of x, in place. x: [rows, stride], heads * dim of it
void norm_heads(bf16 *x, int64_t rows, int64_t stride, int64_t heads, int64_t dim, const Norm *norm, int threads) {
    PARALLEL_FOR(rows * heads * dim >= LONG,
                 for (int64_t r = 0; r < rows; r++)
                     for (int64_t h = 0; h < heads; h++)
                         norm_row(x + r * stride + h * dim, dim, norm, x + r * stride + h * dim);)
}

// x [dim] rotated in place: halves (a, b) become (a cos - b sin, b cos + a sin), each product and sum rounded
static inline void rotate_head(bf16 *x, int64_t dim, const bf16 *cos, const bf16 *sin) {
    const int64_t half = dim / 2;
    for (int64_t c = 0; c < half; c += 16) {
        vec16 a = load16(x + c), b = load16(x + half + c);
        store16(x + c, round16(a * load16(cos + c)) - round16(b * load16(sin + c)));
        store16(x + half + c, round16(b * load16(cos + half + c)) + round16(a * load16(sin + half + c)));
    }
}

// x[t, h, :] rotated by the angles of token t, in place. x: [rows, stride], heads * dim of it; cos, sin: [rows, dim]; dim
// a multiple of 32
void rotate(bf16 *x, int64_t rows, int64_t stride, int64_t heads, int64_t dim, const bf16 *cos, const bf16 *sin,
            int threads) {
    PARALLEL_FOR(rows * heads * dim >= LONG,
                 for (int64_t r = 0; r < rows; r++)
                     for (int64_t h = 0; h < heads; h++)
                         rotate_head(x + r * stride + h * dim, dim, cos + r * dim, sin + r * dim);)
}

// y = bf16(x + h), all [n], 16 divides n; y may be x
static void add(const bf16 *x, const bf16 *h, int64_t n, bf16 *y, int threads) {
    PARALLEL_FOR(n >= LONG, for (int64_t c = 0; c < n; c += 16) store16(y + c, load16(x + c) + load16(h + c));)
}

typedef void attend_function(const void *layer, const void *step, const bf16 *query, const bf16 *key,
                             const bf16 *value, const int64_t *strides, bf16 *output, int threads);

// `adapt` of targets.c.
typedef void adapt_function(const Part *parts, int num_parts, const Task *tasks, int num_tasks, int threads);

enum { Q, K, V, OUT, GATE, UP, DOWN, NUM_MODULES };

typedef struct {
    int64_t width, num_heads, num_kv_heads, head_dim, num_hidden;
    int64_t is_tanh;                             // of the MLP's activation
    Norm input_norm, attended_norm, mlp_norm, output_norm;  // [width], before and after attention and MLP
    Norm query_norm, key_norm;                   // [head_dim]
    const void *qkv, *out, *gate, *up, *down;    // packed
    const float *qkv_bias, *out_bias;            // or NULL
    const Weights *adapters[NUM_MODULES]; // by slot
    const float *base_bias[NUM_MODULES];         // each module's part of qkv_bias or out_bias, or NULL
} DecoderLayer;

// cos and sin of the step's positions, [rows, head_dim].
typedef struct {
    const bf16 *cos, *sin;
} Angles;

// The rows of this step that belong to adapters; num_tasks may be 0.
typedef struct {
    adapt_function *adapt;
    const Task *tasks;
    int64_t num_tasks;
} AdapterStep;

// y = x . packed + bias. x: [rows, k], packed: [n, k], bias: [n] or NULL, spare: memory beyond the layer's scratch.
static void multiply(const bf16 *x, int64_t rows, int64_t k, const void *packed, int64_t n, const float *bias,
                     void *spare, bf16 *y, int threads);

// y = down(act(gate x) * up x) of a layer. x, y: [rows, width]; hidden: [2 rows, num_hidden] scratch.
static void plain_mlp(const DecoderLayer *layer, const bf16 *x, int64_t rows, bf16 *hidden, void *spare, bf16 *y,
                      int threads);

static Part part_of(const DecoderLayer *layer, int module, const bf16 *x, int64_t num_in, bf16 *y, int64_t y_stride,
                    int64_t num_out) {
    Part made = {layer->adapters[module], x, num_in, num_in, y, y_stride, num_out, layer->base_bias[module]};
    return made;
}

// Whether an adapter of this step changes the module.
static int is_changed(const DecoderLayer *layer, int module, const AdapterStep *adapters) {
    const Weights *slots = layer->adapters[module];
    for (int64_t i = 0; i < adapters->num_tasks; i++) {
        if (!is_empty(slots, adapters->tasks[i].slot)) return 1;
    }
    return 0;
}

// The gated MLP; where adapters change gate or up, both are computed entirely first. hidden: [2 rows, n] scratch
static void adapted_mlp(const DecoderLayer *layer, const AdapterStep *adapters, const bf16 *x, int64_t rows,
                        bf16 *hidden, void *spare, bf16 *y, int threads) {
    const int64_t width = layer->width, n = layer->num_hidden;
    if (is_changed(layer, GATE, adapters) || is_changed(layer, UP, adapters)) {
        bf16 *up = hidden + rows * n;
        multiply(x, rows, width, layer->gate, n, 0, spare, hidden, threads);
        multiply(x, rows, width, layer->up, n, 0, spare, up, threads);
        Part both[] = {part_of(layer, GATE, x, width, hidden, n, n), part_of(layer, UP, x, width, up, n, n)};
        adapters->adapt(both, 2, adapters->tasks, adapters->num_tasks, threads);
        gate_times(hidden, up, rows, n, layer->is_tanh, hidden, threads);
        multiply(hidden, rows, n, layer->down, width, 0, spare, y, threads);
    } else {
        plain_mlp(layer, x, rows, hidden, spare, y, threads);
    }
    Part down = part_of(layer, DOWN, hidden, n, y, width, width);
    adapters->adapt(&down, 1, adapters->tasks, adapters->num_tasks, threads);
}

// One decoder layer, by the same calls as its parts one by one. x, y: [rows, width], which may be one array; the
// attention computes `attended` rows, and a row beyond them gets the first one's output.
// scratch: rows * (width + (2 num_heads + 2 num_kv_heads) * head_dim + 2 num_hidden), then what products need themselves
static void decoder_layer(const DecoderLayer *layer, attend_function *attend, const void *kv, const void *step,
                          const AdapterStep *adapters, const bf16 *x, int64_t rows, int64_t attended,
                          const Angles *angles, bf16 *scratch, bf16 *y, int threads) {
    const int64_t width = layer->width, dim = layer->head_dim, out_width = layer->num_heads * dim;
    const int64_t rotated = layer->num_heads + layer->num_kv_heads, columns = (rotated + layer->num_kv_heads) * dim;
    const int64_t strides[6] = {columns, dim, columns, dim, columns, dim};
    bf16 *h = scratch, *qkv = h + rows * width, *seen = qkv + rows * columns, *hidden = seen + rows * out_width;
    void *spare = (void *)(((uintptr_t)(hidden + 2 * rows * layer->num_hidden) + 63) / 64 * 64);

    rms_norm(x, rows, width, &layer->input_norm, h, threads);
    multiply(h, rows, width, layer->qkv, columns, layer->qkv_bias, spare, qkv, threads);
    if (adapters->num_tasks) {
        const int64_t keys = layer->num_kv_heads * dim;
        Part parts[] = {part_of(layer, Q, h, width, qkv, columns, out_width),
                        part_of(layer, K, h, width, qkv + out_width, columns, keys),
                        part_of(layer, V, h, width, qkv + out_width + keys, columns, keys)};
        adapters->adapt(parts, 3, adapters->tasks, adapters->num_tasks, threads);
    }
    if (layer->query_norm.weight) {
        norm_heads(qkv, rows, columns, layer->num_heads, dim, &layer->query_norm, threads);
        norm_heads(qkv + out_width, rows, columns, layer->num_kv_heads, dim, &layer->key_norm, threads);
    }
    rotate(qkv, rows, columns, rotated, dim, angles->cos, angles->sin, threads);
    attend(kv, step, qkv, qkv + out_width, qkv + rotated * dim, strides, seen, threads);
    for (int64_t r = attended; r < rows; r++) memcpy(seen + r * out_width, seen, out_width * sizeof(bf16));
    multiply(seen, rows, out_width, layer->out, width, layer->out_bias, spare, h, threads);
    if (adapters->num_tasks) {
        Part out = part_of(layer, OUT, seen, out_width, h, width, width);
        adapters->adapt(&out, 1, adapters->tasks, adapters->num_tasks, threads);
    }
    if (layer->attended_norm.weight) rms_norm(h, rows, width, &layer->attended_norm, h, threads);
    add(x, h, rows * width, y, threads);
    rms_norm(y, rows, width, &layer->mlp_norm, h, threads);
    if (adapters->num_tasks)
        adapted_mlp(layer, adapters, h, rows, hidden, spare, h, threads);
    else
        plain_mlp(layer, h, rows, hidden, spare, h, threads);
    if (layer->output_norm.weight) rms_norm(h, rows, width, &layer->output_norm, h, threads);
    add(y, h, rows * width, y, threads);
}

// Decoder layers one after the other, as `decoder_layer`, with scratch memory for the widest. kvs and kinds: one per
// layer; a kind is the place of its angles.
void decoder_layers(const DecoderLayer *const *layers, int64_t num_layers, attend_function *attend,
                    const void *const *kvs, const int64_t *kinds, const void *step, const AdapterStep *adapters,
                    const bf16 *x, int64_t rows, int64_t attended, const Angles *angles, bf16 *scratch, bf16 *y,
                    int threads) {
    for (int64_t i = 0; i < num_layers; i++)
        decoder_layer(layers[i], attend, kvs[i], step, adapters, i ? y : x, rows, attended, angles + kinds[i], scratch,
                      y, threads);
}
