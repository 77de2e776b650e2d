#include "kernels/matmul/store.h"
#include "kernels/rms_norm/cpu.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

QUIRE_INLINE float half_value(uint16_t half) {
  uint16_t halves[kLanes] = {half};
  float values[kLanes];
  store(values, load_half(halves));
  return values[0];
}

// Row `lane` of one panel, 32 values from `start` on.
void dequantize(int format, const uint8_t* panel, int k, int lane, int start, float* out) {
  if (format == kF32) {
    for (int i = 0; i < 32; i++) memcpy(out + i, panel + (size_t(start + i) * 32 + lane) * 4, 4);
  } else if (format == kBf16) {
    for (int i = 0; i < 32; i++) {
      uint16_t value;
      memcpy(&value, panel + (size_t((start + i) / 2) * 64 + lane * 2 + i % 2) * 2, 2);
      out[i] = from_bf16(value);
    }
  } else if (format == kQ8 || format == kQ8c) {
    const uint8_t* bytes = panel + size_t(start / 32) * (format == kQ8 ? 1088 : 1024);
    float scale;
    if (format == kQ8) {
      uint16_t half;
      memcpy(&half, bytes + 1024 + lane * 2, 2);
      scale = half_value(half);
    } else {
      memcpy(&scale, panel + size_t(k) * 32 + lane * 4, 4);
    }
    for (int i = 0; i < 32; i++) out[i] = scale * float(int8_t(bytes[i / 4 * 128 + lane * 4 + i % 4]));
  } else {
    const int group = group_size(format);
    const size_t group_bytes = size_t(group) * 16 + (has_minimum(format) ? 128 : 64);
    const uint8_t* base = panel + size_t(start / group) * group_bytes;
    const uint8_t* bytes = base + size_t(start % group) * 16;
    uint16_t halves[2] = {};
    memcpy(&halves[0], base + size_t(group) * 16 + lane * 2, 2);
    if (has_minimum(format)) memcpy(&halves[1], base + size_t(group) * 16 + 64 + lane * 2, 2);
    const float d = half_value(halves[0]), m = has_minimum(format) ? half_value(halves[1]) : -8.0f * d;
    for (int i = 0; i < 32; i++) {
      const uint8_t pair = bytes[i % 16 / 4 * 128 + lane * 4 + i % 4];
      out[i] = d * float(i < 16 ? pair & 15 : pair >> 4) + m;
    }
  }
}

QUIRE_INLINE void write(const Residual& stream, NormFor next, int token, int panel, const F (&x)[kPanelVectors]) {
  const int k = stream.normed->k;
  F squares = zero(), normed[kPanelVectors];
  QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
    store(stream.x + size_t(token) * k + panel * kPanelRows + v * kLanes, x[v]);
    squares = fma(x[v], x[v], squares);
    normed[v] = mul(x[v], load(next.gains + panel * kPanelRows + v * kLanes));
  }
  stream.squares[size_t(panel) * stream.normed->stride + token] = reduce_add(squares);
  store_group(*stream.normed, next.forms, token, panel, normed);
}

}  // namespace

void add_residual(const Residual& stream, NormFor next, const float* sums, int first, int count, int panel,
                  const float* bias) {
  for (int t = 0; t < count; t++) {
    const float* old = stream.x + size_t(first + t) * stream.normed->k + panel * kPanelRows;
    F x[kPanelVectors];
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      F sum = load(sums + t * kPanelRows + v * kLanes);
      if (bias) sum = add(sum, load(bias + panel * kPanelRows + v * kLanes));
      x[v] = add(load(old + v * kLanes), sum);
    }
    write(stream, next, first + t, panel, x);
  }
}

void embed(const Residual& stream, NormFor next, int format, const uint8_t* matrix, int token, int token_id) {
  const int k = stream.normed->k;
  const uint8_t* panel = matrix + size_t(token_id / kPanelRows) * panel_bytes(format, k);
  for (int p = 0; p < k / kPanelRows; p++) {
    float values[kPanelRows];
    dequantize(format, panel, k, token_id % kPanelRows, p * kPanelRows, values);
    F x[kPanelVectors];
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) x[v] = load(values + v * kLanes);
    write(stream, next, token, p, x);
  }
}

void inverse_rms(const Residual& stream, int count, int hidden, float epsilon, float* out) {
  const int stride = stream.normed->stride, panels = stream.normed->k / kPanelRows;
  for (int t = 0; t < count; t += kLanes) {
    F sum = zero();
    for (int p = 0; p < panels; p++) sum = add(sum, load(stream.squares + size_t(p) * stride + t));
    const F mean = fma(sum, splat(1.0f / float(hidden)), splat(epsilon));
    store(out + t, div(splat(1.0f), square_root(mean)));
  }
}

}  // namespace quire::QUIRE_ISA
