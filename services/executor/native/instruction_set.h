// Which kernels this CPU runs.
#pragma once

#include <string>
#include <vector>

#include "kernels/table/table.h"

namespace quire {

// Instruction sets that are compiled in and that this CPU (and its system) can run, weakest first.
std::vector<std::string> instruction_sets();

// Throws std::invalid_argument naming those that there are.
const KernelTable& kernels_for(const std::string& instruction_set);

}  // namespace quire
