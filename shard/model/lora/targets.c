// Low-rank adapters, many in one step: y = scale (W x + B A x) + bias, where y holds W x + bias already. A row's result is
// the same sequence of operations with any other rows, adapters or threads.
//
// Factors have the order in which they are read, padded with zeros: A is [rank / 8, in / STEP, 8, STEP], B, with the scaling
// inside, [out / 64, rank, 64]; A of embeddings is [in, rank]. Built once per element type.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "model/lora/targets.h"
#include "system/parts.h"

#define MOST_ROWS 16     // of a task
#define OUTPUTS 64       // whose rows of B are interleaved
#define RANKS 8          // rows of A that are interleaved
#define MOST_THREADS 16  // that pack
#define ALONE (1 << 16)  // multiplications below which a second thread costs more than it saves

#define STEP (64 / (int64_t)sizeof(element))  // terms of one instruction

#ifdef WITH_AVX512
// Each sum below takes its terms in order, with any number of rows or factors per pass.
#if BF16
typedef __m512bh terms;
static inline terms load_terms(const element *p, int64_t n) {
    return (terms)(n >= STEP ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << n) - 1, p));
}
static inline __m512 add_terms(__m512 sum, terms x, terms a) { return _mm512_dpbf16_ps(sum, x, a); }
#else
typedef __m512 terms;
static inline terms load_terms(const element *p, int64_t n) {
    return n >= STEP ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
static inline __m512 add_terms(__m512 sum, terms x, terms a) { return _mm512_fmadd_ps(x, a, sum); }
#endif

// u[r, j] = x[r] . a[j] for ROWS rows and eight rows of A
#define DEFINE_DOTS(ROWS)                                                                                     \
    static inline void dots##ROWS(const element *x, int64_t x_stride, const element *a, int64_t n, float *u,  \
                                  int64_t rank) {                                                             \
        __m512 sums[ROWS][8];                                                                                 \
        for (int r = 0; r < ROWS; r++)                                                                        \
            for (int j = 0; j < 8; j++) sums[r][j] = _mm512_setzero_ps();                                     \
        for (int64_t k = 0; k < n; k += STEP, a += 8 * STEP) {                                                \
            terms rows[ROWS];                                                                                 \
            for (int r = 0; r < ROWS; r++) rows[r] = load_terms(x + r * x_stride + k, n - k);                 \
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) {                                             \
                terms factor = load_terms(a + j * STEP, STEP);                                                \
                for (int r = 0; r < ROWS; r++) sums[r][j] = add_terms(sums[r][j], rows[r], factor);           \
            }                                                                                                 \
        }                                                                                                     \
        for (int r = 0; r < ROWS; r++)                                                                        \
            for (int j = 0; j < 8; j++) u[r * rank + j] = _mm512_reduce_add_ps(sums[r][j]);                   \
    }
DEFINE_DOTS(1) DEFINE_DOTS(2)

// u = A x for `count` rows
static void shrink(const Weights *w, const element *x, int64_t x_stride, int64_t count, int64_t n, float *u) {
    const int64_t rank = w->rank, wide = (n + STEP - 1) / STEP * STEP;
    for (int64_t j = 0; j < rank; j += 8) {
        int64_t r = 0;
        for (; r + 2 <= count; r += 2) dots2(x + r * x_stride, x_stride, w->a + j * wide, n, u + r * rank + j, rank);
        for (; r < count; r++) dots1(x + r * x_stride, 0, w->a + j * wide, n, u + r * rank + j, rank);
    }
}

#else
#define PARTS (16 / WIDTH)  // of the 16 lanes of a sum

// sums[r, j] += x[r] * a[j] for 16 terms, of `rows` rows and `count` rows of A, at most 3 and 4
INLINE void add_terms(const int rows, const int count, const element *x, int64_t x_stride, const element *a,
                      part (*sums)[4][PARTS]) {
#pragma GCC unroll 2
    for (int i = 0; i < PARTS; i++) {
        part terms[3];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) terms[r] = load_part(x + r * x_stride + i * WIDTH);
#pragma GCC unroll 4
        for (int j = 0; j < count; j++) {
            const part factor = load_part(a + j * STEP + i * WIDTH);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][j][i] += terms[r] * factor;
        }
    }
}

// u[r, j] = x[r] . a[j], by the same sums for any number of rows
INLINE void dots(const int rows, const int count, const element *x, int64_t x_stride, const element *a, int64_t n,
                 float *u, int64_t rank) {
    part sums[3][4][PARTS] = {0};
    const int64_t whole = n / 16 * 16;
    for (int64_t k = 0; k < whole; k += 16)
        add_terms(rows, count, x + k, x_stride, a + k / STEP * 8 * STEP + k % STEP, sums);
    if (whole < n) {
        element last[3][16] = {0};
        for (int r = 0; r < rows; r++) memcpy(last[r], x + r * x_stride + whole, (n - whole) * sizeof(element));
        add_terms(rows, count, last[0], 16, a + whole / STEP * 8 * STEP + whole % STEP, sums);
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < count; j++) u[r * rank + j] = total16(sums[r][j]);
}

