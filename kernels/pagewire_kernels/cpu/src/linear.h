// Linear layers: y = x W^T + b.
//
// A weight [out_features, in_features] is packed in panels of `kPanel` outputs, each with the same
// step (see dot.h) of all its outputs side by side:
//
//   packed[out_features / kPanel][in_features / kInputsPerStep][kPanel] of 32 bits each
//
// both rounded up, with zeros where the weight has nothing. A panel is read from its beginning to
// its end, and a step of it is two vector registers.
//
// Of a gated layer, y = activation(x G^T + b) * (x U^T + c) with G and U one after the other in the
// weight, a panel's first register has outputs of G and its second the same ones of U.
#pragma once

#include "activation.h"
#include "batch.h"
#include "dot.h"
#include "team.h"

namespace pagewire {

constexpr int64_t kPanelVectors = 2;
constexpr int64_t kPanel = kPanelVectors * kLanes;
constexpr int64_t kStepBytes = kPanel * 4;

// Of a weight in fewer bits; see quantized.h.
struct Quantization {
  int64_t group_size;  // inputs that share a scale
  int64_t scale_bytes;  // of float32, of float16, or 1 of whole numbers of units
  int64_t has_offsets;
  int64_t unit_groups;  // groups that share a unit; 0 without units
  int64_t zero;  // what is subtracted from codes
  const uint8_t* table;  // of the codes that 4 bits mean, or null
};

struct LinearTask : Task {
  int64_t num_threads;
  const int64_t* num_rows;
  const void* x;  // [*num_rows, in_features]
  int64_t x_stride;  // from row to row, in elements, as all strides
  const void* weight;  // packed
  const void* bias;  // [out_features], of x's type, or null
  void* y;  // [*num_rows, out_features]
  int64_t y_stride;
  int64_t in_features;
  int64_t out_features;  // of a gated layer those of G and U, twice as many as y has
  Activation activation;  // of a gated layer
  Quantization quantization;
};

struct PackTask : Task {
  const void* weight;  // [out_features, in_features]
  int64_t weight_stride;
  void* packed;
  int64_t in_features;
  int64_t out_features;
  int64_t num_parts;  // 1, or 2 of a gated layer
};

// A weight in fewer bits, to be packed.
struct QuantizedPackTask : Task {
  const uint8_t* codes;  // [out_features, in_features], as they are packed
  const float* scales;  // [out_features, in_features / group_size]
  const float* offsets;  // as the scales, or null
  const float* units;  // [out_features, in_features / group_size / unit_groups], or null
  const float* offset_units;
  void* packed;
  int64_t in_features;
  int64_t out_features;
  int64_t num_parts;  // as in PackTask
  Quantization quantization;
};

// Which row of a weight is output `n` of a panel; negative where it has none.
template <class AnyPackTask>
inline int64_t row_of(const AnyPackTask& task, int64_t panel, int64_t n) {
  const int64_t width = kPanel / task.num_parts, size = task.out_features / task.num_parts;
  const int64_t in_part = panel * width + n % width;
  return in_part < size ? n / width * size + in_part : -1;
}

// Rows of a packed weight by token: an embedding whose table is also the head's weight.
struct GatherTask : Task {
  const Batch* batch;  // tokens beyond the table give zeros
  const void* packed;
  void* y;  // [num_rows, in_features]
  int64_t y_stride;
  int64_t in_features;
  int64_t out_features;
  Quantization quantization;
};

}  // namespace pagewire
