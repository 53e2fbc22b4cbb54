// What LoRA adapters add to the products of a linear layer: scale * B (A x) for the rows that have one.
//
// The first task computes `inner`, scale * A x of each such row. The product of the layer then adds B
// times that to its sums, before they are rounded or activated (`add_deltas`). Both sum in an order
// that depends on the adapter alone, so that a row has the same bits whatever else is in the batch;
// and nothing is added to rows without an adapter. An adapter of DoRA then multiplies the sums by a
// factor for each output.
//
// A is [rank, in_features], with rows padded by zeros to whole cache lines. A layer may be a stack of
// several that an adapter changes each on its own: then A has the rows of all, and B is block-diagonal.
// Of an embedding, A is transposed and multiplied by the scale: a row of it is a token's `inner`.
// B is kept in blocks of `kBlockOutputs` outputs, without the columns at both ends that are zero. In a
// block, as in a panel of a weight (linear.h), each step (dot.h) of all outputs is contiguous.
#pragma once

#include "batch.h"
#include "dot.h"
#include "team.h"

namespace pagewire {

constexpr int64_t kBlockOutputs = 16;  // a multiple of kLanes on every machine
constexpr int64_t kBlockStepBytes = kBlockOutputs * 4;

// Consecutive blocks of B with the same columns.
struct AdapterSpan {
  int64_t end;         // the number of the block after the last one
  int64_t first_step;  // of columns
  int64_t num_steps;   // 0: nothing is added to these outputs
  const char* b;       // where block 0 would be
};

// The weights of an adapter in a layer.
struct AdapterSlot {
  const void* a;
  int64_t a_row_bytes;
  int64_t rank;  // of all parts, rounded up to a multiple of 4; 0 if it does not change the layer
  const float* scales;       // [rank]
  const AdapterSpan* spans;  // in order, of all blocks
  const float* factors;      // of the outputs of all blocks, 1 where nothing is multiplied; or null
};

// The rows of a step by adapter.
struct AdapterRows {
  int64_t num_groups;
  const int32_t* slots;   // [num_groups]
  const int32_t* starts;  // [num_groups + 1]: of `rows`
  const int32_t* rows;    // ascending within a group
  const int32_t* groups;  // of each row of the step, -1 without one; only experts read it
};

// A part of the task of a product.
struct Deltas {
  const AdapterSlot* slots;  // null: no row has an adapter
  const AdapterRows* rows;
  const void* inner;  // [num_rows, most ranks], of the type of the layer's rows
  int64_t inner_stride;
};

struct AdapterTask : Task {
  int64_t num_threads;
  const void* x;  // [num_rows, in_features]
  int64_t x_stride;
  int64_t in_features;
  const AdapterSlot* slots;
  const AdapterRows* rows;
  void* inner;
  int64_t inner_stride;
  int64_t num_heads;  // that have weights of their own in each slot, and parts of x and `inner`
  int64_t x_head_stride;
};

// Adds what adapters change to the rows of tokens in an embedding.
struct EmbeddingDeltaTask : Task {
  const Batch* batch;
  const AdapterSlot* slots;
  const AdapterRows* rows;
  int64_t num_tokens;  // that A has
  void* y;             // [num_rows, size]
  int64_t y_stride;
  int64_t size;
};

// The weights of one register of outputs.
struct AdapterOutputs {
  AdapterOutputs(const AdapterSlot& slot, int64_t column) {
    const int64_t block = column / kBlockOutputs;
    const AdapterSpan* span = slot.spans;
    while (block >= span->end) ++span;
    first_step = span->first_step;
    num_steps = span->num_steps;
    b = span->b + block * num_steps * kBlockStepBytes + column % kBlockOutputs * 4;
    factors = slot.factors == nullptr ? nullptr : slot.factors + column;
  }