// u = A x for `count` rows
static void shrink(const Weights *w, const element *x, int64_t x_stride, int64_t count, int64_t n, float *u) {
    const int64_t rank = w->rank, wide = (n + STEP - 1) / STEP * STEP;
    for (int64_t j = 0; j < rank; j += 4) {
        const element *a = w->a + j / 8 * 8 * wide + j % 8 * STEP;
        int64_t r = 0;
        for (; r + 3 <= count; r += 3) {
            dots(3, 2, x + r * x_stride, x_stride, a, n, u + r * rank + j, rank);
            dots(3, 2, x + r * x_stride, x_stride, a + 2 * STEP, n, u + r * rank + j + 2, rank);
        }
        for (; r < count; r++) dots(1, 4, x + r * x_stride, 0, a, n, u + r * rank + j, rank);
    }
}
#endif

#ifdef WITH_AVX512
#define LANES 16  // outputs of one step
typedef vec16 lanes;
INLINE lanes load_outputs(const element *p, int64_t count) { return load_lanes(p, first_lanes(count)); }
INLINE lanes load_values(const float *p, int64_t count) { return load_floats(p, first_lanes(count)); }
INLINE void store_outputs(element *p, lanes x, int64_t count) { store_lanes(p, first_lanes(count), x); }
#else
#define LANES WIDTH
typedef part lanes;
#define load_outputs load_partial
#define load_values load_partial_floats
#define store_outputs store_partial
#endif

// Add `sums` to y[at .. at + width).
static void add_to(const Weights *w, const float *sums, int64_t at, int64_t width, element *y, const float *base_bias) {
    y += at;
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t count = width - c;
        lanes x = load_outputs(y + c, count);
        const lanes delta = *(const lanes *)(sums + c);
        if (w->scale) {
            const lanes base = base_bias ? load_values(base_bias + at + c, count) : (lanes){0};
            x = load_values(w->scale + at + c, count) * (x - base + delta) + base;
        } else {
            x = x + delta;
        }
        if (w->bias) x = x + load_values(w->bias + at + c, count);
        store_outputs(y + c, x, count);
    }
}

// sums[r] = u[r] . b for ROWS rows and OUTPUTS outputs, PASS of them in registers at once
#define DEFINE_EXPAND(ROWS, PASS)                                                                               \
    static void expand##ROWS(const element *b, const float *u, int64_t rank, float (*sums)[OUTPUTS]) {          \
        for (int first = 0; first < OUTPUTS; first += PASS) {                                                   \
            part made[ROWS][PASS / WIDTH] = {0};                                                                \
            for (int64_t j = 0; j < rank; j++) {                                                                \
                part row[PASS / WIDTH];                                                                         \
                for (int v = 0; v < PASS / WIDTH; v++) row[v] = load_part(b + j * OUTPUTS + first + v * WIDTH); \
                for (int r = 0; r < ROWS; r++)                                                                  \
                    for (int v = 0; v < PASS / WIDTH; v++) made[r][v] += splat(u[r * rank + j]) * row[v];       \
            }                                                                                                   \
            for (int r = 0; r < ROWS; r++)                                                                      \
                for (int v = 0; v < PASS / WIDTH; v++) *(part *)(sums[r] + first + v * WIDTH) = made[r][v];     \
        }                                                                                                       \
    }
#ifdef __AVX512F__
DEFINE_EXPAND(1, 64) DEFINE_EXPAND(4, 64)
#else
DEFINE_EXPAND(1, 64) DEFINE_EXPAND(4, 16)
#endif

static void expand(const Weights *w, const float *u, int64_t count, int64_t out, element *y, int64_t y_stride,
                   const float *base_bias) {
    for (int64_t at = 0; at < out; at += OUTPUTS) {
        const int64_t width = out - at > OUTPUTS ? OUTPUTS : out - at;
        for (int64_t r = 0, rows; r < count; r += rows) {
            _Alignas(64) float sums[4][OUTPUTS];
            rows = r + 4 <= count ? 4 : 1;
            (rows == 4 ? expand4 : expand1)(w->b + at * w->rank, u + r * w->rank, w->rank, sums);
            for (int64_t i = 0; i < rows; i++)
                add_to(w, sums[i], at, width, y + (r + i) * y_stride, base_bias);
        }
    }
}

