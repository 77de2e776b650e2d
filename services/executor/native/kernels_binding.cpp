// Kernels one by one, for tests.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "kernels/matmul/format.h"
#include "services/executor/native/bindings.h"
#include "services/executor/native/instruction_set.h"
#include "services/executor/native/workspace.h"

namespace nb = nanobind;

namespace quire {
namespace {

constexpr const char* kFormatNames[kFormatCount] = {"f32",    "bf16",   "q8",      "q8c",     "q4g32", "q4g64",
                                                    "q4g128", "q4mg32", "q4mg64",  "q4mg128", "q4k",   "q6k",
                                                    "q4zg32", "q4zg64", "q4zg128", "f8"};

int checked_format(int format) {
  if (format < 0 || format >= kFormatCount) throw std::invalid_argument("unknown format " + std::to_string(format));
  return format;
}

// values [tokens, k] x a packed matrix [rows, k] -> [tokens, rows]; tokens go to the kernel `chunk` at a time.
nb::ndarray<nb::numpy, float, nb::ndim<2>> matmul(FloatTable values, Bytes packed, int format, int rows,
                                                  const std::string& instruction_set, int chunk) {
  const KernelTable& kernels = kernels_for(instruction_set);
  const int tokens = int(values.shape(0)), k = int(values.shape(1));
  const size_t bytes = panel_bytes(checked_format(format), k);
  if (rows % 32 || k % group_size(format) || k < 32 || packed.size() != bytes * size_t(rows / 32)) {
    throw std::invalid_argument("the packed matrix does not have this shape");
  }
  if (chunk < 1 || tokens < 1) throw std::invalid_argument("chunk and tokens must be at least 1");
  Activation in;
  in.stride = padded_stride(tokens);
  Carver count(nullptr);
  lay_out(count, in, k, tokens);
  const Memory memory(count.used());
  Carver carver(memory.data());
  lay_out(carver, in, k, tokens);
  kernels.quantize_rows(in, values.data(), tokens);
  auto [out, owner] = new_array<float>(size_t(tokens) * rows);
  std::vector<float> sums(size_t(chunk) * 32);
  const PanelKernel kernel = kernels.panel_kernel(format);
  for (int panel = 0; panel < rows / 32; panel++) {
    for (int first = 0; first < tokens; first += chunk) {
      const int n = std::min(chunk, tokens - first);
      kernel(packed.data() + size_t(panel) * bytes, in, first, n, sums.data(), {});
      for (int t = 0; t < n; t++) {
        std::copy_n(sums.data() + t * 32, 32, out + size_t(first + t) * rows + panel * 32);
      }
    }
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(out, {size_t(tokens), size_t(rows)}, owner);
}

}  // namespace

void bind_kernels(nb::module_& module) {
  nb::dict formats;
  for (int i = 0; i < kFormatCount; i++) formats[kFormatNames[i]] = i;
  module.attr("FORMATS") = formats;
  module.def(
      "panel_bytes",
      [](int format, int k) {
        checked_format(format);
        if (k < 1 || k % group_size(format)) throw std::invalid_argument("k is no multiple of the format's group");
        return panel_bytes(format, k);
      },
      nb::arg("format"), nb::arg("k"), "Bytes of a panel of 32 rows.");
  module.def("matmul", &matmul, nb::arg("values").noconvert(), nb::arg("packed").noconvert(), nb::arg("format"),
             nb::arg("rows"), nb::arg("instruction_set"), nb::arg("chunk") = 48,
             "values [tokens, k] fp32 x a packed matrix [rows, k] -> fp32 [tokens, rows].");
}

}  // namespace quire
