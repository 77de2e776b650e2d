#include "services/executor/native/repack.h"

#include <initializer_list>

namespace quire {
namespace {

constexpr int kBlockWords = 4;
constexpr int kLanes = 32;

// Nibbles 0..7 in the order 0, 4, 1, 5, 2, 6, 3, 7.
inline uint32_t shuffled(uint32_t word) {
  uint32_t moved = (word ^ (word >> 8)) & 0x0000FF00u;
  word ^= moved ^ (moved << 8);
  moved = (word ^ (word >> 4)) & 0x00F000F0u;
  return word ^ moved ^ (moved << 4);
}

// The four words of a block, of `Width` neighbouring rows.
template <int Width>
void repack_block(const uint32_t* words, size_t stride, uint32_t* out) {
  for (int half = 0; half < 2; half++) {
    const uint32_t* first = words + half * stride;
    const uint32_t* second = first + 2 * stride;
    uint32_t* low = out + 2 * half * kLanes;
    uint32_t* high = low + kLanes;
    for (int i = 0; i < Width; i++) {
      const uint32_t a = first[i], b = second[i];
      low[i] = shuffled((a & 0xFFFFu) | (b << 16));
      high[i] = shuffled((a >> 16) | (b & 0xFFFF0000u));
    }
  }
}

// The same with columns from anywhere: `words` [.., Width] are those of all columns, `columns` 32 of these.
template <int Width>
void gather_block(const uint32_t* words, size_t stride, const int32_t* columns, uint32_t* out) {
  for (int part = 0; part < kBlockWords; part++, out += kLanes) {
    uint32_t found[Width] = {};
    for (int byte = 0; byte < 4; byte++) {
      for (int half = 0; half < 2; half++) {
        const int column = columns[16 * half + 4 * part + byte];
        const uint32_t* from = words + size_t(column / 8) * stride;
        const int down = column % 8 * 4, up = 8 * byte + 4 * half;
        for (int i = 0; i < Width; i++) found[i] |= ((from[i] >> down) & 15u) << up;
      }
    }
    for (int i = 0; i < Width; i++) out[i] = found[i];
  }
}

template <int Width>
void repack_panels(const uint32_t* words, size_t stride, const int32_t* columns, int blocks,
                   const NibblePanels& panels) {
  for (int panel = 0; panel < panels.count; panel++) {
    const uint32_t* const from = words + size_t(panel) * Width;
    uint8_t* const to = panels.data + panel * panels.panel_bytes;
    for (int block = 0; block < blocks; block++) {
      const size_t at = block / panels.group_blocks * panels.group_bytes +
                        size_t(block % panels.group_blocks) * kBlockWords * kLanes * sizeof(uint32_t);
      uint32_t* const out = reinterpret_cast<uint32_t*>(to + at) + panels.lane;
      if (columns) {
        gather_block<Width>(from, stride, columns + block * kLanes, out);
      } else {
        repack_block<Width>(from + block * kBlockWords * stride, stride, out);
      }
    }
  }
}

// Swaps the nibbles of `first` at odd multiples of `distance` with those of `second` before them.
inline void swap_nibbles(uint32_t& first, uint32_t& second, int distance, uint32_t mask) {
  const uint32_t moved = ((first >> (4 * distance)) ^ second) & mask;
  second ^= moved;
  first ^= moved << (4 * distance);
}

}  // namespace

void repack_nibbles(const uint32_t* words, size_t stride, const int32_t* columns, int blocks,
                    const NibblePanels& panels) {
  const auto repack = panels.width == kLanes ? repack_panels<kLanes> : repack_panels<kLanes / 2>;
  repack(words, stride, columns, blocks, panels);
}

void turn_nibbles(const uint32_t* words, size_t stride, int eights, int count, const int (&rows)[8], uint32_t* out) {
  for (int eight = 0; eight < eights; eight++) {
    const uint32_t* from = words + size_t(eight) * 8 * stride;
    for (int i = 0; i < count; i++, out += 8) {
      uint32_t w[8];
      for (int k = 0; k < 8; k++) w[k] = from[k * stride + i];
      for (int k = 0; k < 4; k++) swap_nibbles(w[k], w[k + 4], 4, 0x0000FFFFu);
      for (int k : {0, 1, 4, 5}) swap_nibbles(w[k], w[k + 2], 2, 0x00FF00FFu);
      for (int k : {0, 2, 4, 6}) swap_nibbles(w[k], w[k + 1], 1, 0x0F0F0F0Fu);
      for (int k = 0; k < 8; k++) out[rows[k]] = w[k];
    }
  }
}

}  // namespace quire
