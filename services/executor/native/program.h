// A model as data: a flat list of operations over packed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/matmul/format.h"

namespace quire {

// A packed matrix; rows and k are padded to whole panels and groups.
struct Matrix {
  int format = kF32;
  int rows = 0, k = 0;
  const uint8_t* data = nullptr;

  int panels() const { return rows / 32; }
  const uint8_t* panel(int index) const { return data + size_t(index) * panel_bytes(format, k); }
  Ahead ahead(int index) const { return {panel(index), panel_bytes(format, k)}; }
};

enum class OpKind { kEmbed, kQkv, kAttention, kAttentionOutput, kGateUp, kDown, kHead };

struct Op {
  OpKind kind = OpKind::kEmbed;
  int layer = 0;
  Matrix matrices[3];           // q, k and v; else the first alone
  const float* norm = nullptr;  // gains of the norm before this operation
  const float* bias = nullptr;  // [rows of all matrices]
  ColumnOrder order = nullptr;  // [k] of all matrices' columns; null: as the inputs come
};

// Sizes as the kernels see them: hidden and intermediate padded to 32, heads to whole rotary panels.
struct Shape {
  int vocab_size = 0;
  int hidden_size = 0;  // true size: the mean of squares divides by it
  int padded_hidden = 0;
  int heads = 0, kv_heads = 0;
  int half = 0;  // half the padded head size
  int intermediate_size = 0;
  int context_length = 0;
  int layers = 0;
  float norm_epsilon = 0.0f;
  float attention_scale = 0.0f;
  std::vector<float> rotary_frequencies;  // [half]; 0 where padded
};

// Of a layer: kQkv to kDown.
constexpr int kLayerOps = 5;

struct Program {
  Shape shape;
  std::vector<Op> ops;
};

// Throws std::invalid_argument naming the operation or size that does not fit.
void check(const Program& program);

}  // namespace quire
