// RMSNorm without a pass of its own: whoever writes the residual stream also stores x * gain for the next matmul and a
// sum of squares per 32 values; the next matmul's epilogue multiplies by 1 / rms. Quantization is scale invariant, so
// nothing is lost.
#pragma once

#include "kernels/matmul/format.h"

namespace quire {

// The residual stream [tokens, k] and what the next matmul wants of it.
struct Residual {
  float* x = nullptr;            // [tokens][k]
  Activation* normed = nullptr;  // x * gain; k and stride are the stream's
  float* squares = nullptr;      // [k / 32][stride], readable for a whole vector more
};

// How the stream is normed for its next reader.
struct NormFor {
  const float* gains = nullptr;  // [k]
  int forms = 0;                 // of ActivationForm
};

namespace QUIRE_ISA {

// x += sums + bias for panel `panel` of tokens first .. first + count; sums [count][32], bias [k] or null.
void add_residual(const Residual& stream, NormFor next, const float* sums, int first, int count, int panel,
                  const float* bias);

// x = the row of the packed matrix [vocabulary, k] that belongs to a token.
void embed(const Residual& stream, NormFor next, int format, const uint8_t* matrix, int token, int token_id);

// out[t] = 1 / sqrt(mean of squares + epsilon) for tokens 0 .. count, rounded up to whole vectors.
void inverse_rms(const Residual& stream, int count, int hidden, float epsilon, float* out);

}  // namespace QUIRE_ISA
}  // namespace quire
