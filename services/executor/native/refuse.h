// How native code says that it was asked for what cannot be: Python gets a ValueError.
#pragma once

#include <stdexcept>
#include <string>

namespace quire {

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(what); }

}  // namespace quire
