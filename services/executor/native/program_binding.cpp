#include "services/executor/native/program_binding.h"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "services/executor/native/bindings.h"
#include "services/executor/native/program.h"

namespace nb = nanobind;

namespace quire {
namespace {

Matrix unbound(const PackedMatrix& packed) {
  Matrix matrix;
  matrix.format = std::get<0>(packed);
  matrix.rows = std::get<1>(packed);
  matrix.k = std::get<2>(packed);
  return matrix;
}

}  // namespace

ProgramBuilder& ProgramBuilder::add(OpKind kind, const std::vector<PackedMatrix>& matrices, int64_t norm, int64_t bias,
                                    int64_t order) {
  Op op;
  op.kind = kind;
  op.layer = layer_;
  Offsets offsets;
  for (size_t i = 0; i < matrices.size(); i++) {
    op.matrices[i] = unbound(matrices[i]);
    offsets.matrices[i] = std::get<3>(matrices[i]);
  }
  offsets.norm = norm;
  offsets.bias = bias;
  offsets.order = order;
  program_.ops.push_back(op);
  offsets_.push_back(offsets);
  if (kind == OpKind::kDown) program_.shape.layers = ++layer_;
  return *this;
}

Program ProgramBuilder::bind(const uint8_t* weights, size_t size) const {
  Program program = program_;
  auto at = [&](int64_t offset, size_t bytes, const char* what) -> const uint8_t* {
    if (offset < 0 || offset % 64 != 0 || bytes > size || uint64_t(offset) > size - bytes) {
      throw std::invalid_argument(std::string(what) + " lies outside the weights or is not aligned");
    }
    return weights + offset;
  };
  for (size_t i = 0; i < program.ops.size(); i++) {
    Op& op = program.ops[i];
    size_t rows = 0;
    for (int m = 0; m < 3; m++) {
      Matrix& matrix = op.matrices[m];
      if (matrix.rows == 0) continue;
      if (matrix.format < 0 || matrix.format >= kFormatCount || matrix.rows < 32 || matrix.rows % 32 || matrix.k < 32 ||
          matrix.k % group_size(matrix.format)) {
        throw std::invalid_argument("layer " + std::to_string(op.layer) + ": a matrix of format " +
                                    std::to_string(matrix.format) + ", " + std::to_string(matrix.rows) + " x " +
                                    std::to_string(matrix.k) + " is not packed in whole panels and groups");
      }
      matrix.data =
          at(offsets_[i].matrices[m], panel_bytes(matrix.format, matrix.k) * size_t(matrix.panels()), "a matrix");
      rows += size_t(matrix.rows);
    }
    if (offsets_[i].norm >= 0) {
      op.norm = reinterpret_cast<const float*>(at(offsets_[i].norm, size_t(program.shape.padded_hidden) * 4, "a norm"));
    }
    if (offsets_[i].bias >= 0) op.bias = reinterpret_cast<const float*>(at(offsets_[i].bias, rows * 4, "a bias"));
    if (offsets_[i].order >= 0) {
      const int k = op.matrices[0].k;
      op.order = reinterpret_cast<ColumnOrder>(at(offsets_[i].order, size_t(k) * 4, "an order of columns"));
      if (std::any_of(op.order, op.order + k, [k](int32_t from) { return from < -1 || from >= k; })) {
        throw std::invalid_argument("layer " + std::to_string(op.layer) +
                                    ": an order names columns that are not there");
      }
    }
  }
  return program;
}

void bind_program(nb::module_& module) {
  using Builder = ProgramBuilder;
  nb::class_<Builder>(module, "Program", R"(A flat list of operations over packed weights.

A matrix is (format, rows, k, byte offset into the weights); norms and biases are offsets of fp32 vectors, -1 for none.
An order is the offset of an int32 vector [k]: which input each column of all the operation's matrices multiplies, -1
for none; without it (-1), columns are in the order of the inputs.)")
      .def(
          "__init__",
          [](Builder* self, int vocab_size, int hidden_size, int head_count, int kv_head_count, int head_size,
             int intermediate_size, int context_length, float norm_epsilon, float attention_scale,
             HostArray<const double, nb::ndim<1>> rotary_frequencies) {
            Shape shape;
            shape.vocab_size = vocab_size;
            shape.hidden_size = hidden_size;
            shape.padded_hidden = (hidden_size + 31) / 32 * 32;
            shape.heads = head_count;
            shape.kv_heads = kv_head_count;
            shape.half = head_size / 2;
            shape.intermediate_size = intermediate_size;
            shape.context_length = context_length;
            shape.norm_epsilon = norm_epsilon;
            shape.attention_scale = attention_scale;
            if (rotary_frequencies.shape(0) != size_t(shape.half)) {
              throw nb::value_error("rotary_frequencies must hold one number per pair of a padded head");
            }
            for (size_t i = 0; i < size_t(shape.half); i++) {
              shape.rotary_frequencies.push_back(float(rotary_frequencies.data()[i]));
            }
            new (self) Builder(std::move(shape));
          },
          nb::arg("vocab_size"), nb::arg("hidden_size"), nb::arg("head_count"), nb::arg("kv_head_count"),
          nb::arg("head_size"), nb::arg("intermediate_size"), nb::arg("context_length"), nb::arg("norm_epsilon"),
          nb::arg("attention_scale"), nb::arg("rotary_frequencies").noconvert())
      .def(
          "embed", [](Builder& b, PackedMatrix m) { b.add(OpKind::kEmbed, {m}, -1, -1, -1); }, nb::arg("matrix"))
      .def(
          "qkv",
          [](Builder& b, int64_t norm, PackedMatrix q, PackedMatrix k, PackedMatrix v, int64_t bias, int64_t order) {
            b.add(OpKind::kQkv, {q, k, v}, norm, bias, order);
          },
          nb::arg("norm"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("bias") = -1, nb::arg("order") = -1)
      .def("attention", [](Builder& b) { b.add(OpKind::kAttention, {}, -1, -1, -1); })
      .def(
          "attention_output",
          [](Builder& b, PackedMatrix m, int64_t bias, int64_t order) {
            b.add(OpKind::kAttentionOutput, {m}, -1, bias, order);
          },
          nb::arg("matrix"), nb::arg("bias") = -1, nb::arg("order") = -1)
      .def(
          "gate_up",
          [](Builder& b, int64_t norm, PackedMatrix m, int64_t bias, int64_t order) {
            b.add(OpKind::kGateUp, {m}, norm, bias, order);
          },
          nb::arg("norm"), nb::arg("matrix"), nb::arg("bias") = -1, nb::arg("order") = -1)
      .def(
          "down",
          [](Builder& b, PackedMatrix m, int64_t bias, int64_t order) { b.add(OpKind::kDown, {m}, -1, bias, order); },
          nb::arg("matrix"), nb::arg("bias") = -1, nb::arg("order") = -1)
      .def(
          "head",
          [](Builder& b, int64_t norm, PackedMatrix m, int64_t order) { b.add(OpKind::kHead, {m}, norm, -1, order); },
          nb::arg("norm"), nb::arg("matrix"), nb::arg("order") = -1);
}

}  // namespace quire
