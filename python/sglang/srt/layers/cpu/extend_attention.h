// Causal attention of many queries per request over a paged KV cache (online softmax by blocks).

#pragma once

#include "decode_attention.h"

constexpr int64_t BK = 128;      // keys of one block; blocks start at multiples of BK
constexpr int64_t QROWS = 192;   // query rows (tokens x heads of a group) of one task, about
#if defined(__AVX512F__)
constexpr int MR = 6, NV = 4;
#else
constexpr int MR = 4, NV = 2;
#endif
constexpr int64_t NT = NV * VL;  // columns of one register tile

// C[R, NT] (+)= A[R, depth] * B[depth, NT]
template <int R>
static void gemm_tile(const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                      int64_t ldc, int64_t depth, bool add) {
  vf acc[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = add ? load(c + r * ldc + v * VL) : splat(0.0f);
  for (int64_t i = 0; i < depth; i++) {
    vf bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) bv[v] = load(b + i * ldb + v * VL);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vf av = splat(a[r * lda + i]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] += av * bv[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(c + r * ldc + v * VL, acc[r][v]);
}

static void gemm_block(const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                       int64_t ldc, int64_t rows, int64_t cols, int64_t depth, bool add) {
  for (int64_t n = 0; n < cols; n += NT) {
    int64_t r = 0;
    for (; r + MR <= rows; r += MR)
      gemm_tile<MR>(a + r * lda, lda, b + n, ldb, c + r * ldc + n, ldc, depth, add);
    for (; r < rows; r++)
      gemm_tile<1>(a + r * lda, lda, b + n, ldb, c + r * ldc + n, ldc, depth, add);
  }
}

// Work memory of one thread for one task.
struct ExtendScratch {
  std::vector<float> q, kt, v, s, o, mx, sum;
  int64_t width = 0;  // head_dim rounded up to whole register tiles

  void reserve(const Paged &a, int64_t rows) {
    width = (a.head_dim + NT - 1) / NT * NT;
    q.assign(rows * a.head_dim, 0.0f);
    kt.assign(a.head_dim * BK, 0.0f);
    v.assign(BK * width, 0.0f);
    s.resize(rows * BK);
    o.assign(rows * width, 0.0f);
    mx.assign(rows, -__builtin_inff());
    sum.assign(rows, 0.0f);
  }
};

// Gather one block of keys (transposed) and values. Columns past `len` keep older finite numbers:
// the mask gives them weight zero.
template <class T>
static void pack_block(const Paged &a, int64_t head, const int32_t *slots, int64_t len,
                       ExtendScratch &w) {
  const int64_t d = a.head_dim;
  for (int64_t t = 0; t < len; t++) {
    const T *k = (const T *)a.k + slots[t] * a.ldk + head * d;
    const T *v = (const T *)a.v + slots[t] * a.ldv + head * d;
    float *kt = w.kt.data() + t, *vt = w.v.data() + t * w.width;
    int64_t i = 0;
    for (; i + VL <= d; i += VL) {
      vf kv = load(k + i);
      store(vt + i, load(v + i));
#pragma GCC unroll 16
      for (int j = 0; j < VL; j++) kt[(i + j) * BK] = kv[j];
    }
    for (; i < d; i++) {
      kt[i * BK] = scalar(k + i);
      vt[i] = scalar(v + i);
    }
  }
}

// Online softmax of one row over one block; keys outside [lo, hi) of the block weigh nothing.
static void softmax_row(const Paged &a, float *s, int64_t lo, int64_t hi, float *o, int64_t width,
                        float &mx, float &sum) {
  const float inf = __builtin_inff();
  for (int64_t t = 0; t < lo; t++) s[t] = -inf;
  for (int64_t t = std::max<int64_t>(hi, 0); t < BK; t++) s[t] = -inf;
  if (hi <= lo) {
    for (int64_t t = 0; t < BK; t++) s[t] = 0.0f;
    return;
  }
  vf top = splat(-inf);
  for (int64_t t = 0; t < BK; t += VL) {
    vf x = load(s + t);
    if (a.logit_cap != 0.0f) {
      vf c = capped(x, a.logit_cap);
      x = x == -inf ? x : c;
      store(s + t, x);
    }
    top = x > top ? x : top;
  }
  const float m = std::max(mx, hmax(top));
  vf total = {};
  for (int64_t t = 0; t < BK; t += VL) {
    vf e = vexp(load(s + t) - m);
    store(s + t, e);
    total += e;
  }
  float keep = mx == -inf ? 0.0f : sexp(mx - m);
  sum = sum * keep + hsum(total);
  if (mx != m)
    for (int64_t i = 0; i < width; i += VL) store(o + i, load(o + i) * keep);
  mx = m;
}

// One task: query tokens [t0, t1) of a request and one KV head with its group of query heads.
struct ExtendTask {
  int64_t request, head, t0, t1;
};

struct ExtendArgs {
  const float *q;
  int64_t ldq;
  float *out;
  int64_t ldo;
  const int64_t *req_idx, *prefix_lens, *start;  // start [bs + 1]: first query row of a request
};

static void extend_task(const Paged &a, const ExtendArgs &e, const ExtendTask &task,
                        ExtendScratch &w) {
  const int64_t group = a.q_heads / a.kv_heads, d = a.head_dim, b = task.request;
  const int64_t rows = (task.t1 - task.t0) * group;
  w.reserve(a, rows);
  for (int64_t r = 0; r < rows; r++) {
    const float *q = e.q + (e.start[b] + task.t0 + r / group) * e.ldq +
                     (task.head * group + r % group) * d;
    for (int64_t i = 0; i < d; i++) w.q[r * d + i] = q[i] * a.scaling;
  }
  const int64_t first = e.prefix_lens[b] + task.t0;  // position of the first query
  const int64_t end = e.prefix_lens[b] + task.t1;    // keys [0, end) matter
  const int64_t low = a.window > 0 ? std::max<int64_t>(0, first - a.window + 1) : 0;
  const int32_t *slots = e.req_idx[b] * a.ld_table + a.req_to_token;
  for (int64_t k0 = low / BK * BK; k0 < end; k0 += BK) {
    const int64_t len = std::min(BK, end - k0);
    switch (a.format) {
      case BF16: pack_block<bf16>(a, task.head, slots + k0, len, w); break;
      case FP16: pack_block<fp16>(a, task.head, slots + k0, len, w); break;
      default: pack_block<float>(a, task.head, slots + k0, len, w); break;
    }
    gemm_block(w.q.data(), d, w.kt.data(), BK, w.s.data(), BK, rows, BK, d, false);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t pos = first + r / group;
      const int64_t lo = a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1 - k0) : 0;
      softmax_row(a, &w.s[r * BK], std::min(lo, BK), std::min(BK, pos + 1 - k0),
                  &w.o[r * w.width], w.width, w.mx[r], w.sum[r]);
    }
    gemm_block(w.s.data(), BK, w.v.data(), w.width, w.o.data(), w.width, rows, w.width, BK, true);
  }
  for (int64_t r = 0; r < rows; r++) {
    float *o = e.out + (e.start[b] + task.t0 + r / group) * e.ldo +
               (task.head * group + r % group) * d;
    float inv = 1.0f / w.sum[r];
    for (int64_t i = 0; i < d; i++) o[i] = w.o[r * w.width + i] * inv;
  }
}
