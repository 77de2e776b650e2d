#include "services/executor/native/program.h"

#include <string>

#include "services/executor/native/refuse.h"

namespace quire {
namespace {

void check_matrix(const Matrix& matrix, int rows, int k, const std::string& name) {
  if (matrix.format < 0 || matrix.format >= kFormatCount) refuse(name + ": unknown format");
  if (matrix.rows != rows || matrix.k != k) {
    refuse(name + " is " + std::to_string(matrix.rows) + " x " + std::to_string(matrix.k) + ", expected " +
           std::to_string(rows) + " x " + std::to_string(k));
  }
  if (k % group_size(matrix.format) != 0) refuse(name + ": " + std::to_string(k) + " columns are no whole groups");
}

// Embedding, five operations a layer, head; and a norm before each operation that reads the residual stream.
void check_order(const Program& program) {
  constexpr OpKind kLayer[kLayerOps] = {OpKind::kQkv, OpKind::kAttention, OpKind::kAttentionOutput, OpKind::kGateUp,
                                        OpKind::kDown};
  const size_t count = program.ops.size();
  bool fits = count == size_t(program.shape.layers) * kLayerOps + 2;
  for (size_t i = 0; i < count && fits; i++) {
    const Op& op = program.ops[i];
    fits = op.kind == (i == 0 ? OpKind::kEmbed : i + 1 == count ? OpKind::kHead : kLayer[(i - 1) % kLayerOps]);
    const bool reads_stream = op.kind == OpKind::kQkv || op.kind == OpKind::kGateUp || op.kind == OpKind::kHead;
    if (reads_stream && !op.norm) refuse("layer " + std::to_string(op.layer) + ": a norm is missing");
  }
  if (!fits) refuse("a program is embed; qkv, attention, attention_output, gate_up, down a layer; head");
}

}  // namespace

void check(const Program& program) {
  const Shape& s = program.shape;
  if (s.vocab_size < 1 || s.hidden_size < 1 || s.intermediate_size < 1 || s.context_length < 1 || s.layers < 1) {
    refuse("a size is not positive");
  }
  // Sums of integer products of a whole head must fit into 32 bits, and so must every count of rows.
  constexpr int kMostHalf = 256, kMostHeads = 1 << 14, kMostRows = 1 << 28;
  if (s.half > kMostHalf || s.heads > kMostHeads || s.hidden_size > kMostRows || s.vocab_size > kMostRows ||
      s.intermediate_size > kMostRows) {
    refuse("a size is larger than the kernels take");
  }
  if (s.padded_hidden % 32 || s.intermediate_size % 32 || s.half % 16 || s.half < 16) refuse("a size is not padded");
  if (s.kv_heads < 1 || s.heads < s.kv_heads || s.heads % s.kv_heads) refuse("heads do not share kv heads evenly");
  check_order(program);
  const int size = 2 * s.half;
  for (const Op& op : program.ops) {
    const std::string name = "layer " + std::to_string(op.layer) + ": ";
    const int vocab = (s.vocab_size + 31) / 32 * 32;
    switch (op.kind) {
      case OpKind::kEmbed:
        check_matrix(op.matrices[0], vocab, s.padded_hidden, "embedding");
        break;
      case OpKind::kQkv:
        check_matrix(op.matrices[0], s.heads * size, s.padded_hidden, name + "q");
        check_matrix(op.matrices[1], s.kv_heads * size, s.padded_hidden, name + "k");
        check_matrix(op.matrices[2], s.kv_heads * size, s.padded_hidden, name + "v");
        break;
      case OpKind::kAttention:
        break;
      case OpKind::kAttentionOutput:
        check_matrix(op.matrices[0], s.padded_hidden, s.heads * size, name + "o");
        break;
      case OpKind::kGateUp:
        check_matrix(op.matrices[0], 2 * s.intermediate_size, s.padded_hidden, name + "gate_up");
        break;
      case OpKind::kDown:
        check_matrix(op.matrices[0], s.padded_hidden, s.intermediate_size, name + "down");
        break;
      case OpKind::kHead:
        check_matrix(op.matrices[0], vocab, s.padded_hidden, "head");
        break;
    }
  }
}

}  // namespace quire
