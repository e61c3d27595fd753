// Float32 CPU kernels for batches of few rows: matrix-vector products, the elementwise ops around
// them and attention over a paged KV cache.
//
// Contract with native.py, which checks shapes and types before it calls:
//  * plain C entry points (prefix hs_), raw pointers, strides counted in elements;
//  * `nt` is the number of OpenMP threads; 1 never touches the thread pool;
//  * the value of one output row depends neither on the other rows of the call nor on `nt`
//    (fixed summation order), so a request gets the same bits alone and inside a batch.
//
// SIMD is written with the compiler's vector extensions: 16 lanes with AVX-512, 8 lanes elsewhere
// (which the compiler lowers to whatever the machine has).

#include "decode_attention.h"
#include "digest.h"
#include "elementwise.h"
#include "extend_attention.h"
#include "layer_stack.h"
#include "linear.h"

extern "C" void hs_linear(const void *data, int64_t format, const float *scale, const float *bias,
                          int64_t m, int64_t k, const float *x, int64_t ldx, float *y, int64_t ldy,
                          int64_t n, int nt) {
  const Weight wt = {data, scale, bias, m, k, format};
#pragma omp parallel num_threads(nt)
  linear_team(wt, x, ldx, y, ldy, n);
}

extern "C" void hs_rmsnorm(const float *x, int64_t ldx, float *residual, int64_t ldr,
                           const float *weight, float offset, float eps, float *out, int64_t ldo,
                           int64_t n, int64_t heads, int64_t d, int nt) {
  if (n * heads * d < 16384) nt = 1;  // waking the pool would take longer than the work
#pragma omp parallel for num_threads(nt) schedule(static)
  for (int64_t i = 0; i < n * heads; i++) {
    int64_t r = i / heads, h = i % heads * d;
    rmsnorm_row(x + r * ldx + h, residual ? residual + r * ldr + h : nullptr, weight, offset, eps,
                d, out + r * ldo + h);
  }
}

extern "C" void hs_act_and_mul(const float *x, int64_t ldx, float *out, int64_t ldo, int64_t n,
                               int64_t d, int act, int nt) {
  if (n * d < 8192) nt = 1;
#pragma omp parallel for num_threads(nt) schedule(static)
  for (int64_t r = 0; r < n; r++) act_span(x + r * ldx, d, act, out + r * ldo, 0, d);
}

extern "C" void hs_rotary(const int64_t *positions, float *q, int64_t ldq, int64_t q_heads,
                          float *k, int64_t ldk, int64_t k_heads, const float *cos_sin,
                          int64_t head_dim, int64_t rot_dim, int64_t n, int nt) {
  if (n * (q_heads + k_heads) * head_dim < 16384) nt = 1;
#pragma omp parallel for num_threads(nt) schedule(static)
  for (int64_t r = 0; r < n; r++) {
    const float *cs = cos_sin + positions[r] * rot_dim;
    rotary_row(q + r * ldq, cs, q_heads, head_dim, rot_dim);
    rotary_row(k + r * ldk, cs, k_heads, head_dim, rot_dim);
  }
}

extern "C" void hs_word_sums(const char *data, int64_t num_bytes, uint64_t *sums, int nt) {
  WordSums total = word_sums(data, num_bytes, nt);
  sums[0] = total.first;
  sums[1] = total.second;
}

extern "C" void hs_decode_attention(const Paged *a, const float *q, int64_t ldq,
                                    const int64_t *req_idx, const int64_t *seq_lens, int64_t bs,
                                    float *out, int64_t ldo, int nt) {
  DecodePlan &plan = decode_plan;  // the caller's, also for the team
  plan_decode(plan, *a, seq_lens, bs);
#pragma omp parallel num_threads(nt)
  decode_team(plan, *a, q, ldq, req_idx, seq_lens, bs, out, ldo);
}

extern "C" void hs_extend_attention(const Paged *a, const float *q, int64_t ldq,
                                    const int64_t *req_idx, const int64_t *prefix_lens,
                                    const int64_t *start, int64_t bs, float *out, int64_t ldo,
                                    int nt) {
  const ExtendArgs e = {q, ldq, out, ldo, req_idx, prefix_lens, start};
  const int64_t group = a->q_heads / a->kv_heads;
  // Large tasks pack keys less often, but all threads should have some.
  int64_t rows = QROWS;
  while (rows > 24 && start[bs] * a->q_heads / rows < 4 * nt) rows /= 2;
  const int64_t step = std::max<int64_t>(1, rows / group);
  std::vector<ExtendTask> tasks;
  for (int64_t b = 0; b < bs; b++) {
    const int64_t n = start[b + 1] - start[b];
    for (int64_t h = 0; h < a->kv_heads; h++)
      for (int64_t t = 0; t < n; t += step) tasks.push_back({b, h, t, std::min(n, t + step)});
  }
  // Late queries see the most keys: starting with them leaves small tasks for the end.
  std::stable_sort(tasks.begin(), tasks.end(), [&](const ExtendTask &x, const ExtendTask &y) {
    return prefix_lens[x.request] + x.t1 > prefix_lens[y.request] + y.t1;
  });
#pragma omp parallel num_threads(nt)
  {
    ExtendScratch w;
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.size(); i++) extend_task(*a, e, tasks[i], w);
  }
}

extern "C" void hs_layer_stack(const Stack *s, const float *hidden, const int64_t *positions,
                               const int64_t *slots, const int64_t *req_idx,
                               const int64_t *seq_lens, int64_t n, float *out, int nt) {
  Scratch &work = scratch;  // the caller's, also for the team
  work.reserve(*s, n);
  plan_decode(work.plan, s->paged, seq_lens, n);
  const Rows rows = {positions, slots, req_idx, seq_lens, n};
#pragma omp parallel num_threads(nt)
  stack_team(*s, rows, hidden, out, work);
}

// Read `count` floats once with all threads and return their sum: the bandwidth to compare with.
extern "C" float hs_read(const float *p, int64_t count, int nt) {
  constexpr int64_t PIECE = 1 << 16;
  float total = 0;
#pragma omp parallel for num_threads(nt) schedule(static) reduction(+ : total)
  for (int64_t c = 0; c < count / PIECE; c++) {
    const float *q = p + c * PIECE;
    vf acc[8] = {};
    for (int64_t i = 0; i < PIECE; i += 8 * VL)
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) acc[j] += load(q + i + j * VL);
    for (int j = 0; j < 8; j++) total += hsum(acc[j]);
  }
  return total;
}

// For the test that native.py mirrors the layouts.
extern "C" int64_t hs_sizeof(int which) {
  return which == 0 ? sizeof(Paged) : which == 1 ? sizeof(Layer) : sizeof(Stack);
}

extern "C" int hs_vector_lanes() { return VL; }
