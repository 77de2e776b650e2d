#include "kernels/matmul/store.h"
#include "kernels/silu_mul/cpu.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

void silu_mul(const Activation& out, int forms, const float* first_panel, const float* second_panel, int first,
              int count, int group, const float* inverse_rms, const float* bias) {
  constexpr int kHalf = kPanelVectors / 2;  // vectors of gate values in a panel
  for (int t = 0; t < count; t++) {
    const F scale = splat(inverse_rms[first + t]);
    F values[kPanelVectors];
    QUIRE_UNROLL for (int v = 0; v < kPanelVectors; v++) {
      const float* panel = (v < kHalf ? first_panel : second_panel) + t * kPanelRows + v % kHalf * kLanes;
      F gate = mul(load(panel), scale), up = mul(load(panel + 16), scale);
      if (bias) {
        const float* at = bias + (v < kHalf ? 0 : kPanelRows) + v % kHalf * kLanes;
        gate = add(gate, load(at));
        up = add(up, load(at + 16));
      }
      // Bounded, for 2^x has no room for more; beyond it the quotient is nothing.
      const F power = sub(zero(), max(mul(gate, splat(1.44269504f)), splat(-126.0f)));
      const F one_plus = add(splat(1.0f), exp2(power));
      values[v] = mul(div(gate, one_plus), up);
    }
    store_group(out, forms, first + t, group, values);
  }
}

}  // namespace quire::QUIRE_ISA
