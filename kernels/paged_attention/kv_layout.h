// How keys and values lie in memory: blocks of 32 tokens; in a block, per kv head first the keys, then the values.
// `half` is half the padded head size; a rotary pair is (i, i + half).
//
//   f32    K [2 * half][32 tokens] fp32                   V [32 tokens][2 * half] fp32
//   bf16   K [half][32 tokens][2: dims i, i + half]       V [16 token pairs][2 * half][2]
//   int8   K [half / 2 quads of dims][32 tokens][4], then [2 * half] bf16 scales, one a channel
//          V [8 quads of tokens][2 * half][4], then [32] bf16 scales, one a token
//   int4   K [half][32 tokens] bytes (dim i low, i + half high), then [2 * half] bf16 scales, [2 * half] bf16 minima
//          V [16 token pairs][2 * half] bytes (even token low), then [32] bf16 scales, [32] bf16 minima
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int kBlockTokens = 32;

enum KvFormat : uint8_t { kKvF32, kKvBf16, kKvInt8, kKvInt4, kKvFormatCount };

// Of the keys or the values themselves.
static constexpr size_t number_bytes(int format, int half) {
  const size_t n = size_t(half) * 2 * kBlockTokens;
  switch (format) {
    case kKvF32:
      return n * 4;
    case kKvBf16:
      return n * 2;
    case kKvInt8:
      return n;
    default:
      return n / 2;
  }
}

// Of what belongs to a channel of keys or a token of values: a scale, with int4 a minimum too.
static constexpr size_t scale_bytes(int format) { return format == kKvInt4 ? 4 : format == kKvInt8 ? 2 : 0; }

static constexpr size_t key_bytes(int format, int half) {
  return number_bytes(format, half) + 2 * size_t(half) * scale_bytes(format);
}

static constexpr size_t value_bytes(int format, int half) {
  return number_bytes(format, half) + kBlockTokens * scale_bytes(format);
}

static constexpr size_t head_bytes(int format, int half) { return key_bytes(format, half) + value_bytes(format, half); }

}  // namespace quire
