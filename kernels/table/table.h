// All kernels of one instruction set.
#pragma once

#include "kernels/head/cpu.h"
#include "kernels/matmul/format.h"
#include "kernels/paged_attention/cpu.h"
#include "kernels/rms_norm/cpu.h"
#include "kernels/rope/cpu.h"
#include "kernels/sampler/rule.h"

namespace quire {

struct KernelTable {
  const char* instruction_set;
  PanelKernel (*panel_kernel)(int format);
  ActivationForm (*activation_form)(int format);
  void (*embed)(const Residual&, NormFor, int format, const uint8_t* matrix, int token, int token_id);
  void (*add_residual)(const Residual&, NormFor, const float* sums, int first, int count, int panel, const float* bias);
  void (*inverse_rms)(const Residual&, int count, int hidden, float epsilon, float* out);
  void (*rotate_and_store)(const QkvTarget&, const float* sums, int first, int count, int panel, const float* bias);
  void (*attend)(const AttentionLayer&, const AttentionWork&, const AttentionWork* following, float* scratch);
  void (*attend_split)(const AttentionLayer&, const AttentionWork&, int split, float* scratch, float* state);
  void (*merge_splits)(const AttentionLayer&, const AttentionWork&, int split_count, const float* states,
                       float* scratch);
  void (*silu_mul)(const Activation& out, int forms, const float* first_panel, const float* second_panel, int first,
                   int count, int group, const float* inverse_rms, const float* bias);
  void (*clear_best)(Best, int rows);
  void (*head_panel)(const HeadTarget&, Best, const float* sums, int first_token, int first_row, int count, int panel);
  int32_t (*best_token)(const Best* threads, int count, int row);
  void (*narrow_block)(int from, const uint8_t* source, int to, uint8_t* target, int half);
  int32_t (*draw)(const float* logits, int vocab, const SamplingRule&, const History&, uint32_t output_position,
                  const uint32_t* allowed, const SamplerScratch&);
  TokenScore (*score)(const float* logits, int vocab, int target, int count, int32_t* top_ids, float* top_logprobs,
                      const SamplerScratch&);
  void (*noise_words)(const SamplingRule&, uint32_t output_position, int vocab, uint32_t* words);
  void (*quantize_rows)(const Activation& out, const float* values, int count);
  void (*reorder_group)(const Activation& in, ColumnOrder order, const Activation& out, int forms, int count,
                        int group);
};

}  // namespace quire
