// The Python module kernels._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace quire {
namespace portable {
const char* name();
}
#ifdef __x86_64__
namespace avx2 {
const char* name();
}
namespace avx512 {
const char* name();
}
namespace avx512_vnni {
const char* name();
}
#endif

std::vector<std::string> compiled_sets() {
#ifdef __x86_64__
  return {portable::name(), avx2::name(), avx512::name(), avx512_vnni::name()};
#else
  return {portable::name()};
#endif
}
}  // namespace quire

NB_MODULE(_native, module) {
  module.doc() = "Native kernels and the program that calls them.";
  module.def("compiled_sets", &quire::compiled_sets, "Instruction sets compiled in, weakest first.");
}
