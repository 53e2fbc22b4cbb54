// Linear layers: y = x W^T + b.
//
// A weight [out_features, in_features] is packed in panels of `kPanel` outputs. In a panel, each step
// (see dot.h) of all outputs is contiguous:
//
//   packed[out_features / kPanel][in_features / kInputsPerStep][kPanel] of 32 bits each
//
// both rounded up and padded with zeros. A panel is read sequentially; a step of it is two vector
// registers.
//
// For a gated layer, y = activation(x G^T + b) * (x U^T + c) with a weight of G, then U, the first
// register of a panel has outputs of G and the second one the same outputs of U.
#pragma once

#include "activation.h"
#include "adapters.h"
#include "batch.h"
#include "dot.h"
#include "team.h"

namespace pagewire {

constexpr int64_t kPanelVectors = 2;
constexpr int64_t kPanel = kPanelVectors * kLanes;
constexpr int64_t kStepBytes = kPanel * 4;

// Parameters of a quantized weight; see quantized.h.
struct Quantization {
  int64_t group_size;  // inputs that share a scale
  int64_t scale_bytes;  // of float32, of float16, or 1 of whole numbers of units
  int64_t has_offsets;
  int64_t unit_groups;  // groups that share a unit; 0 without units
  int64_t zero;  // what is subtracted from codes
  const uint8_t* table;  // what 4 bits mean, codes or numbers of float32; or null
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
  Deltas deltas;  // that are added to the sums
  Activation activation;  // of a gated layer, and of one with an activation
  Quantization quantization;
};

// The product of a part of each row with a weight of its own, for each of some heads.
struct HeadsTask : LinearTask {
  int64_t num_heads;
  int64_t head_bytes;  // from one head's weight to the next
  int64_t x_head_stride;
  int64_t y_head_stride;
};

struct PackTask : Task {
  const void* weight;  // [out_features, in_features]
  int64_t weight_stride;
  void* packed;
  int64_t in_features;
  int64_t out_features;
  int64_t num_parts;  // 1, or 2 of a gated layer
};

// Packs a quantized weight.
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

// The row of the weight that is output `n` of a panel; negative for padding.
template <class AnyPackTask>
inline int64_t row_of(const AnyPackTask& task, int64_t panel, int64_t n) {
  const int64_t width = kPanel / task.num_parts, size = task.out_features / task.num_parts;
  const int64_t in_part = panel * width + n % width;
  return in_part < size ? n / width * size + in_part : -1;
}

// Calls `pack_panel(panel)` for all panels, shared among the team.
template <class AnyPackTask, class PackPanel>
void for_each_panel(AnyPackTask& task, PackPanel pack_panel) {
  const int64_t num_panels = divide_up(task.out_features / task.num_parts, kPanel / task.num_parts);
  for (int64_t i = take_item(task); i < num_panels; i = take_item(task)) pack_panel(i);
}

// Gathers rows of a packed weight, as by token from an embedding tied to the LM head.
struct GatherTask : Task {
  const Batch* batch;  // tokens beyond the table give zeros
  const void* packed;
  void* y;  // [num_rows, in_features]
  int64_t y_stride;
  int64_t in_features;
  int64_t out_features;
  int64_t num_parts;  // as in PackTask
  Quantization quantization;
};

// Where row `row` of the weight is among the outputs of all panels.
inline int64_t packed_row(const GatherTask& task, int64_t row) {
  const int64_t width = kPanel / task.num_parts, size = task.out_features / task.num_parts;
  return row % size / width * kPanel + row / size * width + row % size % width;
}

// Calls `unpack(row, y)` for the places of all tokens' rows among the outputs of panels, and those of
// the results, shared among the team.
template <class Number, class Unpack>
void gather_rows(GatherTask& task, Unpack unpack) {
  for (int64_t i = take_item(task); i < task.batch->num_rows; i = take_item(task)) {
    const int64_t id = task.batch->token_ids[i];
    Number* y = static_cast<Number*>(task.y) + i * task.y_stride;
    if (id < 0 || id >= task.out_features) {
      memset(y, 0, task.in_features * sizeof(Number));
    } else {
      unpack(packed_row(task, id), y);
    }
  }
}

}  // namespace pagewire
