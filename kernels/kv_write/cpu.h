// Rewrites full blocks of keys and values in a narrower format. What a step computes is written by the epilogue in
// kernels/rope.
#pragma once

#include "kernels/paged_attention/kv_layout.h"

namespace quire::QUIRE_ISA {

// One kv head of one full block, from f32 or bf16 to int8 or int4, or from int8 to int4. Keys quantize per channel,
// values per token (KIVI, arXiv 2402.02750).
void narrow_block(int from, const uint8_t* source, int to, uint8_t* target, int half);

}  // namespace quire::QUIRE_ISA
