// Vectors of floats as wide as the processor's registers, and exp. A loop over several of them stays in registers, which
// a vector type that is wider than a register does not.
#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#define FROM_ZERO {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define WIDTH 8
#define FROM_ZERO {0, 1, 2, 3, 4, 5, 6, 7}
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float part __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t ipart __attribute__((vector_size(4 * WIDTH), aligned(4)));

INLINE part splat(float x) { return x - (part){0}; }

INLINE part select_part(ipart mask, part a, part b) { return (part)((mask & (ipart)a) | (~mask & (ipart)b)); }

// exp for x <= 0; below -87 it is 0.
INLINE part exp_part(part x) {
    ipart tiny = x < splat(-87.0f);
    part t = select_part(tiny, splat(-87.0f), x);
    part z = t * splat(1.44269504088896341f) + splat(12582912.0f);  // round to nearest by magic number
    ipart n = (ipart)z - (ipart)splat(12582912.0f);
    part f = z - splat(12582912.0f);
    t = t - f * splat(0.693359375f);
    t = t - f * splat(-2.12194440e-4f);
    part y = splat(1.9875691500e-4f);
    y = y * t + splat(1.3981999507e-3f);
    y = y * t + splat(8.3334519073e-3f);
    y = y * t + splat(4.1665795894e-2f);
    y = y * t + splat(1.6666665459e-1f);
    y = y * t + splat(5.0000001201e-1f);
    y = y * t * t + t + splat(1.0f);
    return select_part(tiny, splat(0.0f), y * (part)((n + 127) << 23));
}
