// What kernels of layers with a state have in common.
#pragma once

#include "activation.h"
#include "rows.h"
#include "states.h"

namespace pagewire {

// The rows of one sequence in a step.
struct Rows {
  int64_t first, end;
  bool is_begun;  // whether there are tokens before them
};

inline Rows rows_of(const Batch& batch, int64_t seq) {
  const int64_t first = batch.query_start[seq], end = batch.query_start[seq + 1];
  return {first, end, batch.context_lens[seq] > end - first};
}

// A unit of a sequence's state; null if it has no page.
template <class Number>
Number* unit_of(const StateUnits& units, const Batch& batch, int64_t seq, int64_t unit) {
  const int64_t* place = units.places + 2 * unit;
  const int64_t page = batch.block_tables[seq * batch.table_width + place[0]];
  if (page < 0) return nullptr;
  return static_cast<Number*>(units.pages) + page * units.page_stride + place[1];
}

// Calls `work(seq, rows, part)` for all sequences with rows, and the parts of each, shared among the team.
template <class TaskType, class Work>
void for_each_part(TaskType& task, int64_t parts, Work work) {
  const Batch& batch = *task.batch;
  const int64_t num_items = batch.num_seqs * parts;
  for (;;) {
    const Run run = take_run(task, num_items, task.num_threads);
    if (run.item >= num_items) return;
    for (int64_t item = run.item; item < run.end; ++item) {
      const Rows rows = rows_of(batch, item / parts);
      if (rows.first < rows.end) work(item / parts, rows, item % parts);
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
