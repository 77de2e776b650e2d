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

// Numbers come 32 at a time: read(first, out) writes numbers first .. first + 31.
constexpr int kRun = kBlockTokens;

// The largest of f(x), f from vectors to vectors.
template <class Read, class Function>
float largest(int count, Read read, Function f) {
  float run[kRun];
  read(0, run);
  F most = f(load(run));
  for (int first = 0; first < count; first += kRun) {
    if (first > 0) read(first, run);
    for (int i = 0; i < kRun; i += kLanes) most = max(f(load(run + i)), most);
  }
  return reduce_max(most);
}

template <class Read>
Range symmetric_range(int count, Read read) {
  return {bf16_away(largest(count, read, [](F x) { return abs(x); }) / 127.0f), 0};
}

template <class Read>
Range full_range(int count, Read read) {
  const float least = 0.0f - largest(count, read, [](F x) { return sub(zero(), x); });
  const float most = largest(count, read, [](F x) { return x; });
  const uint16_t minimum = least < 0 ? bf16_away(least) : bf16_towards(least);
  return {bf16_away((most - from_bf16(minimum)) / 15.0f), minimum};
}

// Calls write(i, q) for each number: q within least .. most, whatever rounding or a number that is not finite would
// give.
template <class Read, class Write>
void quantize(int count, Read read, Range range, int least, int most, Write write) {
  const float scale = from_bf16(range.scale);
  const F minimum = splat(from_bf16(range.minimum)), divisor = splat(scale > 0 ? scale : 1.0f);
  const F low = splat(float(least)), high = splat(float(most));
  float run[kRun];
  int32_t whole[kRun];
  for (int first = 0; first < count; first += kRun) {
    read(first, run);
    for (int i = 0; i < kRun; i += kLanes) {
      F steps = max(div(sub(load(run + i), minimum), divisor), low);
      steps = select(greater(steps, high), high, steps);
      store_int(whole + i, scale > 0 ? round_to_int(steps) : splat_int(0));
    }
    for (int i = 0; i < kRun; i++) write(first + i, whole[i]);
  }
}

// One channel's keys, or one token's values, as `read` above takes them.
template <int kFrom>
auto channel(Source<kFrom> source, int dim) {
  return [=](int, float* out) {
    for (int t = 0; t < kRun; t++) out[t] = source.key(dim, t);
  };
}
template <int kFrom>
auto token(Source<kFrom> source, int t) {
  return [=](int first, float* out) {
    for (int d = 0; d < kRun; d++) out[d] = source.value(first + d, t);
  };
}

template <int kFrom>
void narrow_to_int8(Source<kFrom> source, uint8_t* target) {
  const int half = source.half, size = 2 * half;
  uint16_t* key_scales = (uint16_t*)(target + number_bytes(kKvInt8, half));
  for (int d = 0; d < size; d++) {
    const auto numbers = channel(source, d);
    const Range range = symmetric_range(kBlockTokens, numbers);
    key_scales[d] = range.scale;
    uint8_t* at = target + d / 4 * kBlockTokens * 4 + d % 4;
    quantize(kBlockTokens, numbers, range, -127, 127, [&](int t, int q) { at[t * 4] = uint8_t(q); });
  }
  uint8_t* values = target + key_bytes(kKvInt8, half);
  uint16_t* value_scales = (uint16_t*)(values + number_bytes(kKvInt8, half));
  for (int t = 0; t < kBlockTokens; t++) {
    const auto numbers = token(source, t);
    const Range range = symmetric_range(size, numbers);
    value_scales[t] = range.scale;
    uint8_t* at = values + t / 4 * size * 4 + t % 4;
    quantize(size, numbers, range, -127, 127, [&](int d, int q) { at[d * 4] = uint8_t(q); });
  }
}

template <int kFrom>
void narrow_to_int4(Source<kFrom> source, uint8_t* target) {
  const int half = source.half, size = 2 * half;
  memset(target, 0, number_bytes(kKvInt4, half));
  uint16_t* key_scales = (uint16_t*)(target + number_bytes(kKvInt4, half));
  for (int d = 0; d < size; d++) {
    const auto numbers = channel(source, d);
    const Range range = full_range(kBlockTokens, numbers);
    key_scales[d] = range.scale;
    key_scales[size + d] = range.minimum;
    uint8_t* at = target + d % half * kBlockTokens;
    const int shift = d / half * 4;
    quantize(kBlockTokens, numbers, range, 0, 15, [&](int t, int q) { at[t] |= uint8_t(q << shift); });
  }
  uint8_t* values = target + key_bytes(kKvInt4, half);
  memset(values, 0, number_bytes(kKvInt4, half));
  uint16_t* value_scales = (uint16_t*)(values + number_bytes(kKvInt4, half));
  for (int t = 0; t < kBlockTokens; t++) {
    const auto numbers = token(source, t);
    const Range range = full_range(size, numbers);
    value_scales[t] = range.scale;
    value_scales[kBlockTokens + t] = range.minimum;
    uint8_t* at = values + t / 2 * size;
    const int shift = t % 2 * 4;
    quantize(size, numbers, range, 0, 15, [&](int d, int q) { at[d] |= uint8_t(q << shift); });
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
