// Products with packed weights; see linear.h.
//
// A work item is a panel of outputs for a block of rows. Few rows read a panel once, as fast as
// memory gives it. Many rows go over it in tiles whose sums fit the registers, a stretch of steps
// at a time that stays in the first-level cache, with the sums kept in between; while the first
// tiles of a stretch are computed the next one is fetched.
#include "linear.h"

namespace pagewire {
namespace {

constexpr int64_t kBlockRows = 192;  // the most rows of an item
constexpr int64_t kBlockBytes = 512 << 10;  // of rows, so that they stay in the second-level cache
constexpr int64_t kStretchSteps = 128;
constexpr int64_t kLinesPerStep = kStepBytes / 64;
constexpr int64_t kFetchAhead = 4096;  // bytes, where a panel is read once

// Where the next weights are fetched from during a tile: so far on at each step.
struct Fetch {
  const char* from;
  int64_t advance;
};

template <class Dot>
int32_t load_step(const typename Dot::Input* x) {
  int32_t inputs;
  memcpy(&inputs, x, 4);
  return inputs;
}

// The last step of an odd number of inputs.
template <class Dot>
int32_t load_last_step(const typename Dot::Input* x) {
  int32_t inputs = 0;
  memcpy(&inputs, x, sizeof(*x));
  return inputs;
}

template <class Dot, int kRows, class LoadStep>
inline __attribute__((always_inline)) void step(const typename Dot::Input* x, int64_t x_stride,
                                                const char* weights, LoadStep load_inputs,
                                                Floats (&sums)[kRows][kPanelVectors]) {
  typename Dot::Operand w[kPanelVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kPanelVectors; ++v) w[v] = Dot::load(weights + v * kLanes * 4);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const auto inputs = Dot::broadcast(load_inputs(x + r * x_stride));
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = Dot::add(inputs, w[v], sums[r][v]);
  }
}

// Add `num_inputs` inputs of `kRows` rows to their sums, [kRows, kPanel].
template <class Dot, int kRows>
void add_tile(const typename Dot::Input* x, int64_t x_stride, const char* weights,
              int64_t num_inputs, Fetch fetch, float* kept) {
  Floats sums[kRows][kPanelVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v)
      sums[r][v] = load_floats(kept + r * kPanel + v * kLanes);
  const int64_t num_steps = num_inputs / Dot::kInputsPerStep;
  for (int64_t i = 0; i < num_steps; ++i) {
    for (int64_t line = 0; line < kLinesPerStep; ++line)
      __builtin_prefetch(fetch.from + line * 64);
    fetch.from += fetch.advance;
    step<Dot, kRows>(x, x_stride, weights, load_step<Dot>, sums);
    x += Dot::kInputsPerStep;
    weights += kStepBytes;
  }
  if (num_inputs % Dot::kInputsPerStep) {
    step<Dot, kRows>(x, x_stride, weights, load_last_step<Dot>, sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v)
      store_floats(kept + r * kPanel + v * kLanes, sums[r][v]);
}

template <class Dot>
using AddTile = void (*)(const typename Dot::Input*, int64_t, const char*, int64_t, Fetch, float*);

template <class Dot, int kRows = Dot::kMaxRows>
inline AddTile<Dot> tile_of(int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return tile_of<Dot, kRows - 1>(num_rows);
  }
  return add_tile<Dot, kRows>;
}

// y = sums + bias for one row of a panel.
template <class Input, class Output>
void finish_row(const float* sums, const Input* bias, int64_t num_outputs, Output* y) {
  for (int64_t i = 0; i < num_outputs; i += kLanes) {
    const int64_t num_lanes = num_outputs - i < kLanes ? num_outputs - i : kLanes;
    Floats sum = load_floats(sums + i);
    if (bias != nullptr) {
      alignas(64) Input padded[kLanes] = {};
      memcpy(padded, bias + i, num_lanes * sizeof(Input));
      sum = add(sum, widen(padded));
    }
    if (num_lanes == kLanes) {
      store_rounded(y + i, sum);
    } else {
      alignas(64) Output rounded[kLanes];
      store_rounded(rounded, sum);
      memcpy(y + i, rounded, num_lanes * sizeof(Output));
    }
  }
}

// The rows of a block go over one panel.
template <class Dot>
void multiply_panel(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                    const char* panel, int64_t num_inputs, float* sums) {
  const int64_t num_tiles = divide_up(num_rows, Dot::kMaxRows);
  const int64_t small = num_rows / num_tiles, num_larger = num_rows % num_tiles;
  const AddTile<Dot> add_small = tile_of<Dot>(small);
  const AddTile<Dot> add_larger = num_larger ? tile_of<Dot>(small + 1) : add_small;
  const int64_t stretch = num_tiles == 1 ? num_inputs : kStretchSteps * Dot::kInputsPerStep;
  for (int64_t first = 0; first < num_inputs; first += stretch) {
    const int64_t size = num_inputs - first < stretch ? num_inputs - first : stretch;
    const char* weights = panel + first / Dot::kInputsPerStep * kStepBytes;
    const char* next = weights + kStretchSteps * kStepBytes;
    int64_t row = 0;
    for (int64_t i = 0; i < num_tiles; ++i) {
      const bool larger = i < num_larger;
      Fetch fetch{next, i == 0 ? kStepBytes : 0};
      if (num_tiles == 1) fetch.from = weights + kFetchAhead;
      (larger ? add_larger : add_small)(x + row * x_stride + first, x_stride, weights, size, fetch,
                                        sums + row * kPanel);
      row += small + larger;
    }
  }
}

template <class Dot, class Output>
void multiply_block(const LinearTask& task, int64_t first_row, int64_t num_rows, int64_t panel) {
  using Input = typename Dot::Input;
  alignas(64) float sums[kBlockRows * kPanel];
  memset(sums, 0, num_rows * kPanel * sizeof(float));
  const int64_t panel_bytes = divide_up(task.in_features, Dot::kInputsPerStep) * kStepBytes;
  const auto* x = static_cast<const Input*>(task.x) + first_row * task.x_stride;
  const auto* weights = static_cast<const char*>(task.weight) + panel * panel_bytes;
  multiply_panel<Dot>(x, task.x_stride, num_rows, weights, task.in_features, sums);

  const int64_t column = panel * kPanel;
  const int64_t left = task.out_features - column;
  const auto* bias = static_cast<const Input*>(task.bias);
  if (bias != nullptr) bias += column;
  auto* y = static_cast<Output*>(task.y) + first_row * task.y_stride + column;
  for (int64_t r = 0; r < num_rows; ++r) {
    finish_row(sums + r * kPanel, bias, left < kPanel ? left : kPanel, y + r * task.y_stride);
  }
}

// Of whole tiles, and of about the same size each.
template <class Dot>
int64_t rows_per_block(int64_t num_rows, int64_t in_features) {
  int64_t most = kBlockBytes / (in_features * sizeof(typename Dot::Input));
  most = most > kBlockRows ? kBlockRows : most;
  most = most < Dot::kMaxRows ? Dot::kMaxRows : most - most % Dot::kMaxRows;
  const int64_t num_blocks = divide_up(num_rows, most);
  const int64_t size = divide_up(num_rows, num_blocks);
  return num_blocks == 1 ? size : divide_up(size, Dot::kMaxRows) * Dot::kMaxRows;
}

template <class Dot, class Output>
void multiply(LinearTask& task) {
  const int64_t num_rows = *task.num_rows;
  if (num_rows == 0) return;
  const int64_t block = rows_per_block<Dot>(num_rows, task.in_features);
  const int64_t num_panels = divide_up(task.out_features, kPanel);
  const int64_t num_items = divide_up(num_rows, block) * num_panels;
  for (int64_t item = take_item(task); item < num_items; item = take_item(task)) {
    const int64_t row = item / num_panels * block;
    const int64_t left = num_rows - row;
    multiply_block<Dot, Output>(task, row, left < block ? left : block, item % num_panels);
  }
}

}  // namespace
}  // namespace pagewire

using pagewire::LinearTask;

PAGEWIRE_KERNEL pw_linear_float32(LinearTask* task) {
  pagewire::multiply<pagewire::Float32Dot, float>(*task);
}

PAGEWIRE_KERNEL pw_linear_bfloat16(LinearTask* task) {
  pagewire::multiply<pagewire::BFloat16Dot, pagewire::BFloat16>(*task);
}

// What the head gives: sums of bfloat16 products as they are.
PAGEWIRE_KERNEL pw_linear_bfloat16_float32(LinearTask* task) {
  pagewire::multiply<pagewire::BFloat16Dot, float>(*task);
}
