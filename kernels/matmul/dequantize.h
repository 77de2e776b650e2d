// Reads single rows of a packed matrix.
#pragma once

#include "kernels/matmul/format.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

// The fp16 number of row `lane`.
QUIRE_INLINE float half_at(const uint8_t* at, int lane) {
  uint16_t halves[kLanes] = {};
  memcpy(halves, at + lane * 2, 2);
  float values[kLanes];
  store(values, load_half(halves));
  return values[0];
}

// out[i] = d * q + m for 32 nibbles of row `lane`.
QUIRE_INLINE void dequantize_nibbles(const uint8_t* bytes, int lane, float d, float m, float* out) {
  for (int i = 0; i < 32; i++) {
    const uint8_t pair = bytes[i % 16 / 4 * 128 + lane * 4 + i % 4];
    out[i] = d * float(i < 16 ? pair & 15 : pair >> 4) + m;
  }
}

QUIRE_INLINE void dequantize_bytes(const uint8_t* bytes, int lane, float scale, float* out) {
  for (int i = 0; i < 32; i++) out[i] = scale * float(int8_t(bytes[i / 4 * 128 + lane * 4 + i % 4]));
}

// 16 six-bit values of row `lane`.
QUIRE_INLINE void dequantize_six_bits(const uint8_t* words, int lane, float scale, float* out) {
  for (int i = 0; i < 16; i++) {
    uint16_t word[3];
    for (int w = 0; w < 3; w++) memcpy(&word[w], words + w * 128 + lane * 4 + i % 4 / 2 * 2, 2);
    const int odd = i % 2, quad = i / 4;
    const int bits = quad < 3 ? word[quad] >> (odd ? 4 : 10) : (word[odd] & 15) << 2 | (word[2] >> 2 * odd & 3);
    out[i] = scale * float(((bits & 63) ^ 32) - 32);
  }
}

// Row `lane` of one panel, 32 values from `start` on.
QUIRE_INLINE void dequantize(int format, const uint8_t* panel, int k, int lane, int start, float* out) {
  const int size = group_size(format);
  const uint8_t* group = panel + size_t(start / size) * panel_bytes(format, size);  // of formats that have such
  switch (format) {
    case kF32:
      for (int i = 0; i < 32; i++) memcpy(out + i, panel + (size_t(start + i) * 32 + lane) * 4, 4);
      break;
    case kBf16:
      for (int i = 0; i < 32; i++) {
        uint16_t value;
        memcpy(&value, panel + (size_t((start + i) / 2) * 64 + lane * 2 + i % 2) * 2, 2);
        out[i] = from_bf16(value);
      }
      break;
    case kQ8:
      dequantize_bytes(group, lane, half_at(group + 1024, lane), out);
      break;
    case kQ8c: {
      float scale;
      memcpy(&scale, panel + size_t(k) * 32 + lane * 4, 4);
      dequantize_bytes(panel + size_t(start) * 32, lane, scale, out);
      break;
    }
    case kQ4k: {
      const int part = start % size / 32;
      const uint8_t* steps = group + 128 + part * 32 + lane;
      dequantize_nibbles(group + kQ4kHeader + part * 512, lane, half_at(group, lane) * float(steps[0]),
                         half_at(group + 64, lane) * float(steps[256]), out);
      break;
    }
    case kQ6k: {
      const float d = half_at(group, lane);
      for (int part = start % size / 16, i = 0; i < 2; part++, i++) {
        const float step = float(int8_t(group[64 + part * 32 + lane]));
        dequantize_six_bits(group + kQ6kHeader + part * 384, lane, d * step, out + i * 16);
      }
      break;
    }
    case kF8: {
      float scale, numbers[kLanes];
      memcpy(&scale, panel + size_t(k) * 32 + (size_t(start) / kF8Block * 32 + lane) * 4, 4);
      for (int i = 0; i < 32; i++) {
        uint8_t codes[kLanes] = {panel[size_t(start + i) * 32 + lane]};
        store(numbers, load_f8(codes));
        out[i] = numbers[0] * kF8Unit * scale;
      }
      break;
    }
    default: {
      const uint8_t* halves = group + size_t(size) * 16;
      const float d = half_at(halves, lane), zero = has_zero(format) ? float(int8_t(halves[64 + lane])) : 8.0f;
      const float m = has_minimum(format) ? half_at(halves + 64, lane) : -zero * d;
      dequantize_nibbles(group + size_t(start % size) * 16, lane, d, m, out);
    }
  }
}

}  // namespace quire::QUIRE_ISA
