// Attention of one query per request over a paged KV cache.

#pragma once

#include "simd.h"

// Float32, bfloat16 or float16 KV of one layer: [rows, kv_heads, head_dim], heads without gaps.
// native.py mirrors this struct field by field.
struct Paged {
  void *k, *v;
  int64_t ldk, ldv;             // elements from one row (slot) to the next
  int64_t format;
  const int32_t *req_to_token;  // [requests, ld_table]: slot of each position
  int64_t ld_table;
  int64_t q_heads, kv_heads, head_dim;
  int64_t window;               // number of latest keys a query sees, itself included; 0 = all
  float scaling;
  float logit_cap;              // 0 = none, else cap * tanh(score / cap)
};

INLINE vf capped(vf s, float cap) {
  if (cap == 0.0f) return s;
  vf e = vexp(s * (2.0f / cap));
  return cap * (1.0f - 2.0f / (e + 1.0f));
}

// Keys of one task. Fixed, so that the order of the sums depends on nothing but the length.
constexpr int64_t SPLIT = 128;
constexpr int GMAX = 4;  // query heads that share one pass over the keys

template <class T>
INLINE void prefetch_row(const T *row, int64_t d) {
  for (int64_t i = 0; i < d; i += 64 / sizeof(T)) __builtin_prefetch(row + i);
}

// Slots are scattered, so the hardware cannot guess the next row: ask for the key some rows ahead
// and for the value that the second pass will need.
template <class T, int G>
static void decode_scores(const Paged &a, const float *q, const T *kbase, const T *vbase,
                          const int32_t *slots, int64_t len, float (*s)[SPLIT]) {
  constexpr int64_t AHEAD = 8;
  const int64_t d = a.head_dim;
  for (int64_t t = 0; t < std::min(len, AHEAD); t++) prefetch_row(kbase + slots[t] * a.ldk, d);
  for (int64_t t = 0; t < len; t++) {
    if (t + AHEAD < len) prefetch_row(kbase + slots[t + AHEAD] * a.ldk, d);
    prefetch_row(vbase + slots[t] * a.ldv, d);
    const T *key = kbase + slots[t] * a.ldk;
    vf acc[G] = {};
    int64_t i = 0;
    for (; i + VL <= d; i += VL) {
      vf kv = load(key + i);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[g] += load(q + g * d + i) * kv;
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
      float sum = hsum(acc[g]);
      for (int64_t j = i; j < d; j++) sum += q[g * d + j] * scalar(key + j);
      s[g][t] = sum * a.scaling;
    }
  }
}

// out[g][i0 .. i0+C*VL) = sum over keys of p * v
template <class T, int G, int C>
static void decode_values(const Paged &a, const T *vbase, const int32_t *slots, int64_t len,
                          const float (*p)[SPLIT], float *out, int64_t ldo, int64_t i0) {
  vf acc[G][C] = {};
  for (int64_t t = 0; t < len; t++) {
    const T *value = vbase + slots[t] * a.ldv + i0;
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      vf vv = load(value + c * VL);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[g][c] += p[g][t] * vv;
    }
  }
  for (int g = 0; g < G; g++)
    for (int c = 0; c < C; c++) store(out + g * ldo + i0 + c * VL, acc[g][c]);
}

// Unnormalised attention of G query heads over one piece of keys: out rows, maximum and sum.
template <class T, int G>
static void decode_piece(const Paged &a, const float *q, const T *k, const T *v,
                         const int32_t *slots, int64_t len, float *out, int64_t ldo, float *mx,
                         float *sum) {
  float s[G][SPLIT];
  decode_scores<T, G>(a, q, k, v, slots, len, s);
  const int64_t padded = (len + VL - 1) / VL * VL;
  for (int g = 0; g < G; g++) {
    if (a.logit_cap != 0.0f)
      for (int64_t t = 0; t < len; t++) s[g][t] = capped(splat(s[g][t]), a.logit_cap)[0];
    for (int64_t t = len; t < padded; t++) s[g][t] = -__builtin_inff();
    vf top = load(s[g]);
    for (int64_t t = VL; t < len; t += VL) {
      vf x = load(s[g] + t);
      top = x > top ? x : top;
    }
    const float m = hmax(top);
    vf total = {};
    for (int64_t t = 0; t < len; t += VL) {
      vf e = vexp(load(s[g] + t) - m);
      store(s[g] + t, e);
      total += e;
    }
    mx[g] = m;
    sum[g] = hsum(total);
  }
  const int64_t d = a.head_dim;
  int64_t i = 0;
  for (; i + 4 * VL <= d; i += 4 * VL) decode_values<T, G, 4>(a, v, slots, len, s, out, ldo, i);
  for (; i + VL <= d; i += VL) decode_values<T, G, 1>(a, v, slots, len, s, out, ldo, i);
  for (; i < d; i++)
    for (int g = 0; g < G; g++) {
      float acc = 0;
      for (int64_t t = 0; t < len; t++) acc += s[g][t] * scalar(v + slots[t] * a.ldv + i);
      out[g * ldo + i] = acc;
    }
}

