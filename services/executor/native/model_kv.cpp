// The blocks of keys and values that a model owns: where they are, and how they are copied and narrowed.
#include <cstring>
#include <string>

#include "services/executor/native/model.h"
#include "services/executor/native/refuse.h"

namespace quire {
size_t Model::layer_bytes(int format) const {
  return head_bytes(format, program_.shape.half) * size_t(program_.shape.kv_heads);
}

size_t Model::block_bytes(int format) const { return layer_bytes(format) * size_t(program_.shape.layers); }

void Model::allocate_kv(int format, int block_count) {
  kv_[format] = Memory(block_bytes(format) * size_t(block_count));
  block_counts_[format] = block_count;
  if (format == kKvF32 || format == kKvBf16) hot_format_ = format;
}

void Model::check_pairs(std::span<const int32_t> pairs, int from, int to) const {
  for (size_t i = 0; i < pairs.size(); i++) {
    const int32_t count = block_counts_[i % 2 ? to : from];
    if (pairs[i] < 0 || pairs[i] >= count) refuse("block " + std::to_string(pairs[i]) + " is not one of the pool's");
  }
}

void Model::copy_blocks(std::span<const int32_t> pairs) {
  check_pairs(pairs, hot_format_, hot_format_);
  const size_t bytes = block_bytes(hot_format_);
  uint8_t* blocks = kv_[hot_format_].data();
  for (size_t i = 0; i < pairs.size(); i += 2) {
    std::memmove(blocks + size_t(pairs[i + 1]) * bytes, blocks + size_t(pairs[i]) * bytes, bytes);
  }
}

void Model::narrow_blocks(std::span<const int32_t> pairs, int from, int to) {
  if (from != hot_format_ && from != kKvInt8) refuse("narrower blocks are made of hot or int8 ones");
  if (to <= from || to == kKvBf16) refuse("narrower blocks are int8 or int4");
  check_pairs(pairs, from, to);
  const Shape& s = program_.shape;
  const size_t head_from = head_bytes(from, s.half), head_to = head_bytes(to, s.half);
  auto work = [&](int thread) {
    pool_->for_each(thread, int(pairs.size() / 2) * s.layers, [&](int i) {
      const size_t pair = size_t(i / s.layers) * 2, layer = size_t(i % s.layers);
      const uint8_t* source = kv_[from].data() + size_t(pairs[pair]) * block_bytes(from) + layer * layer_bytes(from);
      uint8_t* target = kv_[to].data() + size_t(pairs[pair + 1]) * block_bytes(to) + layer * layer_bytes(to);
      for (size_t head = 0; head < size_t(s.kv_heads); head++) {
        kernels_.narrow_block(from, source + head * head_from, to, target + head * head_to, s.half);
      }
    });
  };
  pool_->run(work);
}

}  // namespace quire
