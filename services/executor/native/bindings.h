// The parts of the Python module kernels._native.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>

namespace quire {

template <class T, class Shape>
using HostArray = nanobind::ndarray<T, Shape, nanobind::c_contig, nanobind::device::cpu>;
using Int32s = HostArray<const int32_t, nanobind::ndim<1>>;
using Int32Table = HostArray<const int32_t, nanobind::ndim<2>>;
using Floats = HostArray<const float, nanobind::ndim<1>>;
using FloatTable = HostArray<const float, nanobind::ndim<2>>;
using Bytes = HostArray<const uint8_t, nanobind::ndim<1>>;

// `count` values that belong to the Python object that `owner` becomes.
template <class T>
struct NewArray {
  T* values;
  nanobind::capsule owner;
};
template <class T>
NewArray<T> new_array(size_t count) {
  T* values = new T[count];
  return {values, nanobind::capsule(values, [](void* p) noexcept { delete[] static_cast<T*>(p); })};
}

void bind_kernels(nanobind::module_& module);
void bind_model(nanobind::module_& module);
void bind_program(nanobind::module_& module);
void bind_prompt_lookup(nanobind::module_& module);
void bind_read_bandwidth(nanobind::module_& module);
void bind_repack(nanobind::module_& module);
void bind_sampler(nanobind::module_& module);

}  // namespace quire
