// What targets.c and compiled decoder layers (kernels/cpu.c) share: adapters, and modules of the base with adapters.
#pragma once
#include "system/simd.h"

// What one adapter adds to one module; rank, a multiple of 8, is 0 and pointers are NULL where it adds nothing.
typedef struct {
    int64_t rank;
    const element *a, *b;
    const float *scale, *bias;  // [out] or NULL
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

static inline int is_empty(const Weights *w) { return !w->rank && !w->scale && !w->bias; }
