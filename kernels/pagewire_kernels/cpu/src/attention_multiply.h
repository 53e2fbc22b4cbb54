// The products of attention: a few rows of units with a packed matrix.
#pragma once

#include "attention.h"
#include "attention_ahead.h"

namespace pagewire {

// Sums are held in kRows x kVectors registers.
#if defined(__AVX512BF16__) && !defined(PAGEWIRE_HAS_TILES)
constexpr int kRows = 6;
constexpr int kVectors = 4;
#elif defined(__AVX512F__)
constexpr int kRows = 4;
constexpr int kVectors = 4;
#else
constexpr int kRows = 4;
constexpr int kVectors = 2;
#endif

// sums[row] = sums[row] * factors[row] + units[row] . packed, for `num_units` units of a row, in order.
// Without factors, sums start at zero. Strides are in words.
template <class Dot, int num_rows, int num_vectors, bool has_factors>
void multiply_panel(const float* units, int64_t unit_stride, int64_t num_units,
                    const float* packed, int64_t packed_stride, float* sums, int64_t sum_stride,
                    const float* factors, Ahead& ahead) {
  Floats sum[num_rows][num_vectors];
#pragma GCC unroll 8
  for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; ++j) {
      sum[row][j] = has_factors ? multiply(load_floats(sums + row * sum_stride + j * kLanes),
                                           broadcast(factors[row]))
                                : zeros();
    }
  }
  const auto add_unit = [&](int64_t i) __attribute__((always_inline)) {
    typename Dot::Operand column[num_vectors];
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; ++j) {
      column[j] = Dot::load(packed + i * packed_stride + j * kLanes);
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row) {
      int32_t unit;
      memcpy(&unit, units + row * unit_stride + i, sizeof(unit));
      const typename Dot::Operand both = Dot::broadcast(unit);
#pragma GCC unroll 4
      for (int j = 0; j < num_vectors; ++j) {
        sum[row][j] = Dot::add(both, column[j], sum[row][j]);
      }
    }
  };
  int64_t i = 0;
  for (; i + 4 <= num_units; i += 4) {
    ahead.fetch();
#pragma GCC unroll 4
    for (int64_t unit = 0; unit < 4; ++unit) add_unit(i + unit);
  }
  for (; i < num_units; ++i) add_unit(i);
#pragma GCC unroll 8
  for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; ++j) {
      store_floats(sums + row * sum_stride + j * kLanes, sum[row][j]);
    }
  }
}

// The same for `width` columns, a multiple of the lanes.
template <class Dot, int num_rows, bool has_factors>
void multiply_rows(const float* units, int64_t unit_stride, int64_t num_units, const float* packed,
                   int64_t packed_stride, int64_t width, float* sums, int64_t sum_stride,
                   const float* factors, Ahead& ahead) {
  int64_t at = 0;
  for (; at + kVectors * kLanes <= width; at += kVectors * kLanes) {
    multiply_panel<Dot, num_rows, kVectors, has_factors>(
        units, unit_stride, num_units, packed + at, packed_stride, sums + at, sum_stride, factors,
        ahead);
  }
  // Of heads of 32, for instance: with one register, each addition would wait for the previous one.
  for (; at + 2 * kLanes <= width; at += 2 * kLanes) {
    multiply_panel<Dot, num_rows, 2, has_factors>(units, unit_stride, num_units, packed + at,
                                                  packed_stride, sums + at, sum_stride, factors,
                                                  ahead);
  }
  for (; at < width; at += kLanes) {
    multiply_panel<Dot, num_rows, 1, has_factors>(units, unit_stride, num_units, packed + at,
                                                  packed_stride, sums + at, sum_stride, factors,
                                                  ahead);
  }
}

}  // namespace pagewire