  int64_t first_step, num_steps;
  const char* b;
  const float* factors;  // or null
};

// Adds the products of `kRows` rows to `kRegisters` registers of their sums, and multiplies these by the
// factors. rows: of the step, of which the sums are those from `first_row` on; outputs: of the same steps.
template <class Dot, int kRows, int kRegisters>
inline void add_delta(const Deltas& deltas, const int32_t* rows, int64_t first_row,
                      const AdapterOutputs* outputs, float* sums, int64_t sums_stride) {
  const auto* all = static_cast<const typename Dot::Input*>(deltas.inner);
  Floats added[kRows][kRegisters];
  const typename Dot::Input* inner[kRows];
  PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    inner[r] = all + rows[r] * deltas.inner_stride + outputs->first_step * Dot::kInputsPerStep;
    PAGEWIRE_UNROLL for (int v = 0; v < kRegisters; ++v) added[r][v] = zeros();
  }
  for (int64_t k = 0; k < outputs->num_steps; ++k) {
    typename Dot::Operand weights[kRegisters];
    PAGEWIRE_UNROLL for (int v = 0; v < kRegisters; ++v) {
      weights[v] = Dot::load(outputs[v].b + k * kBlockStepBytes);
    }
    PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      int32_t step;
      memcpy(&step, inner[r] + k * Dot::kInputsPerStep, 4);
      const auto inputs = Dot::broadcast(step);
      PAGEWIRE_UNROLL for (int v = 0; v < kRegisters; ++v) {
        added[r][v] = Dot::add(inputs, weights[v], added[r][v]);
      }
    }
  }
  PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEWIRE_UNROLL for (int v = 0; v < kRegisters; ++v) {
      float* to = sums + (rows[r] - first_row) * sums_stride + v * kLanes;
      const Floats sum = add(load_floats(to), added[r][v]);
      const float* factors = outputs[v].factors;
      store_floats(to, factors == nullptr ? sum : multiply(sum, load_floats(factors)));
    }
  }
}

// The same for any number of rows.
template <class Dot, int kRegisters>
inline void add_delta_of_rows(const Deltas& deltas, const int32_t* rows, int64_t num_rows,
                              int64_t first_row, const AdapterOutputs* outputs, float* sums,
                              int64_t sums_stride) {
  const auto add_rows = [&](auto add) { add(deltas, rows, first_row, outputs, sums, sums_stride); };
  for (; num_rows >= 4; rows += 4, num_rows -= 4) add_rows(add_delta<Dot, 4, kRegisters>);
  if (num_rows == 3) add_rows(add_delta<Dot, 3, kRegisters>);
  if (num_rows == 2) add_rows(add_delta<Dot, 2, kRegisters>);
  if (num_rows == 1) add_rows(add_delta<Dot, 1, kRegisters>);
}

// The first of some ascending rows that is not below `row`.
inline const int32_t* first_from(const int32_t* rows, const int32_t* end, int64_t row) {
  while (rows < end) {
    const int32_t* middle = rows + (end - rows) / 2;
    if (*middle < row) {
      rows = middle + 1;
    } else {
      end = middle;
    }
  }
  return rows;
}

// Adds what one adapter changes to the two registers of a panel's sums, of `count` rows.
template <class Dot>
void add_deltas_of(const Deltas& deltas, const AdapterSlot& slot, const int32_t* rows, int64_t count,
                   int64_t first_row, const int64_t (&columns)[2], float* sums, int64_t sums_stride) {
  const AdapterOutputs outputs[] = {{slot, columns[0]}, {slot, columns[1]}};
  if (outputs[0].first_step == outputs[1].first_step &&
      outputs[0].num_steps == outputs[1].num_steps) {
    add_delta_of_rows<Dot, 2>(deltas, rows, count, first_row, outputs, sums, sums_stride);
    return;
  }
  for (int64_t v = 0; v < 2; ++v) {
    add_delta_of_rows<Dot, 1>(deltas, rows, count, first_row, outputs + v, sums + v * kLanes,
                              sums_stride);
  }
}

// Adds to the two registers of a panel's sums of `num_rows` rows from `first_row` on. columns: of the
// outputs in each register, counted so that gate and up projection begin with a block each; next: the
// same of the panel that will be computed next; head: of `num_heads` that have weights in each slot.
template <class Dot>
void add_deltas(const Deltas& deltas, int64_t first_row, int64_t num_rows,
                const int64_t (&columns)[2], const int64_t (&next)[2], float* sums,
                int64_t sums_stride, int64_t head, int64_t num_heads) {
  const AdapterRows& all = *deltas.rows;
  for (int64_t g = 0; g < all.num_groups; ++g) {
    const AdapterSlot& slot = deltas.slots[all.slots[g] * num_heads + head];
    if (slot.rank == 0) continue;
    const int32_t* end = all.rows + all.starts[g + 1];
    const int32_t* rows = first_from(all.rows + all.starts[g], end, first_row);
    const int64_t count = first_from(rows, end, first_row + num_rows) - rows;
    if (count == 0) continue;
    for (const int64_t column : next) {
      const AdapterOutputs fetched(slot, column);
      for (int64_t k = 0; k < fetched.num_steps; ++k) {
        __builtin_prefetch(fetched.b + k * kBlockStepBytes, 0, 2);
      }
    }
    add_deltas_of<Dot>(deltas, slot, rows, count, first_row, columns, sums, sums_stride);
  }
}

}  // namespace pagewire
