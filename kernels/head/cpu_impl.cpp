#include "kernels/head/cpu.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {

void clear_best(Best best, int rows) {
  for (int i = 0; i < rows * kPanelRows; i++) {
    best.values[i] = -__builtin_inff();
    best.panels[i] = -1;
  }
}

void head_panel(const HeadTarget& target, Best best, const float* sums, int first_token, int first_row, int count,
                int panel) {
  const int real = target.vocab_size - panel * kPanelRows;  // rows of the panel that are tokens
  for (int t = 0; t < count; t++) {
    const int row = first_row + t, logit_row = target.logit_rows[row];
    const F scale = splat(target.inverse_rms[first_token + t]);
    float* out = logit_row >= 0 ? target.logits + logit_row * target.row_stride + panel * kPanelRows : nullptr;
    for (int v = 0; v < kPanelVectors; v++) {
      F logits = mul(load(sums + t * kPanelRows + v * kLanes), scale);
      if (real < kPanelRows) logits = select(first_lanes(real - v * kLanes), logits, splat(-__builtin_inff()));
      if (out) {
        store(out + v * kLanes, logits);
        continue;
      }
      // NaN wins as infinity does, so that it is seen. A thread that steals meets panels out of order.
      logits = select(not_a_number(logits), splat(__builtin_inff()), logits);
      float* values = best.values + row * kPanelRows + v * kLanes;
      int32_t* panels = best.panels + row * kPanelRows + v * kLanes;
      const F old = load(values);
      const I at = load_int(panels), here = splat_int(panel);
      const Mask better = either(greater(logits, old), both(equal(logits, old), less(here, at)));
      store(values, select(better, logits, old));
      store_int(panels, select(better, here, at));
    }
  }
}

int32_t best_token(const Best* threads, int count, int row) {
  float most = -__builtin_inff();
  int32_t token = -1;
  for (int i = 0; i < count; i++) {
    for (int lane = 0; lane < kPanelRows; lane++) {
      const float value = threads[i].values[row * kPanelRows + lane];
      const int32_t panel = threads[i].panels[row * kPanelRows + lane];
      if (panel < 0) continue;
      const int32_t candidate = panel * kPanelRows + lane;
      if (value > most || (value == most && token >= 0 && candidate < token)) {
        most = value;
        token = candidate;
      }
    }
  }
  return most == __builtin_inff() || most == -__builtin_inff() ? -1 : token;
}

}  // namespace quire::QUIRE_ISA
