// The epilogue of the head: logits of the rows that need them all, a running argmax for the others.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// One thread's argmax so far per row and lane; `panel` is where the lane's best lies.
struct Best {
  float* values = nullptr;    // [rows][32]
  int32_t* panels = nullptr;  // [rows][32]
};

struct HeadTarget {
  const float* inverse_rms = nullptr;   // [tokens]
  const int32_t* logit_rows = nullptr;  // per wanted row: its row of `logits`, or -1 for the argmax alone
  float* logits = nullptr;              // [logit rows][row_stride]
  size_t row_stride = 0;                // the padded vocabulary
  int vocab_size = 0;
};

namespace QUIRE_ISA {

void clear_best(Best best, int rows);

// Panel `panel` for wanted rows first_row .. + count, which are the tokens first_token ..; sums [count][32].
void head_panel(const HeadTarget& target, Best best, const float* sums, int first_token, int first_row, int count,
                int panel);

// The token of one row from the best of `count` threads: the highest logit, the lowest id among equals; -1 where a
// logit was NaN or +inf or all were -inf.
int32_t best_token(const Best* threads, int count, int row);

}  // namespace QUIRE_ISA
}  // namespace quire
