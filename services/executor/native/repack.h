// Words of 4-bit codes, as quantized checkpoints hold them, to the words of packed panels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Panels of 32 rows, of which one strip of rows is filled: words of lanes `lane` and the `width` - 1 following.
struct NibblePanels {
  uint8_t* data;
  size_t panel_bytes;
  size_t group_bytes;  // words of a group, and its numbers behind them
  int group_blocks;    // a block is 32 columns
  int lane;
  int width;
  int count;
};

// `words` [K / 8, count * width], a row `stride` words from the next: eight columns of a row each, from the low bits
// up. In panels, byte i of 16 holds columns i and i + 16 of a block. With `columns` [32 * blocks], column c of the
// panels is columns[c] of the words.
void repack_nibbles(const uint32_t* words, size_t stride, const int32_t* columns, int blocks,
                    const NibblePanels& panels);

// `words` [8 * eights, count], each eight rows of a column, to `out` [eights, 8 * count]: eight columns of a row each.
// Nibble i of a word is row rows[i] of its eight.
void turn_nibbles(const uint32_t* words, size_t stride, int eights, int count, const int (&rows)[8], uint32_t* out);

}  // namespace quire
