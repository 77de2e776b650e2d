#include "services/executor/native/instruction_set.h"

#include <stdexcept>

namespace quire {

namespace portable {
const KernelTable& kernel_table();
}
#ifdef __x86_64__
namespace avx2 {
const KernelTable& kernel_table();
}
namespace avx512 {
const KernelTable& kernel_table();
}
namespace avx512_vnni {
const KernelTable& kernel_table();
}
#endif

namespace {

std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> found = {&portable::kernel_table()};
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) found.push_back(&avx2::kernel_table());
#ifdef QUIRE_EMULATE_AVX512
  const bool avx512 = avx2, vnni = avx2;
#else
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#endif
  if (avx512) found.push_back(&avx512::kernel_table());
  if (vnni) found.push_back(&avx512_vnni::kernel_table());
#endif
  return found;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const KernelTable* table : tables()) names.push_back(table->instruction_set);
  return names;
}

const KernelTable& kernels_for(const std::string& instruction_set) {
  std::string known;
  for (const KernelTable* table : tables()) {
    if (table->instruction_set == instruction_set) return *table;
    known += (known.empty() ? "" : ", ") + std::string(table->instruction_set);
  }
  throw std::invalid_argument("instruction set " + instruction_set + " is not one that this CPU runs: " + known);
}

}  // namespace quire