// Add the sum over parts i of B_i u[i] to y. u[i]: [count, rank]
static void expand_parts(const Weights *const *parts, float *const *u, int num_parts, int64_t count, int64_t out,
                         element *y, int64_t y_stride, const float *base_bias) {
    for (int64_t at = 0; at < out; at += OUTPUTS) {
        const int64_t width = out - at > OUTPUTS ? OUTPUTS : out - at;
        for (int64_t r = 0, rows; r < count; r += rows) {
            _Alignas(64) float sums[4][OUTPUTS], more[4][OUTPUTS];
            rows = r + 4 <= count ? 4 : 1;
            for (int p = 0; p < num_parts; p++) {
                const int64_t rank = parts[p]->rank;
                (rows == 4 ? expand4 : expand1)(parts[p]->b + at * rank, u[p] + r * rank, rank, p ? more : sums);
                if (!p) continue;
                for (int64_t i = 0; i < rows; i++)
                    for (int c = 0; c < OUTPUTS; c++) sums[i][c] += more[i][c];
            }
            for (int64_t i = 0; i < rows; i++)
                add_to(parts[0], sums[i], at, width, y + (r + i) * y_stride, base_bias);
        }
    }
}

// u = A x; of embeddings a row of A, [num_in, rank], selected by the token's id.
static void multiply_a(const Weights *w, const Part *part, const Task *task, const int64_t *ids, float *u) {
    if (!ids) {
        shrink(w, part->x + task->first * part->x_stride, part->x_stride, task->count, part->num_in, u);
        return;
    }
    for (int64_t r = 0; r < task->count; r++)
        for (int64_t j = 0; j < w->rank; j++) u[r * w->rank + j] = to_float(w->a[ids[task->first + r] * w->rank + j]);
}

// The numbers that `add_sum` needs for a row.
static int64_t rank_of(const Weights *slots, int32_t slot) {
    const Composition *sum = slots[slot].sum;
    if (!sum) return slots[slot].rank;
    int64_t rank = 0, most = 0;
    for (int32_t i = 0; i < sum->count; i++) {
        const int64_t own = slots[sum->slots[i]].rank;
        rank += own;
        most = own > most ? own : most;
    }
    return rank + most;
}

// Add a sum of adapters to the rows of a task.
static void add_sum(const Part *part, const Task *task, const int64_t *ids) {
    const Composition *sum = part->slots[task->slot].sum;
    const Weights *parts[MOST_PARTS];
    float *u[MOST_PARTS], expands[MOST_PARTS], *memory = calloc(MOST_ROWS * rank_of(part->slots, task->slot), sizeof(float));
    float *end = memory;
    int num_parts = 0;
    for (int32_t i = 0; i < sum->count; i++) {
        const Weights *w = part->slots + sum->slots[i];
        if (!w->rank) continue;
        const float factor = sum->shares_factors ? sum->shrink[i] : sum->shrink[i] * sum->expand[i];
        multiply_a(w, part, task, ids, end);
        for (int64_t k = 0; k < task->count * w->rank; k++) end[k] *= factor;
        parts[num_parts] = w, u[num_parts] = end, expands[num_parts++] = sum->expand[i];
        end += task->count * w->rank;
    }
    if (sum->shares_factors) {  // of equal ranks; `end` becomes the sum of all
        for (int p = 0; p < num_parts; p++)
            for (int64_t k = 0; k < task->count * parts[p]->rank; k++) end[k] += u[p][k];
        for (int p = 0; p < num_parts; p++)
            for (int64_t k = 0; k < task->count * parts[p]->rank; k++) u[p][k] = expands[p] * end[k];
    }
    if (num_parts)
        expand_parts(parts, u, num_parts, task->count, part->num_out, part->y + task->first * part->y_stride, part->y_stride,
               part->base_bias);
    free(memory);
}

static void add_task(const Part *part, const Task *task, const int64_t *ids) {
    const Weights *w = part->slots + task->slot;
    if (is_empty(part->slots, task->slot)) return;
    if (w->sum) {
        add_sum(part, task, ids);
        return;
    }
    float u[MOST_ROWS * (w->rank + RANKS)];  // the least length of an array is one
    multiply_a(w, part, task, ids, u);
    expand(w, u, task->count, part->num_out, part->y + task->first * part->y_stride, part->y_stride, part->base_bias);
}

// This thread's tasks of all parts.
static void add_tasks(const Part *parts, int num_parts, const Task *tasks, int num_tasks) {
#pragma omp for schedule(dynamic) nowait
    for (int i = 0; i < num_parts * num_tasks; i++) add_task(parts + i % num_parts, tasks + i / num_parts, NULL);
}

// Compute every task of every part.
void adapt(const Part *parts, int num_parts, const Task *tasks, int num_tasks, int threads) {
    int64_t work = 0;
    for (int i = 0; i < num_parts * num_tasks; i++) {
        const Part *part = parts + i % num_parts;
        const Task *task = tasks + i / num_parts;
        work += rank_of(part->slots, task->slot) * task->count * (part->num_in + part->num_out);
    }
    PARALLEL(work >= ALONE, add_tasks(parts, num_parts, tasks, num_tasks);)
}

