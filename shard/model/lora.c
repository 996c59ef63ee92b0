// What low-rank adapters add to a product, for many adapters in one step: y = scale (W x + B A x) + bias, where W x + bias
// is there already. A row's result is one sequence of operations whatever other rows, adapters or threads there are.
//
// A lies as [rank, in], B as [rank, out], the scaling inside B. Built once per element type: -DELEMENT_BF16 or not.
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define MOST_RANK 512
#define MOST_ROWS 16     // of a task
#define WIDTH 64         // outputs that one pass over B sums up
#define ALONE (1 << 16)  // so few multiplications are not worth a second thread

#ifdef ELEMENT_BF16
typedef uint16_t element;
static inline float widen(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline element narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (element)((bits >> 16) | 0x40);  // not a number stays one
    return (element)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
typedef float element;
static inline float widen(element x) { return x; }
static inline element narrow(float x) { return x; }
#endif

// One adapter's share of one module; rank 0 and no pointers where it has none.
typedef struct {
    int64_t rank;
    const element *a, *b;
    const float *scale, *bias;  // [out] or NULL
} Weights;

// Rows `first` ... `first + count - 1` of the step belong to `slot`; count is at most MOST_ROWS.
typedef struct {
    int32_t slot, first, count;
} Task;

// One module of the base: its input and its output. `base_bias` [out] or NULL is what y holds beside W x.
typedef struct {
    const Weights *slots;
    const element *x;
    int64_t x_stride, num_in;
    element *y;
    int64_t y_stride, num_out;
    const float *base_bias;
} Part;

static inline float dot(const element *x, const element *a, int64_t n) {
#if defined(ELEMENT_BF16) && defined(__AVX512BF16__)
    __m512 sum = _mm512_setzero_ps(), other = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 64 <= n; k += 64) {
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + k), (__m512bh)_mm512_loadu_si512(a + k));
        other = _mm512_dpbf16_ps(other, (__m512bh)_mm512_loadu_si512(x + k + 32),
                                 (__m512bh)_mm512_loadu_si512(a + k + 32));
    }
    for (; k < n; k += 32) {
        __mmask32 mask = n - k >= 32 ? 0xffffffffu : (1u << (n - k)) - 1;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(mask, x + k),
                               (__m512bh)_mm512_maskz_loadu_epi16(mask, a + k));
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(sum, other));
#else
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < n; k++) sum += widen(x[k]) * widen(a[k]);
    return sum;
#endif
}

// y[0 .. width) of one row, from u = A x [rank]
static inline void expand(const Weights *w, const float *u, int64_t out, int64_t from, int64_t width, element *y,
                          const float *base_bias) {
    float sums[WIDTH];
    for (int64_t c = 0; c < width; c++) sums[c] = 0;
    for (int64_t j = 0; j < w->rank; j++) {
        const element *b = w->b + j * out + from;
#pragma omp simd
        for (int64_t c = 0; c < width; c++) sums[c] += u[j] * widen(b[c]);
    }
    for (int64_t c = 0; c < width; c++) {
        float value = widen(y[from + c]), base = base_bias ? base_bias[from + c] : 0;
        if (w->scale) value = w->scale[from + c] * (value - base + sums[c]) + base;
        else value += sums[c];
        y[from + c] = narrow(w->bias ? value + w->bias[from + c] : value);
    }
}

static void expand_rows(const Part *part, const Task *task, const Weights *w, const float *u) {
    for (int64_t from = 0; from < part->num_out; from += WIDTH) {
        int64_t width = part->num_out - from > WIDTH ? WIDTH : part->num_out - from;
        for (int64_t r = 0; r < task->count; r++)
            expand(w, u + r * w->rank, part->num_out, from, width, part->y + (task->first + r) * part->y_stride,
                   part->base_bias);
    }
}

static int is_empty(const Weights *w) { return !w->rank && !w->scale && !w->bias; }

// Every task on every part.
void adapt(const Part *parts, int num_parts, const Task *tasks, int num_tasks, int threads) {
    int64_t work = 0;
    for (int i = 0; i < num_parts * num_tasks; i++) {
        const Part *part = parts + i % num_parts;
        const Task *task = tasks + i / num_parts;
        work += part->slots[task->slot].rank * task->count * (part->num_in + part->num_out);
    }
#pragma omp parallel for num_threads(work < ALONE ? 1 : threads) schedule(dynamic)
    for (int i = 0; i < num_parts * num_tasks; i++) {
        const Part *part = parts + i % num_parts;
        const Task *task = tasks + i / num_parts;
        const Weights *w = part->slots + task->slot;
        float u[MOST_ROWS * MOST_RANK];
        if (is_empty(w)) continue;
        for (int64_t j = 0; j < w->rank; j++)
            for (int64_t r = 0; r < task->count; r++)
                u[r * w->rank + j] = dot(part->x + (task->first + r) * part->x_stride, w->a + j * part->num_in, part->num_in);
        expand_rows(part, task, w, u);
    }
}

// Token embeddings: A x is a column of A [rank, num_in], chosen by the row's id.
void adapt_embedding(const Part *part, const int64_t *ids, const Task *tasks, int num_tasks) {
    for (int i = 0; i < num_tasks; i++) {
        const Weights *w = part->slots + tasks[i].slot;
        float u[MOST_ROWS * MOST_RANK];
        if (is_empty(w)) continue;
        for (int64_t r = 0; r < tasks[i].count; r++)
            for (int64_t j = 0; j < w->rank; j++) u[r * w->rank + j] = widen(w->a[j * part->num_in + ids[tasks[i].first + r]]);
        expand_rows(part, tasks + i, w, u);
    }
}
