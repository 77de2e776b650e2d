// Reads single rows of a packed matrix.
#pragma once

#include "kernels/matmul/format.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE float half_value(uint16_t half) {
  uint16_t halves[kLanes] = {half};
  float values[kLanes];
  store(values, load_half(halves));
  return values[0];
}

// Row `lane` of one panel, 32 values from `start` on.
QUIRE_INLINE void dequantize(int format, const uint8_t* panel, int k, int lane, int start, float* out) {
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

}  // namespace quire::QUIRE_ISA