// Token embeddings.
void adapt_embedding(const Part *part, const int64_t *ids, const Task *tasks, int num_tasks) {
    for (int i = 0; i < num_tasks; i++) add_task(part, tasks + i, ids);
}

// One adapter's factors of one module as in its file, A [rank, in] with a_stride between rows and B [out, rank], and the
// memory for the packed factors.
typedef struct {
    const element *a, *b;
    element *packed_a, *packed_b;
    int64_t rank, num_in, num_out, is_embedding, a_stride;
} Factors;

typedef struct {
    const Factors *factors;
    int count, in_rows, niceness;
    int next;  // index of the next factors, of all threads
} Packing;

// For kernels that read rows: A as it is, of embeddings [in, rank], and B as [rank, out].
static void pack_rows(const Factors *f) {
    if (f->is_embedding)
        for (int64_t k = 0; k < f->num_in; k++)
            for (int64_t j = 0; j < f->rank; j++) f->packed_a[k * f->rank + j] = f->a[j * f->a_stride + k];
    else
        for (int64_t j = 0; j < f->rank; j++)
            memcpy(f->packed_a + j * f->num_in, f->a + j * f->a_stride, f->num_in * sizeof(element));
    // some outputs at a time: far apart, the rows of the result are written in whole lines
    for (int64_t at = 0; at < f->num_out; at += OUTPUTS) {
        int64_t there = f->num_out - at < OUTPUTS ? f->num_out - at : OUTPUTS;
        for (int64_t j = 0; j < f->rank; j++)
            for (int64_t c = at; c < at + there; c++) f->packed_b[j * f->num_out + c] = f->b[c * f->rank + j];
    }
}

static void pack_a(const Factors *f, int64_t wide_rank) {
    if (f->is_embedding) {
        for (int64_t k = 0; k < f->num_in; k++)
            for (int64_t j = 0; j < wide_rank; j++) f->packed_a[k * wide_rank + j] = j < f->rank ? f->a[j * f->a_stride + k] : 0;
        return;
    }
    element *to = f->packed_a;
    for (int64_t first = 0; first < wide_rank; first += RANKS)
        for (int64_t k = 0; k < f->num_in; k += STEP)
            for (int64_t j = first; j < first + RANKS; j++, to += STEP) {
                int64_t there = j >= f->rank ? 0 : f->num_in - k < STEP ? f->num_in - k : STEP;
                if (there) memcpy(to, f->a + j * f->a_stride + k, there * sizeof(element));
                if (there < STEP) memset(to + there, 0, (STEP - there) * sizeof(element));
            }
}

static void pack_b(const Factors *f, int64_t wide_rank) {
    for (int64_t at = 0; at < f->num_out; at += OUTPUTS) {
        element *to = f->packed_b + at * wide_rank;
        int64_t there = f->num_out - at < OUTPUTS ? f->num_out - at : OUTPUTS;
        if (there < OUTPUTS || f->rank < wide_rank) memset(to, 0, OUTPUTS * wide_rank * sizeof(element));
        for (int64_t c = 0; c < there; c++)
            for (int64_t j = 0; j < f->rank; j++) to[j * OUTPUTS + c] = f->b[(at + c) * f->rank + j];
    }
}

static void *pack_all(void *argument) {
    Packing *packing = argument;
#ifdef __linux__
    if (packing->niceness) setpriority(PRIO_PROCESS, syscall(SYS_gettid), getpriority(PRIO_PROCESS, 0) + packing->niceness);
#endif
    for (int i; (i = __atomic_fetch_add(&packing->next, 1, __ATOMIC_RELAXED)) < packing->count;) {
        const Factors *f = packing->factors + i;
        int64_t wide_rank = (f->rank + RANKS - 1) / RANKS * RANKS;
        if (packing->in_rows) {
            pack_rows(f);
        } else {
            pack_a(f, wide_rank);
            pack_b(f, wide_rank);
        }
    }
    return NULL;
}

// Lay factors out as `adapt` reads them, or in rows, in up to MOST_THREADS threads whose niceness is increased by
// `niceness`: touching memory for the first time costs several times as much as the copies. Returns when they have finished.
void pack(const Factors *factors, int count, int in_rows, int niceness, int num_threads) {
    Packing packing = {factors, count, in_rows, niceness, 0};
    pthread_t threads[MOST_THREADS];
    int started = 0;
    if (num_threads > MOST_THREADS) num_threads = MOST_THREADS;
    while (started < num_threads && pthread_create(threads + started, NULL, pack_all, &packing) == 0) started++;
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    if (started) return;
    packing.niceness = 0;  // no other thread: keep the caller's
    pack_all(&packing);
}
