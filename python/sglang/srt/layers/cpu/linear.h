// y = x W^T for few rows x and weights in several formats.

#pragma once

#include "simd.h"

// One weight matrix [m, k], row-major without gaps. native.py mirrors this struct field by field.
struct Weight {
  const void *data;
  const float *scale;  // [m] for INT8, else null
  const float *bias;   // [m] or null
  int64_t m, k;
  int64_t format;
};

// First `len` < VL values, zeros behind them.
template <class T>
INLINE vf load_part(const T *p, int64_t len) {
  T buffer[VL] = {};
  memcpy(buffer, p, len * sizeof(T));
  return load(buffer);
}

// R weight rows times N activation rows. Every (row, row) pair has its own accumulator that runs
// over k in steps of VL, so tiling never changes the order of a sum. Rows are too short for the
// hardware to see that the next tile follows: each cache line asks for its counterpart there.
template <class W, int R, int N>
INLINE void dot_tile(const W *w, int64_t k, const float *x, int64_t ldx, float out[R][N]) {
  constexpr int LINE = 64 / sizeof(W);
  vf acc[R][N] = {};
  auto step = [&](int64_t i, auto &&get) __attribute__((always_inline)) {
    vf wv[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) wv[r] = get(w + r * k + i);
#pragma GCC unroll 8
    for (int c = 0; c < N; c++) {
      vf xv = get(x + c * ldx + i);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r][c] += wv[r] * xv;
    }
  };
  auto whole = [](const auto *p) __attribute__((always_inline)) { return load(p); };
  int64_t i = 0;
  for (; i + LINE <= k; i += LINE) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) __builtin_prefetch(w + (R + r) * k + i);
#pragma GCC unroll 8
    for (int u = 0; u < LINE; u += VL) step(i + u, whole);
  }
  for (; i + VL <= k; i += VL) step(i, whole);
  if (i < k)
    step(i, [&](const auto *p) __attribute__((always_inline)) { return load_part(p, k - i); });
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < N; c++) out[r][c] = hsum(acc[r][c]);
}

template <class W, int R, int N>
static void dot_rows(const Weight &wt, const float *x, int64_t ldx, float *y, int64_t ldy,
                     int64_t row) {
  float out[R][N];
  dot_tile<W, R, N>((const W *)wt.data + row * wt.k, wt.k, x, ldx, out);
  for (int r = 0; r < R; r++) {
    float scale = wt.scale ? wt.scale[row + r] : 1.0f;
    for (int c = 0; c < N; c++) {
      float v = wt.scale ? out[r][c] * scale : out[r][c];
      y[c * ldy + row + r] = wt.bias ? v + wt.bias[row + r] : v;
    }
  }
}

// Tile heights that fill the register file (32 vectors with AVX-512, 16 elsewhere).
#if defined(__AVX512F__)
constexpr int MAX_N = 8;
constexpr int tile_rows(int n) { return n == 1 ? 8 : n == 2 ? 8 : n <= 6 ? 4 : 3; }
#else
constexpr int MAX_N = 4;
constexpr int tile_rows(int n) { return n == 1 ? 8 : n == 2 ? 4 : n == 3 ? 3 : 2; }
#endif

template <class W, int N>
static void linear_span(const Weight &wt, const float *x, int64_t ldx, float *y, int64_t ldy,
                        int64_t r0, int64_t r1) {
  constexpr int R = tile_rows(N);
  int64_t r = r0;
  for (; r + R <= r1; r += R) dot_rows<W, R, N>(wt, x, ldx, y, ldy, r);
  for (; r < r1; r++) dot_rows<W, 1, N>(wt, x, ldx, y, ldy, r);
}

template <class W>
static void linear_span_n(const Weight &wt, const float *x, int64_t ldx, float *y, int64_t ldy,
                          int64_t n, int64_t r0, int64_t r1) {
  for (int64_t c = 0; c < n; c += MAX_N) {
    const float *xc = x + c * ldx;
    float *yc = y + c * ldy;
    switch (std::min<int64_t>(MAX_N, n - c)) {
      case 1: linear_span<W, 1>(wt, xc, ldx, yc, ldy, r0, r1); break;
      case 2: linear_span<W, 2>(wt, xc, ldx, yc, ldy, r0, r1); break;
      case 3: linear_span<W, 3>(wt, xc, ldx, yc, ldy, r0, r1); break;
      case 4: linear_span<W, 4>(wt, xc, ldx, yc, ldy, r0, r1); break;
#if defined(__AVX512F__)
      case 5: linear_span<W, 5>(wt, xc, ldx, yc, ldy, r0, r1); break;
      case 6: linear_span<W, 6>(wt, xc, ldx, yc, ldy, r0, r1); break;
      case 7: linear_span<W, 7>(wt, xc, ldx, yc, ldy, r0, r1); break;
      case 8: linear_span<W, 8>(wt, xc, ldx, yc, ldy, r0, r1); break;
#endif
    }
  }
}

// Rows that a thread takes at a time: whole tiles of every height, some ten microseconds of
// reading, and enough pieces that the threads end together.
static int64_t piece_rows(const Weight &wt) {
  const int64_t row_bytes = wt.k * (wt.format == F32 ? 4 : wt.format == INT8 ? 1 : 2);
  int64_t rows = 24;
  while (rows * row_bytes < 65536 && wt.m / (2 * rows) >= 16 * omp_get_num_threads()) rows *= 2;
  return rows;
}

// Runs inside a parallel region; ends with a barrier. Pieces go out on demand: a thread that the
// system takes away for a moment does not hold up the other ones.
static void linear_team(const Weight &wt, const float *x, int64_t ldx, float *y, int64_t ldy,
                        int64_t n) {
  const int64_t piece = piece_rows(wt), pieces = (wt.m + piece - 1) / piece;
#pragma omp for schedule(dynamic, 1)
  for (int64_t p = 0; p < pieces; p++) {
    int64_t r0 = p * piece, r1 = std::min(wt.m, r0 + piece);
    switch (wt.format) {
      case F32: linear_span_n<float>(wt, x, ldx, y, ldy, n, r0, r1); break;
      case BF16: linear_span_n<bf16>(wt, x, ldx, y, ldy, n, r0, r1); break;
      case FP16: linear_span_n<fp16>(wt, x, ldx, y, ldy, n, r0, r1); break;
      default: linear_span_n<int8_t>(wt, x, ldx, y, ldy, n, r0, r1); break;
    }
  }
}
