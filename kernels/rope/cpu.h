// The epilogue of the query, key and value projections: norm, bias, rotary positions, and keys and values into the
// paged cache.
#pragma once

#include "kernels/matmul/format.h"
#include "kernels/paged_attention/kv_layout.h"

namespace quire {

struct QkvTarget {
  int heads = 0, kv_heads = 0;
  int half = 0;                        // half the padded head size, a multiple of 16
  const float* inverse_rms = nullptr;  // [tokens]
  const float* cosines = nullptr;      // [positions][half]
  const float* sines = nullptr;
  const int32_t* positions = nullptr;  // [tokens]
  float query_scale = 1.0f;            // attention scale * log2(e)
  float* queries = nullptr;            // [tokens][heads][half][2: dims i, i + half], scaled
  KvFormat kv_format = kKvBf16;        // f32 or bf16
  uint8_t* const* blocks = nullptr;    // [tokens] each token's block, of all layers
  size_t layer_offset = 0;             // bytes from there to this layer's part
};

namespace QUIRE_ISA {

// Panel `panel` of all of q, k and v, sums [count][32]; bias of that panel [32] or null. Tokens of one panel come in
// ascending order from one thread.
void rotate_and_store(const QkvTarget& target, const float* sums, int first, int count, int panel, const float* bias);

}  // namespace QUIRE_ISA
}  // namespace quire
