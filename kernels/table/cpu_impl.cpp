#include "kernels/head/cpu.h"
#include "kernels/kv_write/cpu.h"
#include "kernels/matmul/cpu.h"
#include "kernels/paged_attention/cpu.h"
#include "kernels/rms_norm/cpu.h"
#include "kernels/rope/cpu.h"
#include "kernels/sampler/cpu.h"
#include "kernels/silu_mul/cpu.h"
#include "kernels/table/table.h"

#define QUIRE_TEXT(name) #name
#define QUIRE_NAME(name) QUIRE_TEXT(name)

namespace quire::QUIRE_ISA {

const KernelTable& kernel_table() {
  static constexpr KernelTable table = {
      .instruction_set = QUIRE_NAME(QUIRE_ISA),
      .panel_kernel = panel_kernel,
      .activation_form = activation_form,
      .embed = embed,
      .add_residual = add_residual,
      .inverse_rms = inverse_rms,
      .rotate_and_store = rotate_and_store,
      .attend = attend,
      .attend_split = attend_split,
      .merge_splits = merge_splits,
      .silu_mul = silu_mul,
      .clear_best = clear_best,
      .head_panel = head_panel,
      .best_token = best_token,
      .narrow_block = narrow_block,
      .draw = draw,
      .score = score,
      .noise_words = noise_words,
      .quantize_rows = quantize_rows,
      .reorder_group = reorder_group,
  };
  return table;
}

}  // namespace quire::QUIRE_ISA
