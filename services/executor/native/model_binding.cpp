#include <nanobind/stl/optional.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "services/executor/native/bindings.h"
#include "services/executor/native/instruction_set.h"
#include "services/executor/native/step_binding.h"

namespace nb = nanobind;

namespace quire {
namespace {

constexpr const char* kKvNames[kKvFormatCount] = {"f32", "bf16", "int8", "int4"};

int kv_format(const std::string& name) {
  for (int i = 0; i < kKvFormatCount; i++) {
    if (name == kKvNames[i]) return i;
  }
  throw std::invalid_argument("unknown KV format " + name + "; there are f32, bf16, int8, int4");
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> logits(BoundModel& self, Int32s token_ids, Int32s positions,
                                                  Int32s query_starts, Int32s context_lengths, Int32Table block_tables,
                                                  Int32s rows, const std::optional<ByteTable>& block_formats) {
  const StepInputs inputs =
      make_inputs(token_ids, positions, query_starts, context_lengths, block_tables, block_formats);
  const size_t vocab = size_t(self.model().shape().vocab_size), count = rows.size();
  std::vector<WantedRow> wanted;
  for (size_t i = 0; i < count; i++) wanted.push_back({rows.data()[i], true});
  auto [out, owner] = new_array<float>(count * vocab);
  {
    nb::gil_scoped_release release;
    self.model().step(inputs, wanted, [vocab, out = out](int row, float* logits, int32_t, int) {
      std::copy_n(logits, vocab, out + size_t(row) * vocab);
    });
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(out, {count, vocab}, owner);
}

// A view: reading and writing it takes no lock, as long as no step and no other call uses the same blocks.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> kv_blocks(BoundModel& self, const std::string& format) {
  const int which = kv_format(format);
  Model& model = self.model();
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(
      model.blocks(which), {size_t(model.block_count(which)), model.block_bytes(which)}, nb::find(self));
}

}  // namespace

void bind_model(nb::module_& module) {
  nb::class_<Gate>(module, "Gate", "Shut until it is opened, once; a step may wait for it.")
      .def(nb::init<>())
      .def("open", &Gate::open, "Lets through who waits, and who comes later. For any thread.");
  nb::class_<BoundModel>(module, "Model", "A program with its weights, keys and values. Not thread-safe.")
      .def(
          "__init__",
          [](BoundModel* self, const ProgramBuilder& program, Bytes weights, std::shared_ptr<ThreadPool> pool,
             const std::string& instruction_set) {
            if (reinterpret_cast<uintptr_t>(weights.data()) % 64)
              throw std::invalid_argument("weights must be 64-byte aligned");
            new (self) BoundModel(program, weights, std::move(pool), kernels_for(instruction_set));
          },
          nb::arg("program"), nb::arg("weights").noconvert(), nb::arg("pool"), nb::arg("instruction_set"))
      .def(
          "kv_block_bytes",
          [](BoundModel& self, const std::string& format) { return self.model().block_bytes(kv_format(format)); },
          nb::arg("kv_format"), "Bytes of one block of 32 tokens over all layers.")
      .def(
          "allocate_kv",
          [](BoundModel& self, int block_count, const std::string& format) {
            if (block_count < 1) throw std::invalid_argument("block_count must be at least 1");
            self.model().allocate_kv(kv_format(format), block_count);
          },
          nb::arg("block_count"), nb::arg("kv_format"), "Makes a pool of blocks; f32 or bf16 is the hot one.")
      .def("kv_blocks", &kv_blocks, nb::arg("kv_format"),
           "The pool of that format as uint8 [blocks, bytes of a block], to read and write blocks that no step uses.")
      .def(
          "copy_blocks",
          [](BoundModel& self, Int32Table pairs) {
            if (pairs.shape(1) != 2) throw std::invalid_argument("pairs must be [n, 2]");
            nb::gil_scoped_release release;
            self.model().copy_blocks({pairs.data(), pairs.size()});
          },
          nb::arg("pairs").noconvert(), "Copies whole hot blocks (source, target), in order.")
      .def(
          "narrow_blocks",
          [](BoundModel& self, Int32Table pairs, const std::string& from_format, const std::string& to_format) {
            if (pairs.shape(1) != 2) throw std::invalid_argument("pairs must be [n, 2]");
            const int from = kv_format(from_format), to = kv_format(to_format);
            nb::gil_scoped_release release;
            self.model().narrow_blocks({pairs.data(), pairs.size()}, from, to);
          },
          nb::arg("pairs").noconvert(), nb::arg("from_format"), nb::arg("to_format"),
          "Rewrites full blocks (source, target), hot as int8 or int4 or int8 as int4, in any order.")
      .def(
          "step",
          [](BoundModel& self, Int32s token_ids, Int32s positions, Int32s query_starts, Int32s context_lengths,
             Int32Table block_tables, Int32s rows, nb::list samplers, Int32s output_positions, nb::list scored,
             const std::optional<ByteTable>& block_formats, const std::optional<Int32s>& drafts,
             const std::optional<Int32s>& draft_counts, const std::optional<Int32s>& first_places,
             const std::optional<MaskTable>& masks, const std::optional<Int32s>& mask_rows, const Gate* masks_filled,
             int layers, const nb::list& pooled) {
            return self.step(
                make_inputs(token_ids, positions, query_starts, context_lengths, block_tables, block_formats), rows,
                samplers, output_positions, scored, {drafts, draft_counts, first_places},
                {masks, mask_rows, masks_filled}, layers, pooled);
          },
          nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(), nb::arg("query_starts").noconvert(),
          nb::arg("context_lengths").noconvert(), nb::arg("block_tables").noconvert(), nb::arg("rows").noconvert(),
          nb::arg("samplers"), nb::arg("output_positions").noconvert(), nb::arg("scored"),
          nb::arg("block_formats").noconvert() = nb::none(), nb::arg("drafts").noconvert() = nb::none(),
          nb::arg("draft_counts").noconvert() = nb::none(), nb::arg("first_places").noconvert() = nb::none(),
          nb::arg("masks").noconvert() = nb::none(), nb::arg("mask_rows").noconvert() = nb::none(),
          nb::arg("masks_filled") = nb::none(), nb::arg("layers") = 0, nb::arg("pooled") = nb::list(),
          R"(Computes a step and samples after flattened rows `rows` [R].

`samplers` [R] holds a Sampler, or None for the argmax; `scored` holds (first row, targets int32 [n], alternatives).
`block_formats` uint8 [S, W] says for each entry of block_tables which pool it is of: 0 f32, 1 bf16, 2 int8, 3 int4;
None means the hot one. Blocks that the step writes are hot.

`drafts` int32 [D] holds `draft_counts` [R] tokens for each sampled row, which are taken for output that its sampler has
not observed. As many tokens more are drawn for it, one after each draft, from the rows that follow; those before its
`first_places` [R] are left out, with their rows. `layers`: the head follows the first so many layers, 0 for all.

`masks` uint32 [M, ceil(V / 32)] holds a bit per token; `mask_rows` int32 [R] says which of them hold for each sampled
row, one for each token to draw from that one on, -1 for none. Another thread may fill them while the step is computed:
they are read once the Gate `masks_filled` is open. A masked row needs a Sampler.

`pooled` holds (first row, count, total float64 [hidden size]): the states of these rows, behind the last norm, are
added to `total` in order.

Returns (token ids int32, -1 where logits were not finite or nothing was allowed; per token scores or None; per scored
part scores). Scores are (log probabilities, ranks, alternatives' ids, their log probabilities). Raises ValueError,
before anything is computed, where the inputs contradict each other or the model.)")
      .def("logits", &logits, nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("query_starts").noconvert(), nb::arg("context_lengths").noconvert(),
           nb::arg("block_tables").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("block_formats").noconvert() = nb::none(),
           "Computes a step and returns the logits [R, V] after flattened rows `rows`.");
}

}  // namespace quire
