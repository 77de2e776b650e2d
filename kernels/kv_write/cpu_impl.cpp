#include "kernels/kv_write/cpu.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

float key(int format, const uint8_t* block, int half, int dim, int token) {
  float value;
  if (format == kKvF32) {
    memcpy(&value, block + (size_t(dim) * kBlockTokens + token) * 4, 4);
    return value;
  }
  uint16_t narrow;
  memcpy(&narrow, block + ((size_t(dim % half) * kBlockTokens + token) * 2 + dim / half) * 2, 2);
  return from_bf16(narrow);
}

float value(int format, const uint8_t* block, int half, int dim, int token) {
  const uint8_t* values = block + key_bytes(format, half);
  if (format == kKvF32) {
    float wide;
    memcpy(&wide, values + (size_t(token) * 2 * half + dim) * 4, 4);
    return wide;
  }
  uint16_t narrow;
  memcpy(&narrow, values + ((size_t(token / 2) * 2 * half + dim) * 2 + token % 2) * 2, 2);
  return from_bf16(narrow);
}

// How `count` values x(i) become integers q with x = scale * q + minimum.
struct Range {
  float scale, minimum;
};

template <class Value>
Range symmetric_range(int count, Value x) {
  float most = 0.0f;
  for (int i = 0; i < count; i++) most = __builtin_fmaxf(most, __builtin_fabsf(x(i)));
  return {most / 127.0f, 0.0f};
}

template <class Value>
Range full_range(int count, Value x) {
  float least = x(0), most = x(0);
  for (int i = 1; i < count; i++) {
    least = __builtin_fminf(least, x(i));
    most = __builtin_fmaxf(most, x(i));
  }
  return {(most - least) / 15.0f, least};
}

// Within least .. most, whatever rounding or a value that is not finite would give.
int quantized(float x, Range range, int least, int most) {
  if (!(range.scale > 0)) return 0;
  const float steps = __builtin_rintf((x - range.minimum) / range.scale);
  return steps > float(least) ? (steps < float(most) ? int(steps) : most) : least;
}

void narrow_to_int8(int from, const uint8_t* source, uint8_t* target, int half) {
  const int size = 2 * half;
  float* key_scales = (float*)(target + number_bytes(kKvInt8, half));
  for (int d = 0; d < size; d++) {
    const Range range = symmetric_range(kBlockTokens, [&](int t) { return key(from, source, half, d, t); });
    key_scales[d] = range.scale;
    for (int t = 0; t < kBlockTokens; t++) {
      target[(d / 4 * kBlockTokens + t) * 4 + d % 4] =
          uint8_t(quantized(key(from, source, half, d, t), range, -127, 127));
    }
  }
  uint8_t* values = target + key_bytes(kKvInt8, half);
  float* value_scales = (float*)(values + number_bytes(kKvInt8, half));
  for (int t = 0; t < kBlockTokens; t++) {
    const Range range = symmetric_range(size, [&](int d) { return value(from, source, half, d, t); });
    value_scales[t] = range.scale;
    for (int d = 0; d < size; d++) {
      values[(t / 4 * size + d) * 4 + t % 4] = uint8_t(quantized(value(from, source, half, d, t), range, -127, 127));
    }
  }
}

void narrow_to_int4(int from, const uint8_t* source, uint8_t* target, int half) {
  const int size = 2 * half;
  memset(target, 0, number_bytes(kKvInt4, half));
  float* key_scales = (float*)(target + number_bytes(kKvInt4, half));
  for (int d = 0; d < size; d++) {
    const Range range = full_range(kBlockTokens, [&](int t) { return key(from, source, half, d, t); });
    key_scales[d] = range.scale;
    key_scales[size + d] = range.minimum;
    for (int t = 0; t < kBlockTokens; t++) {
      target[d % half * kBlockTokens + t] |=
          uint8_t(quantized(key(from, source, half, d, t), range, 0, 15) << (d / half * 4));
    }
  }
  uint8_t* values = target + key_bytes(kKvInt4, half);
  memset(values, 0, number_bytes(kKvInt4, half));
  float* value_scales = (float*)(values + number_bytes(kKvInt4, half));
  for (int t = 0; t < kBlockTokens; t++) {
    const Range range = full_range(size, [&](int d) { return value(from, source, half, d, t); });
    value_scales[t] = range.scale;
    value_scales[kBlockTokens + t] = range.minimum;
    for (int d = 0; d < size; d++) {
      values[t / 2 * size + d] |= uint8_t(quantized(value(from, source, half, d, t), range, 0, 15) << (t % 2 * 4));
    }
  }
}

}  // namespace

void narrow_block(int from, const uint8_t* source, int to, uint8_t* target, int half) {
  if (to == kKvInt8) {
    narrow_to_int8(from, source, target, half);
  } else {
    narrow_to_int4(from, source, target, half);
  }
}

}  // namespace quire::QUIRE_ISA
