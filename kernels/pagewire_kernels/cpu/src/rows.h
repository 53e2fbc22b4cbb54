// Processing a row of numbers one register at a time, of which the last one may be partly filled.
#pragma once

#include "team.h"
#include "vectors.h"

namespace pagewire {

// The first `count` lanes; zeros in the others.
template <class Number>
inline Floats load_some(const Number* from, int64_t count) {
  if (count >= kLanes) return widen(from);
  alignas(64) Number padded[kLanes] = {};
  memcpy(padded, from, count * sizeof(Number));
  return widen(padded);
}

// Rounds, and stores the first `count` lanes.
template <class Number>
inline void store_some(Number* to, Floats x, int64_t count) {
  if (count >= kLanes) return store_rounded(to, x);
  alignas(64) Number rounded[kLanes];
  store_rounded(rounded, x);
  memcpy(to, rounded, count * sizeof(Number));
}

// x in the first `count` lanes, zeros in the others.
inline Floats first_lanes(Floats x, int64_t count) {
  alignas(64) float lanes[kLanes];
  store_floats(lanes, x);
  return load_some(lanes, count);
}

// The approximate number of elements that a thread takes at a time.
constexpr int64_t kItemNumbers = 4096;

inline int64_t rows_per_item(int64_t row_size) {
  return row_size < kItemNumbers ? kItemNumbers / row_size : 1;
}

// Calls `row_kernel(row)` for all rows, shared among the team.
template <class TaskType, class RowKernel>
void for_each_row(TaskType& task, int64_t num_rows, int64_t row_size, RowKernel row_kernel) {
  const int64_t step = rows_per_item(row_size);
  for (;;) {
    const int64_t first = take_item(task) * step;
    if (first >= num_rows) return;
    const int64_t end = first + step < num_rows ? first + step : num_rows;
    for (int64_t row = first; row < end; ++row) row_kernel(row);
  }
}

}  // namespace pagewire
