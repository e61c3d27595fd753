// RMS norm, gated activations and rotary embedding of single rows.

#pragma once

#include "simd.h"

// One row: residual += x (when given), out = norm(residual or x) * (weight + offset).
static void rmsnorm_row(const float *x, float *residual, const float *weight, float offset,
                        float eps, int64_t d, float *out) {
  const float *src = x;
  if (residual) {
    int64_t i = 0;
    for (; i + VL <= d; i += VL) store(residual + i, load(residual + i) + load(x + i));
    for (; i < d; i++) residual[i] += x[i];
    src = residual;
  }
  vf a0 = {}, a1 = {};
  int64_t i = 0;
  for (; i + 2 * VL <= d; i += 2 * VL) {
    vf u = load(src + i), v = load(src + i + VL);
    a0 += u * u;
    a1 += v * v;
  }
  float sum = hsum(a0 + a1);
  for (; i < d; i++) sum += src[i] * src[i];
  float inv = 1.0f / __builtin_sqrtf(sum / (float)d + eps);
  for (i = 0; i + VL <= d; i += VL)
    store(out + i, load(src + i) * inv * (load(weight + i) + offset));
  for (; i < d; i++) out[i] = src[i] * inv * (weight[i] + offset);
}

// x, residual and out are seen as [n, heads, d] with a row stride each, heads without gaps.
enum Activation { SILU = 0, GELU_TANH = 1 };

// gelu_tanh(x) = x * sigmoid(2 * sqrt(2/pi) * (x + 0.044715 x^3)): both gates are one sigmoid.
INLINE vf gate(vf x, int act) {
  vf z = act == SILU ? x : x * (1.5957691216057308f + 0.07135481282f * x * x);
  return x / (1.0f + vexp(-z));
}

// x [.., 2*d] = gate | up, one row; out [.., d] may be x itself.
static void act_span(const float *x, int64_t d, int act, float *out, int64_t i0, int64_t i1) {
  int64_t i = i0;
  for (; i + VL <= i1; i += VL) store(out + i, gate(load(x + i), act) * load(x + d + i));
  for (; i < i1; i++) out[i] = gate(splat(x[i]), act)[0] * x[d + i];
}

// Half-split rotation of `heads` neighbouring heads of one token, in place.
static void rotary_row(float *x, const float *cos_sin, int64_t heads, int64_t head_dim,
                       int64_t rot_dim) {
  const int64_t half = rot_dim / 2;
  const float *cs = cos_sin, *sn = cos_sin + half;
  for (int64_t h = 0; h < heads; h++) {
    float *a = x + h * head_dim, *b = a + half;
    int64_t i = 0;
    for (; i + VL <= half; i += VL) {
      vf u = load(a + i), v = load(b + i), c = load(cs + i), s = load(sn + i);
      store(a + i, u * c - v * s);
      store(b + i, v * c + u * s);
    }
    for (; i < half; i++) {
      float u = a[i], v = b[i];
      a[i] = u * cs[i] - v * sn[i];
      b[i] = v * cs[i] + u * sn[i];
    }
  }
}
