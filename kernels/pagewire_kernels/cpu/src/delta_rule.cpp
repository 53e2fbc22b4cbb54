// The gated delta rule; see states.h.
#include "state_rows.h"

namespace pagewire {
namespace {

constexpr int64_t kRegistersPerItem = 4;  // sums that are independent hide the latency of one another
constexpr float kEpsilon = 1e-6f;         // added to the square of a length

// A head of queries or keys in float32, of the length `scale`. The last register is filled up with zeros.
template <class Number>
void load_unit(const Number* from, int64_t size, float scale, float* to) {
  Floats squares = zeros();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats x = load_some(from + i, size - i);
    squares = multiply_add(x, x, squares);
    store_floats(to + i, x);
  }
  const Floats factor = broadcast(scale / __builtin_sqrtf(sum_lanes(squares) + kEpsilon));
  for (int64_t i = 0; i < size; i += kLanes) {
    store_floats(to + i, multiply(load_floats(to + i), factor));
  }
}

// What the rows of a state are multiplied by.
template <class Number>
void load_decays(const DeltaTask& task, int64_t row, int64_t head, float rate, float* to) {
  const int64_t width = task.decay_width;
  const Number* decay =
      operand<Number>(task.decay, task.decay_stride, row, head * task.decay_head_stride);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats bias = load_some(task.dt_bias + head * width + i, width - i);
    const Floats time = add(load_some(decay + i, width - i), bias);
    if (task.decay_bound < 0.0f) {
      const Floats odds = add(broadcast(1.0f), exp_of_negative(multiply(time, broadcast(rate))));
      store_floats(to + i, exp(divide(broadcast(task.decay_bound), odds)));
    } else {
      store_floats(to + i, exp_of_negative(multiply(softplus(time), broadcast(rate))));
    }
  }
  for (int64_t i = width; i < task.key_dim; ++i) to[i] = to[0];
}

// kRegisters registers of one head's values, all rows of a sequence. The state is in scratch, which the
// first-level cache holds.
template <int kRegisters, class Number>
void apply_head(const DeltaTask& task, const Rows& rows, int64_t head, int64_t at, int64_t count,
                Kept<float> kept) {
  constexpr int64_t kStride = kRegisters * kLanes;
  alignas(64) float state[kMaxStateSize * kStride];
  alignas(64) float keys[kMaxStateSize], queries[kMaxStateSize], decays[kMaxStateSize];
  const int64_t size = task.key_dim, key_head = head / task.heads_per_key;
  const auto left = [&](int64_t j) { return count - j * kLanes; };
  for (int64_t n = 0; n < size; ++n) {
    for (int j = 0; j < kRegisters; ++j) {
      const bool is_kept = kept.before != nullptr;
      const float* before = kept.before + n * task.value_dim + at + j * kLanes;
      store_floats(state + n * kStride + j * kLanes, is_kept ? load_some(before, left(j)) : zeros());
    }
  }
  alignas(64) float rate[kLanes];
  store_floats(rate, exp(broadcast(task.a_log[head])));
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  for (int64_t row = rows.first; row < rows.end; ++row) {
    load_unit(operand<Number>(task.key, task.key_stride, row, key_head * task.key_head_stride), size, 1.0f,
              keys);
    load_unit(operand<Number>(task.query, task.query_stride, row, key_head * task.query_head_stride), size,
              scale, queries);
    load_decays<Number>(task, row, head, rate[0], decays);
    Floats sums[kRegisters], changes[kRegisters];
    for (int j = 0; j < kRegisters; ++j) sums[j] = zeros();
    for (int64_t n = 0; n < size; ++n) {
      const Floats key = broadcast(keys[n] * decays[n]);
      for (int j = 0; j < kRegisters; ++j) {
        sums[j] = multiply_add(load_floats(state + n * kStride + j * kLanes), key, sums[j]);
      }
    }
    const Number* value =
        operand<Number>(task.value, task.value_stride, row, head * task.value_head_stride + at);
    const Floats gate = broadcast(number(operand<Number>(task.beta, task.beta_stride, row, head)));
    const Floats beta = divide(broadcast(task.beta_scale), add(broadcast(1.0f), exp_of_negative(gate)));
    for (int j = 0; j < kRegisters; ++j) {
      changes[j] = multiply(subtract(load_some(value + j * kLanes, left(j)), sums[j]), beta);
      sums[j] = zeros();
    }
    for (int64_t n = 0; n < size; ++n) {
      const Floats key = broadcast(keys[n]), query = broadcast(queries[n]), decay = broadcast(decays[n]);
      for (int j = 0; j < kRegisters; ++j) {
        float* place = state + n * kStride + j * kLanes;
        const Floats after = multiply_add(changes[j], key, multiply(load_floats(place), decay));
        store_floats(place, after);
        sums[j] = multiply_add(after, query, sums[j]);
      }
    }
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride + head * task.y_head_stride + at;
    for (int j = 0; j < kRegisters; ++j) store_some(y + j * kLanes, sums[j], left(j));
  }
  if (kept.after == nullptr) return;
  for (int64_t n = 0; n < size; ++n) {
    for (int j = 0; j < kRegisters; ++j) {
      const Floats after = load_floats(state + n * kStride + j * kLanes);
      store_some(kept.after + n * task.value_dim + at + j * kLanes, after, left(j));
    }
  }
}

template <class Number>
void apply_rule(DeltaTask& task) {
  constexpr int64_t kSize = kRegistersPerItem * kLanes;
  const int64_t parts_per_head = divide_up(task.value_dim, kSize);
  for_each_part(task, task.num_heads * parts_per_head, [&](const Rows& rows, int64_t part) {
    const int64_t head = part / parts_per_head, first = part % parts_per_head * kSize;
    const Kept<float> kept = kept_of<float>(task.units, rows, head);
    if (task.value_dim - first >= kSize) {
      return apply_head<kRegistersPerItem, Number>(task, rows, head, first, kSize, kept);
    }
    for (int64_t at = first; at < task.value_dim; at += kLanes) {
      apply_head<1, Number>(task, rows, head, at, task.value_dim - at, kept);
    }
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNELS(gated_delta_rule, DeltaTask, apply_rule)

PAGEWIRE_STRUCT_SIZE(DeltaTask)
