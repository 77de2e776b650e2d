// The Python module kernels._native.
#include "services/executor/native/bindings.h"
#include "services/executor/native/instruction_set.h"
#include "services/executor/native/pool.h"

namespace nb = nanobind;

// Part of a model's fingerprint: raised whenever some logit may come out differently than before.
static constexpr int kVersion = 1;

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);  // a process that ends keeps its model until then, and says nothing of it
  module.doc() = "Native kernels and the program that calls them.";
  module.attr("VERSION") = kVersion;
  module.def("instruction_sets", &quire::instruction_sets, "Instruction sets that this CPU runs, weakest first.");
  nb::class_<quire::ThreadPool>(module, "ThreadPool", "Threads that models share; the caller of a step is the first.")
      .def(
          "__init__",
          [](quire::ThreadPool* self, int threads) {
            if (threads < 1 || threads > 1024) throw nb::value_error("threads must be in 1..1024");
            new (self) quire::ThreadPool(threads);
          },
          nb::arg("threads"))
      .def_prop_ro("size", &quire::ThreadPool::size);
  quire::bind_kernels(module);
  quire::bind_program(module);
  quire::bind_sampler(module);
  quire::bind_model(module);
  quire::bind_prompt_lookup(module);
  quire::bind_read_bandwidth(module);
  quire::bind_repack(module);
}
