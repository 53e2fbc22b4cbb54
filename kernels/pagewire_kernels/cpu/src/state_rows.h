// What kernels of layers with a state have in common.
#pragma once

#include "activation.h"
#include "rows.h"
#include "states.h"

namespace pagewire {

// Consecutive rows of one sequence in a step, and the blocks of the state before and after them.
struct Rows {
  int64_t first, end;
  bool is_begun;  // whether there are tokens before them
  const int32_t* before;
  const int32_t* after;
};

// A unit of a state in these blocks; null if it has none.
template <class Number>
Number* unit_of(const StateUnits& units, const int32_t* blocks, int64_t unit) {
  const int64_t* place = units.places + 2 * unit;
  const int64_t page = blocks[place[0]];
  if (page < 0) return nullptr;
  return static_cast<Number*>(units.pages) + page * units.page_stride + place[1];
}

// Where a part of a unit is read, and where it is written; null if nowhere. Reading begins with zeros
// where there are no tokens before the rows.
template <class Number>
struct Kept {
  const Number* before;
  Number* after;

  Kept at(int64_t i) const { return {before == nullptr ? before : before + i, after == nullptr ? after : after + i}; }
};

template <class Number>
Kept<Number> kept_of(const StateUnits& units, const Rows& rows, int64_t unit) {
  return {rows.is_begun ? unit_of<Number>(units, rows.before, unit) : nullptr,
          unit_of<Number>(units, rows.after, unit)};
}

// Calls `work(rows, part)` for the rows of all sequences, and the parts of each, shared among the team.
// Where a state is saved, it is called for the rows up to there, for no rows to copy the state, and for
// the rows after that.
template <class TaskType, class Work>
void for_each_part(TaskType& task, int64_t parts, Work work) {
  const Batch& batch = *task.batch;
  const int64_t num_items = batch.num_seqs * parts, width = batch.table_width;
  for (;;) {
    const Run run = take_run(task, num_items, task.num_threads);
    if (run.item >= num_items) return;
    for (int64_t item = run.item; item < run.end; ++item) {
      const int64_t seq = item / parts, part = item % parts;
      const int32_t* table = batch.block_tables + seq * width;
      const int64_t end = batch.query_start[seq + 1], length = end - batch.query_start[seq];
      Rows rows = {end - length, end, batch.context_lens[seq] > length, table, table};
      for (int64_t row = rows.first; batch.saves != nullptr && row < end; ++row) {
        if (batch.saves[row] < 0) continue;
        rows.end = row + 1;
        work(rows, part);
        work(Rows{rows.end, rows.end, true, table, batch.saved_tables + batch.saves[row] * width}, part);
        rows = {row + 1, end, true, table, table};
      }
      if (rows.first < end) work(rows, part);
    }
  }
}

// The rows of an operand of a scan, from `row` on.
template <class Number>
const Number* operand(const void* rows, int64_t stride, int64_t row, int64_t at = 0) {
  return static_cast<const Number*>(rows) + row * stride + at;
}

inline float number(const float* x) { return *x; }
inline float number(const BFloat16* x) {
  const uint32_t bits = static_cast<uint32_t>(x->bits) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

}  // namespace pagewire
