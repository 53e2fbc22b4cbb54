// Causal convolutions and selective state spaces; see states.h.
#include "states.h"

#include "dot.h"
#include "state_rows.h"

namespace pagewire {
namespace {

constexpr int64_t kChannelsPerItem = 64;

// One register of channels of a causal convolution.
template <int kWidth, class Number>
void convolve(const ConvolutionTask& task, const Rows& rows, int64_t channel, int64_t count,
              Kept<Number> kept, int64_t state_stride) {
  Floats taps[kWidth], past[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    taps[i] = load_some(task.weight + i * task.num_channels + channel, count);
    const bool is_kept = i < kWidth - 1 && kept.before != nullptr;
    past[i] = is_kept ? load_some(kept.before + i * state_stride, count) : zeros();
  }
  const Floats bias = task.bias == nullptr ? zeros() : load_some(task.bias + channel, count);
  const Number* x = static_cast<const Number*>(task.x) + rows.first * task.x_stride + channel;
  Number* y = static_cast<Number*>(task.y) + rows.first * task.y_stride + channel;
  for (int64_t row = rows.first; row < rows.end; ++row, x += task.x_stride, y += task.y_stride) {
    past[kWidth - 1] = load_some(x, count);
    Floats sum = bias;
    for (int i = 0; i < kWidth; ++i) sum = multiply_add(past[i], taps[i], sum);
    store_some(y, task.has_silu ? Silu()(sum) : sum, count);
    for (int i = 0; i < kWidth - 1; ++i) past[i] = past[i + 1];
  }
  if (kept.after == nullptr) return;
  for (int i = 0; i < kWidth - 1; ++i) store_some(kept.after + i * state_stride, past[i], count);
}

template <int kWidth, class Number>
void convolve(ConvolutionTask& task) {
  const int64_t per_unit = task.num_channels / task.units.num_units;
  const int64_t parts_per_unit = divide_up(per_unit, kChannelsPerItem);
  for_each_part(task, task.units.num_units * parts_per_unit, [&](const Rows& rows, int64_t part) {
    const int64_t unit = part / parts_per_unit, first = part % parts_per_unit * kChannelsPerItem;
    const int64_t end = first + kChannelsPerItem < per_unit ? first + kChannelsPerItem : per_unit;
    const Kept<Number> kept = kept_of<Number>(task.units, rows, unit);
    for (int64_t i = first; i < end; i += kLanes) {
      convolve<kWidth>(task, rows, unit * per_unit + i, end - i, kept.at(i), per_unit);
    }
  });
}

template <class Number>
void convolve(ConvolutionTask& task) {
  switch (task.width) {
    case 2: return convolve<2, Number>(task);
    case 3: return convolve<3, Number>(task);
    case 4: return convolve<4, Number>(task);
    case 5: return convolve<5, Number>(task);
    case 6: return convolve<6, Number>(task);
    case 7: return convolve<7, Number>(task);
    case 8: return convolve<8, Number>(task);
  }
}

// One register of channels, all rows of a sequence. state: [state_size], rows `stride` elements apart.
template <class Number>
void scan_channels(const Mamba1Task& task, const Rows& rows, int64_t channel, int64_t count,
                   Kept<float> kept, int64_t stride) {
  Floats state[kMaxStateSize], a[kMaxStateSize];
  const int64_t size = task.state_size;
  for (int64_t n = 0; n < size; ++n) {
    state[n] = kept.before == nullptr ? zeros() : load_some(kept.before + n * stride, count);
    a[n] = load_some(task.a + n * task.num_channels + channel, count);
  }
  const Floats d = load_some(task.d + channel, count), bias = load_some(task.dt_bias + channel, count);
  for (int64_t row = rows.first; row < rows.end; ++row) {
    const Floats x = load_some(operand<Number>(task.x, task.x_stride, row, channel), count);
    const Floats dt = load_some(operand<Number>(task.dt, task.dt_stride, row, channel), count);
    const Number* b = operand<Number>(task.b, task.b_stride, row);
    const Number* c = operand<Number>(task.c, task.c_stride, row);
    const Floats delta = softplus(add(dt, bias)), input = multiply(delta, x);
    Floats sum = zeros();
    for (int64_t n = 0; n < size; ++n) {
      const Floats decayed = multiply(state[n], exp(multiply(delta, a[n])));
      state[n] = multiply_add(input, broadcast(number(b + n)), decayed);
      sum = multiply_add(state[n], broadcast(number(c + n)), sum);
    }
    sum = multiply_add(d, x, sum);
    if (task.gate != nullptr) {
      const Number* gate = operand<Number>(task.gate, task.gate_stride, row, channel);
      sum = multiply(sum, Silu()(load_some(gate, count)));
    }
    store_some(static_cast<Number*>(task.y) + row * task.y_stride + channel, sum, count);
  }
  if (kept.after == nullptr) return;
  for (int64_t n = 0; n < size; ++n) store_some(kept.after + n * stride, state[n], count);
}

template <class Number>
void scan_channels(Mamba1Task& task) {
  const int64_t per_unit = task.num_channels / task.units.num_units;
  const int64_t parts_per_unit = divide_up(per_unit, kLanes);
  for_each_part(task, task.units.num_units * parts_per_unit, [&](const Rows& rows, int64_t part) {
    const int64_t unit = part / parts_per_unit, at = part % parts_per_unit * kLanes;
    const Kept<float> kept = kept_of<float>(task.units, rows, unit);
    scan_channels<Number>(task, rows, unit * per_unit + at, per_unit - at, kept.at(at), per_unit);
  });
}

inline Floats sigmoid(Floats x) {
  const Floats one = broadcast(1.0f);
  return divide(one, add(one, exp_of_negative(x)));
}

// One register of channels, all rows of a sequence.
template <class Number>
void scan_gated(const RglruTask& task, const Rows& rows, int64_t channel, int64_t count, Kept<float> kept) {
  const Floats rate = load_some(task.rate + channel, count), one = broadcast(1.0f);
  const Floats input_bias = load_some(task.input_bias + channel, count);
  const Floats decay_bias = load_some(task.decay_bias + channel, count);
  Floats state = kept.before == nullptr ? zeros() : load_some(kept.before, count);
  for (int64_t row = rows.first; row < rows.end; ++row) {
    const auto load = [&](const void* operands, int64_t stride) {
      return load_some(operand<Number>(operands, stride, row, channel), count);
    };
    const Floats input_gate = sigmoid(add(load(task.input_gate, task.input_gate_stride), input_bias));
    const Floats decay_gate = sigmoid(add(load(task.decay_gate, task.decay_gate_stride), decay_bias));
    const Floats log_decay = multiply(rate, decay_gate);
    Floats input = multiply(load(task.x, task.x_stride), input_gate);
    if (rows.is_begun || row > rows.first) {
      const Floats square = exp(add(log_decay, log_decay));
      input = multiply(input, square_root(greater_of(zeros(), subtract(one, square))));
    }
    state = multiply_add(state, exp(log_decay), input);
    store_some(static_cast<Number*>(task.y) + row * task.y_stride + channel, state, count);
  }
  if (kept.after != nullptr) store_some(kept.after, state, count);
}

template <class Number>
void scan_gated(RglruTask& task) {
  const int64_t per_unit = task.num_channels / task.units.num_units;
  const int64_t parts_per_unit = divide_up(per_unit, kLanes);
  for_each_part(task, task.units.num_units * parts_per_unit, [&](const Rows& rows, int64_t part) {
    const int64_t unit = part / parts_per_unit, at = part % parts_per_unit * kLanes;
    const Kept<float> kept = kept_of<float>(task.units, rows, unit);
    scan_gated<Number>(task, rows, unit * per_unit + at, per_unit - at, kept.at(at));
  });
}

constexpr int64_t kRegistersPerItem = 4;
constexpr int kSums = 4;  // of a register: sums that do not depend on each other hide their latency

// kRegisters registers of one head's elements, all rows of a sequence. The state is in scratch, which
// the first-level cache holds.
template <int kRegisters, class Number>
void scan_head(const Mamba2Task& task, const Rows& rows, int64_t head, int64_t at, int64_t count,
               Kept<float> kept) {
  constexpr int64_t kStride = kRegisters * kLanes;
  alignas(64) float state[kMaxStateSize * kStride];
  const int64_t size = task.state_size, group = head / task.heads_per_group;
  const auto left = [&](int64_t j) { return count - j * kLanes; };
  for (int64_t n = 0; n < size; ++n) {
    for (int j = 0; j < kRegisters; ++j) {
      const float* before = kept.before + n * task.head_dim + at + j * kLanes;
      const bool is_kept = kept.before != nullptr;
      store_floats(state + n * kStride + j * kLanes, is_kept ? load_some(before, left(j)) : zeros());
    }
  }
  const Floats a = broadcast(task.a[head]), d = broadcast(task.d[head]);
  for (int64_t row = rows.first; row < rows.end; ++row) {
    const Number* x = operand<Number>(task.x, task.x_stride, row, head * task.x_head_stride + at);
    const Number* b = operand<Number>(task.b, task.b_stride, row, group * task.b_group_stride);
    const Number* c = operand<Number>(task.c, task.c_stride, row, group * task.c_group_stride);
    const float dt = number(operand<Number>(task.dt, task.dt_stride, row, head)) + task.dt_bias[head];
    const Floats least = greater_of(broadcast(task.min_dt), softplus(broadcast(dt)));
    const Floats delta = less_of(broadcast(task.max_dt), least);
    const Floats decay = exp(multiply(delta, a));
    Floats inputs[kRegisters], sums[kRegisters][kSums];
    PAGEWIRE_UNROLL for (int j = 0; j < kRegisters; ++j) {
      inputs[j] = multiply(delta, load_some(x + j * kLanes, left(j)));
      PAGEWIRE_UNROLL for (int k = 0; k < kSums; ++k) sums[j][k] = zeros();
    }
    const auto add_element = [&](int64_t n, int k) {
      const Floats key = broadcast(number(b + n)), query = broadcast(number(c + n));
      PAGEWIRE_UNROLL for (int j = 0; j < kRegisters; ++j) {
        float* place = state + n * kStride + j * kLanes;
        const Floats after = multiply_add(inputs[j], key, multiply(load_floats(place), decay));
        store_floats(place, after);
        sums[j][k] = multiply_add(after, query, sums[j][k]);
      }
    };
    int64_t n = 0;
    for (; n + kSums <= size; n += kSums) {
      PAGEWIRE_UNROLL for (int k = 0; k < kSums; ++k) add_element(n + k, k);
    }
    for (; n < size; ++n) add_element(n, 0);
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride + head * task.y_head_stride + at;
    for (int j = 0; j < kRegisters; ++j) {
      const Floats skipped = load_some(x + j * kLanes, left(j));
      Floats sum = sums[j][0];
      PAGEWIRE_UNROLL for (int k = 1; k < kSums; ++k) sum = add(sum, sums[j][k]);
      sum = multiply_add(d, skipped, sum);
      if (task.gate != nullptr) {
        const int64_t place = head * task.gate_head_stride + at + j * kLanes;
        const Number* gate = operand<Number>(task.gate, task.gate_stride, row, place);
        sum = multiply(sum, Silu()(load_some(gate, left(j))));
      }
      store_some(y + j * kLanes, sum, left(j));
    }
  }
  if (kept.after == nullptr) return;
  for (int64_t n = 0; n < size; ++n) {
    for (int j = 0; j < kRegisters; ++j) {
      const Floats after = load_floats(state + n * kStride + j * kLanes);
      store_some(kept.after + n * task.head_dim + at + j * kLanes, after, left(j));
    }
  }
}

template <class Number>
void scan_heads(Mamba2Task& task) {
  constexpr int64_t kSize = kRegistersPerItem * kLanes;
  const int64_t parts_per_head = divide_up(task.head_dim, kSize);
  for_each_part(task, task.num_heads * parts_per_head, [&](const Rows& rows, int64_t part) {
    const int64_t head = part / parts_per_head, first = part % parts_per_head * kSize;
    const Kept<float> kept = kept_of<float>(task.units, rows, head);
    if (task.head_dim - first >= kSize) {
      return scan_head<kRegistersPerItem, Number>(task, rows, head, first, kSize, kept);
    }
    int64_t at = first;
    for (; task.head_dim - at >= 2 * kLanes; at += 2 * kLanes) {
      scan_head<2, Number>(task, rows, head, at, 2 * kLanes, kept);
    }
    for (; at < task.head_dim; at += kLanes) {
      scan_head<1, Number>(task, rows, head, at, task.head_dim - at, kept);
    }
  });
}

template <class Number>
void gated_norm(GatedNormTask& task) {
  const int64_t size = task.group_size;
  const auto activate = [&](Floats gate) {
    return task.has_sigmoid ? sigmoid(gate) : Silu()(gate);
  };
  for_each_row(task, *task.num_rows * task.num_groups, size, [&](int64_t item) {
    const int64_t row = item / task.num_groups, group = item % task.num_groups;
    const Number* x = operand<Number>(task.x, task.x_stride, row, group * task.x_group_stride);
    const Number* gates = operand<Number>(task.gate, task.gate_stride, row, group * task.gate_group_stride);
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride + group * task.y_group_stride;
    const auto input = [&](int64_t i) {
      const Floats numbers = load_some(x + i, size - i);
      return task.gates_first ? multiply(numbers, activate(load_some(gates + i, size - i))) : numbers;
    };
    Floats squares = zeros();
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats numbers = input(i);
      squares = multiply_add(numbers, numbers, squares);
    }
    const float mean = sum_lanes(squares) / static_cast<float>(size);
    const Floats factor = broadcast(1.0f / __builtin_sqrtf(mean + task.eps));
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t weights = group * task.weight_group_stride + i;
      Floats z = multiply(input(i), factor);
      z = multiply(z, load_weight<Number>(task.weight, task.has_float_weight, weights, size - i));
      if (!task.gates_first) z = multiply(z, activate(load_some(gates + i, size - i)));
      store_some(y + i, z, size - i);
    }
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNELS(causal_convolution, ConvolutionTask, convolve)
PAGEWIRE_KERNELS(mamba1_scan, Mamba1Task, scan_channels)
PAGEWIRE_KERNELS(mamba2_scan, Mamba2Task, scan_heads)
PAGEWIRE_KERNELS(rglru_scan, RglruTask, scan_gated)
PAGEWIRE_KERNELS(gated_rms_norm, GatedNormTask, gated_norm)

PAGEWIRE_STRUCT_SIZE(ConvolutionTask)
PAGEWIRE_STRUCT_SIZE(Mamba1Task)
PAGEWIRE_STRUCT_SIZE(Mamba2Task)
PAGEWIRE_STRUCT_SIZE(RglruTask)
PAGEWIRE_STRUCT_SIZE(GatedNormTask)
