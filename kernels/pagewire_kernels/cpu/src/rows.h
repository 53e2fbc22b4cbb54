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

// Numbers of a weight that is float32, or of the same type as the rows.
template <class Number>
inline Floats load_weight(const void* weight, bool is_float, int64_t at, int64_t count) {
  if (is_float) return load_some(static_cast<const float*>(weight) + at, count);
  return load_some(static_cast<const Number*>(weight) + at, count);
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

constexpr int64_t kColumnsPerItem = 1024;

// Stores `apply(x, count)` for each register of the rows of y. A work item is a range of columns of one
// row; `apply` gets the place in the task's row of x, and in that of y.
template <class Number, class TaskType, class Apply>
void for_each_register(TaskType& task, Apply apply) {
  const int64_t items_per_row = (task.size + kColumnsPerItem - 1) / kColumnsPerItem;
  const int64_t num_items = *task.num_rows * items_per_row;
  for (int64_t item = take_item(task); item < num_items; item = take_item(task)) {
    const int64_t row = item / items_per_row;
    const int64_t first = item % items_per_row * kColumnsPerItem;
    const int64_t end = first + kColumnsPerItem < task.size ? first + kColumnsPerItem : task.size;
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    for (int64_t i = first; i < end; i += kLanes) {
      store_some(y + i, apply(x + i, y + i, end - i), end - i);
    }
  }
}

}  // namespace pagewire
