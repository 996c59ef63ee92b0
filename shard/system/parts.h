// Vectors of floats as wide as the processor's registers, and exp. A loop over several of them stays in registers, which
// a vector type that is wider than a register does not.
#pragma once
#include "system/simd.h"
#if BF16 && defined(__AVX2__)
#include <immintrin.h>
#endif

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

#if !BF16
INLINE part load_part(const element *p) { return *(const part *)p; }
#elif defined(__AVX512F__)
INLINE part load_part(const element *p) {
    return (part)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
#elif defined(__AVX2__)
INLINE part load_part(const element *p) {
    return (part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
#else
INLINE part load_part(const element *p) {
    typedef uint16_t narrow __attribute__((vector_size(2 * WIDTH), aligned(2)));
    typedef uint32_t wide __attribute__((vector_size(4 * WIDTH)));
    return (part)(__builtin_convertvector(*(const narrow *)p, wide) << 16);
}
#endif

INLINE void store_part(element *p, part x) {  // rounded as by from_float
#if !BF16
    *(part *)p = x;
#else
    typedef uint32_t upart __attribute__((vector_size(4 * WIDTH)));
    const upart bits = (upart)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const ipart made = (ipart)select_part(x != x, (part)(bits >> 16 | 0x40), (part)rounded);
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)made));
#elif defined(__AVX2__)
    const __m256i both = (__m256i)made;
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
#else
    typedef uint16_t narrow __attribute__((vector_size(2 * WIDTH), aligned(2)));
    *(narrow *)p = __builtin_convertvector(made, narrow);
#endif
#endif
}

// The first `count` lanes only; the others are loaded as zeros.
INLINE part load_partial(const element *p, int64_t count) {
    if (count >= WIDTH) return load_part(p);
    element some[WIDTH] = {0};
    memcpy(some, p, count * sizeof *p);
    return load_part(some);
}

INLINE part load_partial_floats(const float *p, int64_t count) {
    if (count >= WIDTH) return *(const part *)p;
    float some[WIDTH] = {0};
    memcpy(some, p, count * sizeof *p);
    return *(const part *)some;
}

INLINE void store_partial(element *p, part x, int64_t count) {
    if (count >= WIDTH) {
        store_part(p, x);
        return;
    }
    element some[WIDTH];
    store_part(some, x);
    memcpy(p, some, count * sizeof *p);
}

// The sum of 16 lanes, by halves
INLINE float total16(const part *sums) {
    part x = sums[0];
    if (WIDTH < 16) x += sums[1];
    for (int w = WIDTH / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] += x[i + w];
    return x[0];
}

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
