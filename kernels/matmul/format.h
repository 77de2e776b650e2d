// How matrices and activations lie in memory; the same for every instruction set.
//
// A matrix [rows, k] is cut into panels of 32 rows; a thread that works on a panel reads one sequential stream. k is a
// multiple of 32 (of the group, for 4-bit formats); what is missing is zero. Inside a panel, k runs in order:
//
//   f32    [k][32 rows] fp32
//   bf16   [k / 2][32 rows][2] bf16
//   q8     per 32 k: [8 quads][32 rows][4] int8, then [32 rows] fp16 scales                      1,088 bytes
//   q8c    the whole panel [k / 4][32 rows][4] int8, then [32 rows] fp32 scales
//   q4     per group: per 32 k [4][32 rows][4] bytes, quad j in the low nibbles, quad j + 4 in the high ones; then
//          [32 rows] fp16 scales d, and with a minimum [32 rows] fp16 m, or with a zero point [32 rows] int8 z
//   q4k    per 256 k: [32 rows] fp16 d, [32 rows] fp16 m, [8][32 rows] uint8 s, [8][32 rows] uint8 t, one of each per
//          32 k; then the nibbles of all, as above                                                   4,736 bytes
//   q6k    per 256 k: [32 rows] fp16 d, [16][32 rows] int8 s, one per 16 k; then per 16 k [3][32 rows][2] words of 16
//          bits: words [i][row][j] holds columns 4i + 2j and 4i + 2j + 1, downwards from its highest bit; of columns
//          12 + 2j and 13 + 2j, the lowest four bits of words 0 and 1 hold the upper four bits, and those of word 2
//          the lower two, of the first one lowest                                                     6,720 bytes
//
//   f8     the whole panel [k][32 rows] e4m3fn, then [k / 128, rounded up][32 rows] fp32 scales, one per 128 k
//
// A 4-bit weight is d * (q - 8), with a minimum d * q + m, with a zero point d * (q - z). The formats of 256 hold what
// ggml calls Q4_K and Q6_K: a weight is (d * s) * q + m * t, with q in 0..15, or (d * s) * q, with q in -32..31.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

enum Format : int32_t {
  kF32,
  kBf16,
  kQ8,   // groups of 32
  kQ8c,  // one scale a row
  kQ4Group32,
  kQ4Group64,
  kQ4Group128,
  kQ4MinGroup32,
  kQ4MinGroup64,
  kQ4MinGroup128,
  kQ4k,  // groups of 256 that hold eight of 32
  kQ6k,  // groups of 256 that hold sixteen of 16
  kQ4zGroup32,
  kQ4zGroup64,
  kQ4zGroup128,
  kF8,  // not NaN
  kFormatCount,
};

static constexpr bool has_minimum(int format) { return format >= kQ4MinGroup32 && format <= kQ4MinGroup128; }
static constexpr bool has_zero(int format) { return format >= kQ4zGroup32 && format <= kQ4zGroup128; }

// Values of k that share a scale, as far as k must be a multiple of it.
static constexpr int group_size(int format) {
  switch (format) {
    case kQ4Group64:
    case kQ4MinGroup64:
    case kQ4zGroup64:
      return 64;
    case kQ4Group128:
    case kQ4MinGroup128:
    case kQ4zGroup128:
      return 128;
    case kQ4k:
    case kQ6k:
      return 256;
    default:
      return 32;
  }
}

// Columns of an f8 matrix that share a scale; the last ones may be fewer.
constexpr int kF8Block = 128;

// Of what stands before the weights of 256 k.
constexpr size_t kQ4kHeader = 640, kQ6kHeader = 576;

static constexpr size_t panel_bytes(int format, int k) {
  const size_t n = size_t(k);
  switch (format) {
    case kF32:
      return n * 128;
    case kBf16:
      return n * 64;
    case kQ8:
      return n / 32 * 1088;
    case kQ8c:
      return n * 32 + 128;
    case kQ4k:
      return n / 256 * (kQ4kHeader + 8 * 512);
    case kQ6k:
      return n / 256 * (kQ6kHeader + 8 * 768);
    case kF8:
      return n * 32 + (n + kF8Block - 1) / kF8Block * 128;
    default:
      return n * 16 + n / size_t(group_size(format)) * (has_minimum(format) ? 128 : has_zero(format) ? 96 : 64);
  }
}

// Forms in which a producer stores an activation; what the consumers of it need, as bits. 4-bit and q8c weights
// multiply int8. q8 and q6k weights multiply int16: that loses next to nothing, and where the CPU has no int8 dot
// products it costs no more.
enum ActivationForm : int32_t { kFloatForm = 1, kBf16Form = 2, kInt8Form = 4, kInt16Form = 8 };

// Inputs [tokens, k] of a matmul. Integers: per token and group of 32 values a scale, max |x| / 127 or / 32767; what
// belongs to a group lies [group][stride], so that threads that fill different groups share no cache line.
struct Activation {
  int k = 0;
  int stride = 0;                // tokens, padded
  float* values = nullptr;       // [tokens][k]
  uint16_t* bf16 = nullptr;      // [tokens][k]
  int8_t* int8 = nullptr;        // [tokens][k]
  float* scale = nullptr;        // [k / 32][stride]
  float* scaled_sum = nullptr;   // [k / 32][stride] scale * sum
  int32_t* sum = nullptr;        // [k / 32][stride] of the int8 values
  int16_t* int16 = nullptr;      // [tokens][k], every four values in the order 0, 2, 1, 3
  float* int16_scale = nullptr;  // [k / 32][stride]
};

// The places of an input's values among a matrix's columns: column i multiplies value order[i], or nothing where that
// is -1.
using ColumnOrder = const int32_t*;

// Bytes that a thread will want next: fetched while it computes.
struct Ahead {
  const uint8_t* at = nullptr;
  size_t bytes = 0;
};

// out[t][32] = one panel times the tokens first .. first + count. A token's result is the same, bit for bit, whatever
// `first` and `count`.
using PanelKernel = void (*)(const uint8_t* panel, const Activation& in, int first, int count, float* out, Ahead ahead);

}  // namespace quire