template <class T>
static void decode_task(const Paged &a, const float *q, int64_t head, const int32_t *slots,
                        int64_t len, float *out, int64_t ldo, float *mx, float *sum) {
  const int64_t group = a.q_heads / a.kv_heads, d = a.head_dim;
  const T *k = (const T *)a.k + head * d, *v = (const T *)a.v + head * d;
  for (int64_t g = 0; g < group; g += GMAX) {
    const float *qg = q + g * d;
    float *og = out + g * ldo;
    switch (std::min<int64_t>(GMAX, group - g)) {
      case 1: decode_piece<T, 1>(a, qg, k, v, slots, len, og, ldo, mx + g, sum + g); break;
      case 2: decode_piece<T, 2>(a, qg, k, v, slots, len, og, ldo, mx + g, sum + g); break;
      case 3: decode_piece<T, 3>(a, qg, k, v, slots, len, og, ldo, mx + g, sum + g); break;
      default: decode_piece<T, 4>(a, qg, k, v, slots, len, og, ldo, mx + g, sum + g); break;
    }
  }
}

// Where the pieces of each request lie in the scratch memory. Made by one thread per call.
struct DecodePlan {
  std::vector<int64_t> first;  // [bs + 1] running number of pieces
  std::vector<int64_t> begin;  // [bs] first key seen
  std::vector<float> part;     // [pieces, q_heads, head_dim + 2]: values, maximum, sum
};

static void plan_decode(DecodePlan &plan, const Paged &a, const int64_t *seq_lens, int64_t bs) {
  plan.first.resize(bs + 1);
  plan.begin.resize(bs);
  plan.first[0] = 0;
  for (int64_t b = 0; b < bs; b++) {
    int64_t start = a.window > 0 ? std::max<int64_t>(0, seq_lens[b] - a.window) : 0;
    plan.begin[b] = start;
    plan.first[b + 1] = plan.first[b] + (seq_lens[b] - start + SPLIT - 1) / SPLIT;
  }
  size_t need = plan.first[bs] * a.q_heads * (a.head_dim + 2);
  if (plan.part.size() < need) plan.part.resize(need);
}

static void merge_pieces(const DecodePlan &plan, const Paged &a, int64_t b, int64_t head,
                         float *out) {
  const int64_t d = a.head_dim, ld = d + 2;
  const float *part = plan.part.data() + (plan.first[b] * a.q_heads + head) * ld;
  const int64_t pieces = plan.first[b + 1] - plan.first[b], step = a.q_heads * ld;
  float m = -__builtin_inff(), total = 0;
  for (int64_t s = 0; s < pieces; s++) m = std::max(m, part[s * step + d]);
  for (int64_t i = 0; i < d; i++) out[i] = 0;
  for (int64_t s = 0; s < pieces; s++) {
    const float *row = part + s * step;
    float w = sexp(row[d] - m);
    total += w * row[d + 1];
    int64_t i = 0;
    for (; i + VL <= d; i += VL) store(out + i, load(out + i) + w * load(row + i));
    for (; i < d; i++) out[i] += w * row[i];
  }
  float inv = pieces ? 1.0f / total : 0.0f;
  for (int64_t i = 0; i < d; i++) out[i] *= inv;
}

// Runs inside a parallel region; ends with a barrier.
static void decode_team(DecodePlan &plan, const Paged &a, const float *q, int64_t ldq,
                        const int64_t *req_idx, const int64_t *seq_lens, int64_t bs, float *out,
                        int64_t ldo) {
  const int64_t group = a.q_heads / a.kv_heads, d = a.head_dim, ld = d + 2;
  const int64_t tasks = plan.first[bs] * a.kv_heads;
#pragma omp for schedule(dynamic, 1)
  for (int64_t t = 0; t < tasks; t++) {
    const int64_t piece = t / a.kv_heads, head = t % a.kv_heads;
    const int64_t b =
        std::upper_bound(plan.first.begin(), plan.first.end(), piece) - plan.first.begin() - 1;
    const int64_t key0 = plan.begin[b] + (piece - plan.first[b]) * SPLIT;
    const int32_t *slots = a.req_to_token + req_idx[b] * a.ld_table + key0;
    const int64_t len = std::min(SPLIT, seq_lens[b] - key0);
    const float *qb = q + b * ldq + head * group * d;
    float *part = plan.part.data() + (piece * a.q_heads + head * group) * ld;
    float mx[64], sum[64];
    switch (a.format) {
      case BF16: decode_task<bf16>(a, qb, head, slots, len, part, ld, mx, sum); break;
      case FP16: decode_task<fp16>(a, qb, head, slots, len, part, ld, mx, sum); break;
      default: decode_task<float>(a, qb, head, slots, len, part, ld, mx, sum); break;
    }
    for (int64_t g = 0; g < group; g++) {
      part[g * ld + d] = mx[g];
      part[g * ld + d + 1] = sum[g];
    }
  }
#pragma omp for schedule(static)
  for (int64_t i = 0; i < bs * a.q_heads; i++)
    merge_pieces(plan, a, i / a.q_heads, i % a.q_heads,
                 out + i / a.q_heads * ldo + i % a.q_heads * d);
}

static thread_local DecodePlan decode_plan;
