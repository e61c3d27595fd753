// All decoder layers of one decode step in one parallel region.
//
// The operations and their order are those of the single calls, so are the results, bit by bit;
// what is saved is one wake-up of the threads and one Python call for each of some ten operations
// per layer. Pre-norm layers with a fused QKV and a fused gate/up product only.

#pragma once

#include "decode_attention.h"
#include "elementwise.h"
#include "linear.h"

// native.py mirrors this struct field by field.
struct Layer {
  Weight qkv, o, gate_up, down;
  const float *input_norm, *post_norm;  // [hidden]
  const float *q_norm, *k_norm;         // [head_dim], null where the model has none
  void *k, *v;                          // this layer's KV, shaped as Stack::paged says
};

// native.py mirrors this struct field by field.
struct Stack {
  const Layer *layers;
  int64_t num_layers, hidden, inter;
  const float *final_norm;  // [hidden]
  const float *cos_sin;     // [positions, rot_dim]
  int64_t rot_dim, act;
  float eps, norm_offset;
  Paged paged;  // its k and v are set layer by layer
};

// One decode step: row i is the newest token of request req_idx[i].
struct Rows {
  const int64_t *positions, *slots, *req_idx, *seq_lens;
  int64_t n;
};

struct Scratch {
  std::vector<float> qkv, attn, proj, gate_up, act;
  DecodePlan plan;

  void reserve(const Stack &s, int64_t n) {
    const Paged &p = s.paged;
    grow(qkv, n * (p.q_heads + 2 * p.kv_heads) * p.head_dim);
    grow(attn, n * p.q_heads * p.head_dim);
    grow(proj, n * s.hidden);
    grow(gate_up, n * 2 * s.inter);
    grow(act, n * s.inter);
  }
  static void grow(std::vector<float> &v, size_t size) {
    if (v.size() < size) v.resize(size);
  }
};

static thread_local Scratch scratch;

template <class T>
static void store_narrowed(const float *src, T *dst, int64_t d) {
  for (int64_t i = 0; i < d; i++) narrow(src[i], dst + i);
}

static void store_kv(const float *src, void *base, int64_t format, int64_t offset, int64_t d) {
  switch (format) {
    case BF16: store_narrowed(src, (bf16 *)base + offset, d); break;
    case FP16: store_narrowed(src, (fp16 *)base + offset, d); break;
    default: memcpy((float *)base + offset, src, d * sizeof(float)); break;
  }
}

// Norm and rotate every head of q and k, and store k and v in their slots. Ends with a barrier.
static void rope_team(const Stack &s, const Layer &layer, const Paged &p, const Rows &rows,
                      float *qkv) {
  const int64_t d = p.head_dim, heads = p.q_heads + 2 * p.kv_heads;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < rows.n * heads; i++) {
    const int64_t b = i / heads, h = i % heads;
    float *x = qkv + (b * heads + h) * d;
    const bool is_q = h < p.q_heads, is_v = h >= p.q_heads + p.kv_heads;
    if (!is_v) {
      const float *norm = is_q ? layer.q_norm : layer.k_norm;
      if (norm) rmsnorm_row(x, nullptr, norm, s.norm_offset, s.eps, d, x);
      rotary_row(x, s.cos_sin + rows.positions[b] * s.rot_dim, 1, d, s.rot_dim);
    }
    if (is_v)
      store_kv(x, p.v, p.format, rows.slots[b] * p.ldv + (h - p.q_heads - p.kv_heads) * d, d);
    else if (!is_q)
      store_kv(x, p.k, p.format, rows.slots[b] * p.ldk + (h - p.q_heads) * d, d);
  }
}

static void act_team(const Stack &s, int64_t n, const float *gate_up, float *out) {
  constexpr int64_t SPAN = 512;
  const int64_t spans = (s.inter + SPAN - 1) / SPAN;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < n * spans; i++) {
    const int64_t b = i / spans, i0 = i % spans * SPAN;
    act_span(gate_up + b * 2 * s.inter, s.inter, s.act, out + b * s.inter, i0,
             std::min(s.inter, i0 + SPAN));
  }
}

// Every thread keeps the residual stream and its norm for itself: adding and norming n short rows
// twice costs less than a barrier.
struct Stream {
  std::vector<float> residual, normed;

  void norm(const Stack &s, const float *add, const float *weight, int64_t n) {
    for (int64_t b = 0; b < n; b++) {
      float *res = residual.data() + b * s.hidden;
      rmsnorm_row(add ? add + b * s.hidden : res, add ? res : nullptr, weight, s.norm_offset,
                  s.eps, s.hidden, normed.data() + b * s.hidden);
    }
  }
};

static void layer_team(const Stack &s, const Layer &layer, const Rows &rows, Stream &mine,
                       bool first, Scratch &w) {
  Paged p = s.paged;
  p.k = layer.k;
  p.v = layer.v;
  const int64_t n = rows.n, q_size = p.q_heads * p.head_dim;
  const int64_t qkv_size = q_size + 2 * p.kv_heads * p.head_dim;
  mine.norm(s, first ? nullptr : w.proj.data(), layer.input_norm, n);
  linear_team(layer.qkv, mine.normed.data(), s.hidden, w.qkv.data(), qkv_size, n);
  rope_team(s, layer, p, rows, w.qkv.data());
  decode_team(w.plan, p, w.qkv.data(), qkv_size, rows.req_idx, rows.seq_lens, n, w.attn.data(),
              q_size);
  linear_team(layer.o, w.attn.data(), q_size, w.proj.data(), s.hidden, n);
  mine.norm(s, w.proj.data(), layer.post_norm, n);
  linear_team(layer.gate_up, mine.normed.data(), s.hidden, w.gate_up.data(), 2 * s.inter, n);
  act_team(s, n, w.gate_up.data(), w.act.data());
  linear_team(layer.down, w.act.data(), s.inter, w.proj.data(), s.hidden, n);
}

// Runs inside a parallel region. hidden: embeddings [n, hidden]; out: normed result, same shape.
static void stack_team(const Stack &s, const Rows &rows, const float *hidden, float *out,
                       Scratch &w) {
  static thread_local Stream mine;
  const size_t size = rows.n * s.hidden;
  mine.residual.assign(hidden, hidden + size);
  mine.normed.resize(size);
  for (int64_t l = 0; l < s.num_layers; l++)
    layer_team(s, s.layers[l], rows, mine, l == 0, w);
  mine.norm(s, w.proj.data(), s.final_norm, rows.n);
#pragma omp master
  memcpy(out, mine.normed.data(), size * sizeof(float));
}
