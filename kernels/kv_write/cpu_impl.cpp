#include "kernels/kv_write/cpu.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// One kv head of a block as numbers, in any format that narrower ones are made from.
template <int kFormat>
struct Source {
  const uint8_t* keys;
  int half;

  const uint8_t* values() const { return keys + key_bytes(kFormat, half); }

  float key(int dim, int token) const {
    if constexpr (kFormat == kKvF32) {
      return f32(keys, dim * kBlockTokens + token);
    } else if constexpr (kFormat == kKvBf16) {
      return bf16(keys, (dim % half * kBlockTokens + token) * 2 + dim / half);
    } else {
      const float scale = bf16(keys + number_bytes(kKvInt8, half), dim);
      return scale * float(int8_t(keys[(dim / 4 * kBlockTokens + token) * 4 + dim % 4]));
    }
  }

  float value(int dim, int token) const {
    const int size = 2 * half;
    if constexpr (kFormat == kKvF32) {
      return f32(values(), token * size + dim);
    } else if constexpr (kFormat == kKvBf16) {
      return bf16(values(), (token / 2 * size + dim) * 2 + token % 2);
    } else {
      const float scale = bf16(values() + number_bytes(kKvInt8, half), token);
      return scale * float(int8_t(values()[(token / 4 * size + dim) * 4 + token % 4]));
    }
  }

 private:
  static float f32(const uint8_t* at, int index) {
    float value;
    memcpy(&value, at + size_t(index) * 4, 4);
    return value;
  }
  static float bf16(const uint8_t* at, int index) {
    uint16_t value;
    memcpy(&value, at + size_t(index) * 2, 2);
    return from_bf16(value);
  }
};

// How numbers x become integers q with x = scale * q + minimum. Both are bf16, rounded so that the range still spans
// all numbers.
struct Range {
  uint16_t scale, minimum;
};

// The next bf16 away from zero, or towards it; one that x itself is stays.
uint16_t bf16_away(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0xffff) >> 16);
}
uint16_t bf16_towards(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t(bits >> 16);
}

template <class Number>
Range symmetric_range(int count, Number x) {
  float most = 0.0f;
  for (int i = 0; i < count; i++) most = __builtin_fmaxf(most, __builtin_fabsf(x(i)));
  return {bf16_away(most / 127.0f), 0};
}

template <class Number>
Range full_range(int count, Number x) {
  float least = x(0), most = x(0);
  for (int i = 1; i < count; i++) {
    least = __builtin_fminf(least, x(i));
    most = __builtin_fmaxf(most, x(i));
  }
  const uint16_t minimum = least < 0 ? bf16_away(least) : bf16_towards(least);
  return {bf16_away((most - from_bf16(minimum)) / 15.0f), minimum};
}

// Within least .. most, whatever rounding or a number that is not finite would give.
int quantized(float x, Range range, int least, int most) {
  const float scale = from_bf16(range.scale);
  if (!(scale > 0)) return 0;
  const float steps = __builtin_rintf((x - from_bf16(range.minimum)) / scale);
  return steps > float(least) ? (steps < float(most) ? int(steps) : most) : least;
}

template <int kFrom>
void narrow_to_int8(Source<kFrom> source, uint8_t* target) {
  const int half = source.half, size = 2 * half;
  uint16_t* key_scales = (uint16_t*)(target + number_bytes(kKvInt8, half));
  for (int d = 0; d < size; d++) {
    const auto number = [&](int t) { return source.key(d, t); };
    const Range range = symmetric_range(kBlockTokens, number);
    key_scales[d] = range.scale;
    for (int t = 0; t < kBlockTokens; t++) {
      target[(d / 4 * kBlockTokens + t) * 4 + d % 4] = uint8_t(quantized(number(t), range, -127, 127));
    }
  }
  uint8_t* values = target + key_bytes(kKvInt8, half);
  uint16_t* value_scales = (uint16_t*)(values + number_bytes(kKvInt8, half));
  for (int t = 0; t < kBlockTokens; t++) {
    const auto number = [&](int d) { return source.value(d, t); };
    const Range range = symmetric_range(size, number);
    value_scales[t] = range.scale;
    for (int d = 0; d < size; d++) {
      values[(t / 4 * size + d) * 4 + t % 4] = uint8_t(quantized(number(d), range, -127, 127));
    }
  }
}

template <int kFrom>
void narrow_to_int4(Source<kFrom> source, uint8_t* target) {
  const int half = source.half, size = 2 * half;
  memset(target, 0, number_bytes(kKvInt4, half));
  uint16_t* key_scales = (uint16_t*)(target + number_bytes(kKvInt4, half));
  for (int d = 0; d < size; d++) {
    const auto number = [&](int t) { return source.key(d, t); };
    const Range range = full_range(kBlockTokens, number);
    key_scales[d] = range.scale;
    key_scales[size + d] = range.minimum;
    for (int t = 0; t < kBlockTokens; t++) {
      target[d % half * kBlockTokens + t] |= uint8_t(quantized(number(t), range, 0, 15) << (d / half * 4));
    }
  }
  uint8_t* values = target + key_bytes(kKvInt4, half);
  memset(values, 0, number_bytes(kKvInt4, half));
  uint16_t* value_scales = (uint16_t*)(values + number_bytes(kKvInt4, half));
  for (int t = 0; t < kBlockTokens; t++) {
    const auto number = [&](int d) { return source.value(d, t); };
    const Range range = full_range(size, number);
    value_scales[t] = range.scale;
    value_scales[kBlockTokens + t] = range.minimum;
    for (int d = 0; d < size; d++) {
      values[t / 2 * size + d] |= uint8_t(quantized(number(d), range, 0, 15) << (t % 2 * 4));
    }
  }
}

template <int kFrom>
void narrow_hot(Source<kFrom> source, int to, uint8_t* target) {
  if (to == kKvInt8) {
    narrow_to_int8(source, target);
  } else {
    narrow_to_int4(source, target);
  }
}

}  // namespace

void narrow_block(int from, const uint8_t* source, int to, uint8_t* target, int half) {
  switch (from) {
    case kKvF32:
      return narrow_hot(Source<kKvF32>{source, half}, to, target);
    case kKvBf16:
      return narrow_hot(Source<kKvBf16>{source, half}, to, target);
    default:
      return narrow_to_int4(Source<kKvInt8>{source, half}, target);
  }
}

}  // namespace quire::QUIRE_ISA
