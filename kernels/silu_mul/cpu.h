// The epilogue of the gate and up projections.
#pragma once

#include "kernels/matmul/format.h"

namespace quire::QUIRE_ISA {

// One group of 32 values silu(gate) * up from two panels, each [count][16 gate | 16 up]. All are multiplied by
// inverse_rms[token] first; bias [2][16 gate | 16 up] or null.
void silu_mul(const Activation& out, int forms, const float* first_panel, const float* second_panel, int first,
              int count, int group, const float* inverse_rms, const float* bias);

}  // namespace quire::QUIRE_ISA
