// The innermost loop of linear layers: products of a tile of rows with a stretch of a panel, with sums
// in registers.
#pragma once

#include "linear.h"

namespace pagewire {

// With up to this many rows, products are bound by reading weights sequentially, which the hardware
// prefetcher handles. With more rows it does not run ahead far enough, so their tiles prefetch weights
// into the second-level cache. Measured on Zen 4.
constexpr int kStreamedRows = 4;
constexpr int64_t kFetchDistance = 8192;

inline void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }

inline int32_t load_step(const void* x) {
  int32_t inputs;
  memcpy(&inputs, x, 4);
  return inputs;
}

// The last step of an odd number of inputs.
inline int32_t load_half_step(const void* x) {
  uint16_t input;
  memcpy(&input, x, 2);
  return input;
}

// The addresses of a tile's rows, relative to two bases: the offsets of all rows from one base would not
// fit into registers.
template <class Input, int kRows>
struct TileRows {
  static constexpr int kHalf = (kRows + 1) / 2;

  TileRows(const Input* x, int64_t stride) : bases{x, x + kHalf * stride}, stride(stride) {
    asm("" : "+r"(bases[1]));  // hides how they are related
  }
  const Input* operator[](int row) const { return bases[row / kHalf] + row % kHalf * stride; }
  void advance(int64_t num_inputs) {
    bases[0] += num_inputs;
    bases[1] += num_inputs;
  }

  const Input* bases[2];
  int64_t stride;
};

// Adds the products of one step to the sums of `kRows` rows.
template <class Dot, int kRows, int32_t (*kLoad)(const void*)>
inline __attribute__((always_inline)) void add_step(
    const TileRows<typename Dot::Input, kRows>& rows, const char* weights,
    Floats (&sums)[kRows][kPanelVectors]) {
  typename Dot::Operand w[kPanelVectors];
  PAGEWIRE_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
    w[v] = Dot::load(weights + v * kLanes * 4);
  }
  PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    const auto inputs = Dot::broadcast(kLoad(rows[r]));
    PAGEWIRE_UNROLL for (int v = 0; v < kPanelVectors; ++v) {
      sums[r][v] = Dot::add(inputs, w[v], sums[r][v]);
    }
  }
}

// Adds the products of `num_inputs` inputs to the sums of `kRows` rows, and prefetches `kLines` cache
// lines of `fetched` at each step.
template <class Dot, int kRows, int kLines>
inline __attribute__((always_inline)) void add_steps(
    const typename Dot::Input* x, int64_t x_stride, const char* weights, int64_t num_inputs,
    const char* fetched, Floats (&sums)[kRows][kPanelVectors]) {
  TileRows<typename Dot::Input, kRows> rows(x, x_stride);
  const int64_t num_steps = num_inputs / Dot::kInputsPerStep;
  for (int64_t i = 0; i < num_steps; ++i) {
    PAGEWIRE_UNROLL for (int line = 0; line < kLines; ++line) fetch(fetched + line * 64);
    fetched += kLines * 64;
    add_step<Dot, kRows, load_step>(rows, weights, sums);
    rows.advance(Dot::kInputsPerStep);
    weights += kStepBytes;
  }
  if (num_inputs % Dot::kInputsPerStep) {
    add_step<Dot, kRows, load_half_step>(rows, weights, sums);
  }
}

// The same for sums in memory, [kRows, kPanel], which start at zero if `begins`.
template <class Dot, int kRows, int kLines>
void add_tile(const typename Dot::Input* x, int64_t x_stride, const char* weights,
              int64_t num_inputs, const char* fetched, float* kept, bool begins) {
  Floats sums[kRows][kPanelVectors];
  PAGEWIRE_UNROLL for (int i = 0; i < kRows * kPanelVectors; ++i) {
    sums[i / kPanelVectors][i % kPanelVectors] = begins ? zeros() : load_floats(kept + i * kLanes);
  }
  add_steps<Dot, kRows, kLines>(x, x_stride, weights, num_inputs, fetched, sums);
  PAGEWIRE_UNROLL for (int i = 0; i < kRows * kPanelVectors; ++i) {
    store_floats(kept + i * kLanes, sums[i / kPanelVectors][i % kPanelVectors]);
  }
}

template <class Dot>
using AddTile = void (*)(const typename Dot::Input*, int64_t, const char*, int64_t, const char*,
                         float*, bool);

// `add_tile` for up to `kMaxRows` rows.
template <class Dot, int kLines, int kRows = Dot::kMaxRows>
inline AddTile<Dot> tile_of(int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return tile_of<Dot, kLines, kRows - 1>(num_rows);
  }
  return add_tile<Dot, kRows, kLines>;
}

}  // namespace pagewire
