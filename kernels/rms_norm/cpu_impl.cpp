#include "kernels/matmul/dequantize.h"
#include "kernels/matmul/store.h"
#include "kernels/rms_norm/cpu.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

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
