// Vectors of VL floats, loads that widen to float32, and exp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#else
#define VL 8
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));

// Types of what the kernels read; native.py has the same numbers.
enum Format { F32 = 0, BF16 = 1, FP16 = 2, INT8 = 3 };

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf v) { *(vfu *)p = v; }

// Widening loads by intrinsics where there are some: compilers open-code the vector conversions.
INLINE vf load(const bf16 *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
  vu wide = __builtin_convertvector(*(const vh *)p, vu) << 16;
  return (vf)wide;
#endif
}

INLINE vf load(const fp16 *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  // Exact for finite values: put exponent and mantissa in float32's place, then fix the bias.
  vu wide = __builtin_convertvector(*(const vh *)p, vu);
  vf magnitude = (vf)((wide & 0x7fffu) << 13) * 0x1p112f;
  return (vf)((vu)magnitude | ((wide & 0x8000u) << 16));
#endif
}

INLINE vf load(const int8_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(*(const vb *)p, vi), vf);
#endif
}

INLINE float scalar(const float *p) { return *p; }
INLINE float scalar(const int8_t *p) { return (float)*p; }
INLINE float scalar(const bf16 *p) {
  uint32_t u = (uint32_t)p->bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE float scalar(const fp16 *p) {
  uint32_t u = (uint32_t)(p->bits & 0x7fff) << 13;
  float f;
  memcpy(&f, &u, 4);
  f *= 0x1p112f;
  return p->bits & 0x8000 ? -f : f;
}

// Rounding to nearest, ties to even.
INLINE void narrow(float x, bf16 *p) {
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE void narrow(float x, fp16 *p) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
  if (size > 0x7f800000) {  // not a number
    p->bits = (uint16_t)(sign | 0x7e00);
  } else if (size >= 0x47800000) {  // 2^16 and above
    p->bits = (uint16_t)(sign | 0x7c00);
  } else if (size < 0x38800000) {  // below 2^-14: the addition rounds to steps of 2^-24
    float magnitude;
    memcpy(&magnitude, &size, 4);
    magnitude += 0.5f;
    memcpy(&u, &magnitude, 4);
    p->bits = (uint16_t)(sign | (u - 0x3f000000));
  } else {  // another bias of the exponent; rounding up may reach infinity
    p->bits = (uint16_t)(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
  }
}

// Subtracting zero is the one operation that compilers may drop: what stays is a broadcast.
INLINE vf splat(float s) { return s - vf{}; }

// Sum of all lanes, as a tree (a chain of adds would cost more than a short row's products).
INLINE float hsum(vf v) {
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
#if VL == 16
  v8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  v8 a = v;
#endif
  v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

INLINE float hmax(vf v) {
  float a[VL];
  memcpy(a, &v, sizeof a);
  for (int half = VL / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
  return a[0];
}

// exp to about 1 ulp; exactly 0 below -87 (also for -inf).
INLINE vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf hi = x > 88.0f ? splat(88.0f) : x;
  vf c = hi < -87.0f ? splat(-87.0f) : hi;
  vf n = c * 1.44269504088896341f + magic - magic;
  vf r = c - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi e = (__builtin_convertvector(n, vi) + 127) << 23;
  vf result = p * (vf)e;
  return x < -87.0f ? splat(0.0f) : result;
}

INLINE float sexp(float x) { return vexp(splat(x))[0]; }
