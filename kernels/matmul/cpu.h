// What matmul offers to the other kernels of the same instruction set.
#pragma once

#include "kernels/matmul/format.h"

namespace quire::QUIRE_ISA {

PanelKernel panel_kernel(int format);

// The form that a matrix of this format multiplies.
ActivationForm activation_form(int format);

// Stores values [count][k] in every form.
void quantize_rows(const Activation& out, const float* values, int count);

// Stores the 32 values of columns 32 * group and on, taken from in.values in their order, in the given forms, for
// tokens 0 .. count.
void reorder_group(const Activation& in, ColumnOrder order, const Activation& out, int forms, int count, int group);

}  // namespace quire::QUIRE_ISA
