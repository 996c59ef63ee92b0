// What targets.c and compiled decoder layers (kernels/cpu.c) share: adapters, and modules of the base with adapters.
#pragma once
#include "system/simd.h"

#define MOST_PARTS 32

// A sum of adapters that have factors alone: y += sum_i expand_i B_i h_i, where h_i = shrink_i A_i x, or with
// `shares_factors` the sum of these.
typedef struct {
    int32_t count, shares_factors;
    int32_t slots[MOST_PARTS];
    float shrink[MOST_PARTS], expand[MOST_PARTS];
} Composition;

// What one adapter adds to one module; rank, a multiple of 8, is 0 and pointers are NULL where it adds nothing.
typedef struct {
    int64_t rank;
    const element *a, *b;
    const float *scale, *bias;  // [out] or NULL
    const Composition *sum;     // of other slots, NULL for an adapter
} Weights;

// Rows `first` ... `first + count - 1` of the step belong to `slot`; count is at most MOST_ROWS.
typedef struct {
    int32_t slot, first, count;
} Task;

// One module of the base: its input and its output. `base_bias` [out] or NULL is what y holds in addition to W x.
typedef struct {
    const Weights *slots;
    const element *x;
    int64_t x_stride, num_in;
    element *y;
    int64_t y_stride, num_out;
    const float *base_bias;
} Part;

// Whether the adapter of a slot adds nothing to a module.
static inline int is_empty(const Weights *slots, int32_t slot) {
    const Weights *w = slots + slot;
    if (!w->sum) return !w->rank && !w->scale && !w->bias;
    for (int32_t i = 0; i < w->sum->count; i++)
        if (slots[w->sum->slots[i]].rank) return 0;
    return 1;
}
