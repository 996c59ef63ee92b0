// What the C sources share: elements in memory (bfloat16 with -DBF16=1, else float32), vectors of 16 floats, and loops by
// several threads.
#pragma once
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

// Each thread's part of a computation, or a loop, by `threads` threads (a variable where it stands) if IS_LONG, else by
// the caller alone without a parallel region: for each region libgomp makes a team, and calls the system at its end, also
// for one thread.
#define PARALLEL(IS_LONG, ...)                       \
    if (threads > 1 && (IS_LONG)) {                  \
        _Pragma("omp parallel num_threads(threads)") \
        { __VA_ARGS__ }                              \
    } else {                                         \
        __VA_ARGS__                                  \
    }
#define PARALLEL_FOR(IS_LONG, ...)                                        \
    if (threads > 1 && (IS_LONG)) {                                       \
        _Pragma("omp parallel for num_threads(threads) schedule(static)") \
        __VA_ARGS__                                                       \
    } else {                                                              \
        __VA_ARGS__                                                       \
    }

#if BF16
typedef bf16 element;
static inline float to_float(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline element from_float(float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (element)((bits >> 16) | 0x40);
    return (element)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
typedef float element;
static inline float to_float(element x) { return x; }
static inline element from_float(float x) { return x; }
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && (!BF16 || defined(__AVX512BF16__))
#define WITH_AVX512
#include <immintrin.h>

typedef __m512 vec16;
typedef __mmask16 mask16;
static inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }

#if BF16
static inline __m512 widen16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
static inline __m256i narrow16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
static inline __m512 round16(__m512 x) { return widen16(narrow16(x)); }
static inline __m512 load16(const element *p) { return widen16(_mm256_loadu_si256((const __m256i *)p)); }
static inline __m512 load_lanes(const element *p, __mmask16 mask) { return widen16(_mm256_maskz_loadu_epi16(mask, p)); }
static inline void store16(element *p, __m512 x) { _mm256_storeu_si256((__m256i *)p, narrow16(x)); }
static inline void store_lanes(element *p, __mmask16 mask, __m512 x) { _mm256_mask_storeu_epi16(p, mask, narrow16(x)); }
#else
static inline __m512 load16(const element *p) { return _mm512_loadu_ps(p); }
static inline __m512 load_lanes(const element *p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
static inline void store_lanes(element *p, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(p, mask, x); }
#endif
static inline vec16 load_floats(const float *p, mask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
static inline vec16 splat16(float x) { return _mm512_set1_ps(x); }
static inline float sum16(vec16 x) { return _mm512_reduce_add_ps(x); }
#else
// The same in vectors of the compiler, for every other processor.
typedef float vec16 __attribute__((vector_size(64)));
typedef int32_t ivec16 __attribute__((vector_size(64)));
typedef uint32_t uvec16 __attribute__((vector_size(64)));
typedef uint16_t hvec16 __attribute__((vector_size(32)));
typedef int64_t mask16;  // the number of lanes

static inline mask16 first_lanes(int64_t n) { return n >= 16 ? 16 : n < 0 ? 0 : n; }
static inline vec16 load_floats(const float *p, mask16 mask) {
    vec16 x = {0};
    if (mask == 16)
        memcpy(&x, p, sizeof x);
    else
        for (int64_t lane = 0; lane < mask; lane++) x[lane] = p[lane];
    return x;
}
static inline vec16 splat16(float x) { return x - (vec16){0}; }
// All bits of the lanes whose sign is set. gcc compares vectors that are wider than a register lane by lane.
static inline ivec16 sign_mask16(vec16 x) { return (ivec16)x >> 31; }
static inline float sum16(vec16 x) {  // by halves
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) x[lane] += x[lane + half];
    return x[0];
}

#if BF16
static inline vec16 widen16(hvec16 x) { return (vec16)(__builtin_convertvector(x, uvec16) << 16); }
static inline hvec16 narrow16(vec16 x) {  // as from_float
    uvec16 bits = (uvec16)x, is_nan = (uvec16)sign_mask16((vec16)(0x7f800000 - (bits & 0x7fffffff)));
    uvec16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
    return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), hvec16);
}
static inline vec16 round16(vec16 x) { return widen16(narrow16(x)); }
static inline vec16 load_lanes(const element *p, mask16 mask) {
    hvec16 x = {0};
    if (mask == 16)
        memcpy(&x, p, sizeof x);
    else
        for (int64_t lane = 0; lane < mask; lane++) x[lane] = p[lane];
    return widen16(x);
}
static inline void store_lanes(element *p, mask16 mask, vec16 x) {
    hvec16 narrow = narrow16(x);
    if (mask == 16)
        memcpy(p, &narrow, sizeof narrow);
    else
        for (int64_t lane = 0; lane < mask; lane++) p[lane] = narrow[lane];
}
#else
static inline vec16 load_lanes(const element *p, mask16 mask) { return load_floats(p, mask); }
static inline void store_lanes(element *p, mask16 mask, vec16 x) {
    if (mask == 16)
        memcpy(p, &x, sizeof x);
    else
        for (int64_t lane = 0; lane < mask; lane++) p[lane] = x[lane];
}
#endif
static inline vec16 load16(const element *p) { return load_lanes(p, 16); }
static inline void store16(element *p, vec16 x) { store_lanes(p, 16, x); }
#endif
