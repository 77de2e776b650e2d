// Stores 32 values of an activation in the forms that its consumers multiply.
#pragma once

#include "kernels/matmul/format.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

// The largest magnitude of 32 values; NaN where one is.
QUIRE_INLINE float largest_of(const F (&values)[kPanelVectors]) {
  F most = abs(values[0]);
  bool finite = !any(not_a_number(values[0]));
  QUIRE_UNROLL for (int v = 1; v < kPanelVectors; v++) {
    most = max(most, abs(values[v]));
    finite &= !any(not_a_number(values[v]));
  }
  return finite ? reduce_max(most) : __builtin_nanf("");
}

// The factor that makes `largest` become `steps`. 0 where there is none: all integers are zero then, and what is
// neither tiny nor finite has a scale that says so.
QUIRE_INLINE float inverse_scale(float largest, float steps) {
  const float inverse = steps / largest;
  return inverse < __builtin_inff() ? inverse : 0.0f;
}

// int8 to nearest, ties to even; scale = max |x| / 127. NaN and infinity give a scale that is not finite.
QUIRE_INLINE void quantize_group(const Activation& out, int token, int group, const F (&values)[kPanelVectors]) {
  const float largest = largest_of(values), inverse = inverse_scale(largest, 127.0f);
  int8_t* q = out.int8 + size_t(token) * out.k + group * 32;
  I sum = splat_int(0);
  QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
    const I rounded = inverse > 0 ? round_to_int(mul(values[v], splat(inverse))) : splat_int(0);
    store_bytes(q + v * kLanes, rounded);
    sum = add(sum, rounded);
  }
  const size_t at = size_t(group) * out.stride + token;
  const int32_t total = reduce_add(sum);
  out.scale[at] = largest * (1.0f / 127.0f);
  out.sum[at] = total;
  out.scaled_sum[at] = out.scale[at] * float(total);
}

// int16 to nearest, ties to even; scale = max |x| / 32767.
QUIRE_INLINE void quantize_group_finely(const Activation& out, int token, int group, const F (&values)[kPanelVectors]) {
  const float largest = largest_of(values), inverse = inverse_scale(largest, 32767.0f);
  int16_t* q = out.int16 + size_t(token) * out.k + group * 32;
  QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
    const F scaled = swap_middle(mul(values[v], splat(inverse)));
    store_words(q + v * kLanes, inverse > 0 ? round_to_int(scaled) : splat_int(0));
  }
  out.int16_scale[size_t(group) * out.stride + token] = largest * (1.0f / 32767.0f);
}

QUIRE_INLINE void store_group(const Activation& out, int forms, int token, int group,
                              const F (&values)[kPanelVectors]) {
  if (forms & kInt8Form) quantize_group(out, token, group, values);
  if (forms & kInt16Form) quantize_group_finely(out, token, group, values);
  const size_t at = size_t(token) * out.k + group * 32;
  if (forms & kFloatForm) {
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) store(out.values + at + v * kLanes, values[v]);
  }
  if (forms & kBf16Form) {
    alignas(64) float plain[kPanelRows];
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) store(plain + v * kLanes, values[v]);
    for (int i = 0; i < kPanelRows; i++) out.bf16[at + i] = to_bf16(plain[i]);
  }
}

}  // namespace quire::QUIRE_ISA
