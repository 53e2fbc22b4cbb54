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

// The natural logarithm of x > 0 that is normal, within 2 ulp, by the polynomial of logf in Cephes.
inline Floats log(Floats x) {
  // x = 2^n * m with m from sqrt(1/2) to sqrt(2)
  const Words bits = add_words(as_words(x), broadcast_word(0x3f800000 - 0x3f3504f3));
  const Floats n = to_floats(add_words(shift_right<23>(bits), broadcast_word(-127)));
  const Words mantissa = add_words(and_words(bits, broadcast_word(0x007fffff)), broadcast_word(0x3f3504f3));
  const Floats m = subtract(as_floats(mantissa), broadcast(1.0f));
  static const float kCoefficients[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
                                        1.4249322787e-1f,  -1.6668057665e-1f, 2.0000714765e-1f,
                                        -2.4999993993e-1f, 3.3333331174e-1f};
  Floats y = broadcast(7.0376836292e-2f);
  for (const float c : kCoefficients) y = multiply_add(y, m, broadcast(c));
  const Floats square = multiply(m, m);
  y = multiply(multiply(y, m), square);
  y = multiply_add(n, broadcast(-2.12194440e-4f), y);
  y = multiply_add(square, broadcast(-0.5f), y);
  return multiply_add(n, broadcast(0.693359375f), add(m, y));
}

// log(1 + e^x); NaN stays NaN.
inline Floats softplus(Floats x) {
  const Floats one = broadcast(1.0f);
  const Floats u = exp(less_of(broadcast(20.0f), x)), sum = add(one, u);
  // The digits of u that the sum has lost.
  const Floats lost = subtract(u, subtract(sum, one));
  const Floats small = add(log(sum), divide(lost, sum));
  return select(not_less_than(x, broadcast(20.0f)), x, small);
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
