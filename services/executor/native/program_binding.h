// Collects a program from Python before its weights are known.
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "services/executor/native/program.h"

namespace quire {

using PackedMatrix = std::tuple<int, int, int, int64_t>;  // format, rows, k, byte offset

class ProgramBuilder {
 public:
  explicit ProgramBuilder(Shape shape) { program_.shape = std::move(shape); }

  ProgramBuilder& add(OpKind kind, const std::vector<PackedMatrix>& matrices, int64_t norm, int64_t bias,
                      int64_t order);

  // The program over `size` bytes of weights. Throws std::invalid_argument where something lies outside.
  Program bind(const uint8_t* weights, size_t size) const;

 private:
  struct Offsets {
    int64_t matrices[3] = {-1, -1, -1};
    int64_t norm = -1, bias = -1, order = -1;
  };

  Program program_;
  std::vector<Offsets> offsets_;
  int layer_ = 0;
};

}  // namespace quire
