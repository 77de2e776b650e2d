#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "services/executor/native/bindings.h"
#include "services/executor/native/repack.h"

namespace nb = nanobind;

namespace quire {
namespace {

// Rows of words that lie side by side; one row may be far from the next.
using Words = nb::ndarray<const uint32_t, nb::ndim<2>, nb::device::cpu>;
using Panels = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NewWords = nb::ndarray<uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

size_t row_stride(const Words& words) {
  if (reinterpret_cast<uintptr_t>(words.data()) % alignof(uint32_t))
    throw std::invalid_argument("words are not aligned");
  if (words.shape(1) > 1 && words.stride(1) != 1) throw std::invalid_argument("words of a row must be neighbours");
  if (words.shape(0) > 1 && words.stride(0) < int64_t(words.shape(1))) throw std::invalid_argument("rows overlap");
  return size_t(words.stride(0));
}

void checked_repack(Words words, Panels panels, int lane, int group_columns, size_t group_bytes,
                    std::optional<Int32s> columns) {
  const size_t count = panels.shape(0);
  const size_t width = count ? words.shape(1) / count : 0;
  const size_t blocks = columns ? columns->size() / 32 : words.shape(0) / 4;
  if ((width != 16 && width != 32) || words.shape(1) != width * count || lane < 0 || lane + width > 32) {
    throw std::invalid_argument("words must be those of 16 or 32 lanes of each panel");
  }
  if ((columns ? columns->size() : words.shape(0) * 8) % 32) {
    throw std::invalid_argument("the columns of the words must be a multiple of 32");
  }
  for (size_t i = 0; columns && i < columns->size(); i++) {
    const int32_t column = columns->data()[i];
    if (column < 0 || size_t(column) >= words.shape(0) * 8) throw std::invalid_argument("words have no such column");
  }
  if (group_columns < 32 || group_columns % 32 || blocks * 32 % group_columns ||
      group_bytes < size_t(group_columns) * 16 || panels.shape(1) != blocks * 32 / group_columns * group_bytes ||
      group_bytes % sizeof(uint32_t)) {
    throw std::invalid_argument("panels do not have such groups");
  }
  if (reinterpret_cast<uintptr_t>(panels.data()) % alignof(uint32_t)) {
    throw std::invalid_argument("panels are not aligned");
  }
  const NibblePanels to = {panels.data(), panels.shape(1), group_bytes, group_columns / 32,
                           lane,          int(width),      int(count)};
  const size_t stride = row_stride(words);
  nb::gil_scoped_release release;
  repack_nibbles(words.data(), stride, columns ? columns->data() : nullptr, int(blocks), to);
}

void checked_turn(Words words, NewWords out, const std::vector<int>& rows) {
  int places[8] = {};
  std::vector<int> sorted = rows;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7})
    throw std::invalid_argument("rows must be 0..7 in some order");
  std::copy(rows.begin(), rows.end(), places);
  if (words.shape(0) % 8 || out.shape(0) != words.shape(0) / 8 || out.shape(1) != words.shape(1) * 8) {
    throw std::invalid_argument("out must have an eighth of the rows, each eight times as long");
  }
  const size_t stride = row_stride(words);
  nb::gil_scoped_release release;
  turn_nibbles(words.data(), stride, int(out.shape(0)), int(words.shape(1)), places, out.data());
}

}  // namespace

void bind_repack(nb::module_& module) {
  module.def(
      "repack_nibbles", &checked_repack, nb::arg("words").noconvert(), nb::arg("panels").noconvert(), nb::arg("lane"),
      nb::arg("group_columns"), nb::arg("group_bytes"), nb::arg("columns").noconvert() = nb::none(),
      "Fills 16 or 32 lanes of panels [P, bytes] from `lane` on with the codes in words [K / 8, rows], those of\n"
      "`columns` int32 in this order, or all of them.");
  module.def("turn_nibbles", &checked_turn, nb::arg("words").noconvert(), nb::arg("out").noconvert(), nb::arg("rows"),
             "Words [K, n] of eight rows as words [K / 8, 8 n] of eight columns; rows[i] is the row of nibble i.");
}

}  // namespace quire
