// RMS norm and layer norm, with the addition to the residual stream before, and what else depends on the
// mean squares or deviations of rows; see layers.h.
#include "layers.h"
#include "rows.h"

namespace pagewire {
namespace {

float square_root(float x) { return __builtin_sqrtf(x); }

template <class Number>
float number_at(const Number* from) {
  return first_lane(load_some(from, 1));
}

// Adds x to the residual, if there is one. Returns the numbers to normalize.
template <class Number>
const Number* add_to_residual(const NormTask& task, int64_t row) {
  const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
  if (task.residual == nullptr) return x;
  Number* residual = static_cast<Number*>(task.residual) + row * task.residual_stride;
  for (int64_t i = 0; i < task.size; i += kLanes) {
    const int64_t left = task.size - i;
    store_some(residual + i, add(load_some(residual + i, left), load_some(x + i, left)), left);
  }
  return residual;
}

template <class Number>
float sum_of_squares(const Number* x, int64_t size) {
  Floats sum = zeros();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats numbers = load_some(x + i, size - i);
    sum = multiply_add(numbers, numbers, sum);
  }
  return sum_lanes(sum);
}

template <class Number>
float mean_of(const Number* x, int64_t size) {
  Floats sum = zeros();
  for (int64_t i = 0; i < size; i += kLanes) sum = add(sum, load_some(x + i, size - i));
  return sum_lanes(sum) / static_cast<float>(size);
}

template <class Number>
float variance_of(const Number* x, int64_t size, float mean) {
  Floats sum = zeros();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats centred = subtract(load_some(x + i, size - i), broadcast(mean));
    // Lanes beyond the end of the row must not contribute.
    const Floats within = size - i < kLanes ? first_lanes(centred, size - i) : centred;
    sum = multiply_add(within, within, sum);
  }
  return sum_lanes(sum) / static_cast<float>(size);
}

// y = (x - mean) * factor * weight + bias
template <class Number>
void scale_row(const NormTask& task, int64_t row, const Number* x, float mean, float factor) {
  Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
  const auto* bias = static_cast<const Number*>(task.bias);
  for (int64_t i = 0; i < task.size; i += kLanes) {
    const int64_t left = task.size - i;
    Floats z = multiply(subtract(load_some(x + i, left), broadcast(mean)), broadcast(factor));
    if (task.weight != nullptr) {
      z = multiply(z, load_weight<Number>(task.weight, task.has_float_weight, i, left));
    }
    if (bias != nullptr) z = add(z, load_some(bias + i, left));
    store_some(y + i, z, left);
  }
}

template <class Number>
void rms_norm(NormTask& task) {
  for_each_row(task, *task.num_rows, task.size, [&](int64_t row) {
    const Number* x = add_to_residual<Number>(task, row);
    const float mean = sum_of_squares(x, task.size) / static_cast<float>(task.size);
    scale_row(task, row, x, 0.0f, 1.0f / square_root(mean + task.eps));
  });
}

template <class Number>
void layer_norm(NormTask& task) {
  for_each_row(task, *task.num_rows, task.size, [&](int64_t row) {
    const Number* x = add_to_residual<Number>(task, row);
    const float mean = mean_of(x, task.size);
    const float variance = variance_of(x, task.size, mean);
    scale_row(task, row, x, mean, 1.0f / square_root(variance + task.eps));
  });
}

template <class Number>
void match_rms(ElementwiseTask& task) {
  for_each_row(task, *task.num_rows, task.size, [&](int64_t row) {
    const Number* like = static_cast<const Number*>(task.x) + row * task.x_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    const auto mean_square = [&](const Number* of) {
      return sum_of_squares(of, task.size) / static_cast<float>(task.size);
    };
    const float least = task.factor, found = mean_square(y);
    const Floats wanted = broadcast(square_root(mean_square(like)));
    const Floats rms = broadcast(square_root(found < least ? least : found));
    for (int64_t i = 0; i < task.size; i += kLanes) {
      const int64_t left = task.size - i;
      store_some(y + i, divide(multiply(load_some(y + i, left), wanted), rms), left);
    }
  });
}

template <class Number>
void sparsify(ElementwiseTask& task) {
  for_each_row(task, *task.num_rows, task.size, [&](int64_t row) {
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    const float mean = mean_of(x, task.size);
    const float deviation = square_root(variance_of(x, task.size, mean));
    const Floats cutoff = broadcast(mean + deviation * task.factor);
    for (int64_t i = 0; i < task.size; i += kLanes) {
      const int64_t left = task.size - i;
      store_some(y + i, greater_of(zeros(), subtract(load_some(x + i, left), cutoff)), left);
    }
  });
}

// y_q = x_q + sum over p of factors[q, p] * x_p
template <class Number>
void mix_streams(StreamsTask& task) {
  const int64_t count = task.num_streams, width = count * task.size;
  for_each_row(task, *task.num_rows, width, [&](int64_t row) {
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    const Number* factors = static_cast<const Number*>(task.factors) + row * task.factors_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    for (int64_t target = 0; target < count; ++target) {
      float weights[kMaxStreams];
      for (int64_t source = 0; source < count; ++source) {
        weights[source] = number_at(factors + target * count + source);
      }
      for (int64_t i = 0; i < task.size; i += kLanes) {
        const int64_t left = task.size - i;
        Floats sum = zeros();
        for (int64_t source = 0; source < count; ++source) {
          sum = multiply_add(load_some(x + source * task.size + i, left), broadcast(weights[source]), sum);
        }
        const int64_t at = target * task.size + i;
        store_some(y + at, add(sum, load_some(x + at, left)), left);
      }
    }
  });
}

// y_q += (1 + factors[q]) * (x - y_active)
template <class Number>
void correct_streams(StreamsTask& task) {
  const int64_t count = task.num_streams, width = count * task.size;
  for_each_row(task, *task.num_rows, width, [&](int64_t row) {
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    const Number* factors = static_cast<const Number*>(task.factors) + row * task.factors_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    for (int64_t i = 0; i < task.size; i += kLanes) {
      const int64_t left = task.size - i;
      const Floats active = load_some(y + task.active * task.size + i, left);
      const Floats difference = subtract(load_some(x + i, left), active);
      for (int64_t target = 0; target < count; ++target) {
        Number* at = y + target * task.size + i;
        const Floats factor = broadcast(1.0f + number_at(factors + target));
        store_some(at, multiply_add(factor, difference, load_some(at, left)), left);
      }
    }
  });
}

// Divides the numbers of each line of a matrix, which are `step` apart, by their sum and an offset.
inline void divide_by_sums(float* matrix, int64_t count, int64_t line_step, int64_t step, float offset) {
  for (int64_t line = 0; line < count; ++line, matrix += line_step) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += matrix[i * step];
    for (int64_t i = 0; i < count; ++i) matrix[i * step] /= sum + offset;
  }
}

// Softmaxes of the rows of a matrix, which become nearly doubly stochastic (Sinkhorn and Knopp 1967).
inline void balance(float* matrix, int64_t count, int64_t num_divisions, float offset) {
  for (int64_t line = 0; line < count; ++line) {
    float* row = matrix + line * count;
    float largest = row[0];
    for (int64_t i = 1; i < count; ++i) largest = row[i] > largest ? row[i] : largest;
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t left = count - i;
      store_some(row + i, exp(subtract(load_some(row + i, left), broadcast(largest))), left);
    }
  }
  divide_by_sums(matrix, count, count, 1, 0.0f);
  for (int64_t i = 0; i < count * count; ++i) matrix[i] += offset;
  divide_by_sums(matrix, count, 1, count, offset);
  for (int64_t i = 1; i < num_divisions; ++i) {
    divide_by_sums(matrix, count, count, 1, offset);
    divide_by_sums(matrix, count, 1, count, offset);
  }
}

// gates = sigmoid(factors * products / rms(x) + biases); y = sum over p of gates[p] * x_p
template <class Number>
void read_streams(GatedStreamsTask& task) {
  const int64_t count = task.num_streams, width = count * task.size;
  const Floats one = broadcast(1.0f);
  for_each_row(task, *task.num_rows, width, [&](int64_t row) {
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    float* gates = task.gates + row * task.gates_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    const float mean_square = sum_of_squares(x, width) / static_cast<float>(width);
    const Floats inverse = broadcast(1.0f / square_root(mean_square + task.eps));
    const int64_t num_sigmoids = task.num_divisions > 0 ? 2 * count : task.num_gates;
    for (int64_t i = 0; i < task.num_gates; i += kLanes) {
      const int64_t left = task.num_gates - i;
      const Floats normed = multiply(load_some(gates + i, left), inverse);
      const Floats scaled = multiply(normed, load_some(task.numbers + i, left));
      store_some(gates + i, add(scaled, load_some(task.numbers + task.num_gates + i, left)), left);
    }
    for (int64_t i = 0; i < num_sigmoids; i += kLanes) {
      const int64_t left = num_sigmoids - i;
      const Floats z = load_some(gates + i, left);
      store_some(gates + i, divide(one, add(one, exp_of_negative(z))), left);
    }
    for (int64_t i = 0; i < num_sigmoids; ++i) {
      const float magnitude = i < count ? 1.0f : task.magnitude;
      const bool is_shifted = i < count || task.num_divisions == 0;
      gates[i] = magnitude * gates[i] + (is_shifted ? task.offset : 0.0f);
    }
    if (task.num_divisions > 0) balance(gates + num_sigmoids, count, task.num_divisions, task.offset);
    for (int64_t i = 0; i < task.size; i += kLanes) {
      const int64_t left = task.size - i;
      Floats sum = zeros();
      for (int64_t source = 0; source < count; ++source) {
        sum = multiply_add(load_some(x + source * task.size + i, left), broadcast(gates[source]), sum);
      }
      store_some(y + i, sum, left);
    }
  });
}

// y_q += gates[q] * x; or y_q = gates[q] * x + sum over p of matrix[p, q] * y_p
template <class Number>
void write_streams(GatedStreamsTask& task) {
  const int64_t count = task.num_streams;
  for_each_row(task, *task.num_rows, count * task.size, [&](int64_t row) {
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    const float* gates = task.gates + row * task.gates_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    for (int64_t i = 0; i < task.size; i += kLanes) {
      const int64_t left = task.size - i;
      const Floats added = load_some(x + i, left);
      if (task.num_gates > count) {
        Floats before[kMaxStreams];
        for (int64_t source = 0; source < count; ++source) {
          before[source] = load_some(y + source * task.size + i, left);
        }
        for (int64_t target = 0; target < count; ++target) {
          Floats sum = multiply(broadcast(gates[target]), added);
          for (int64_t source = 0; source < count; ++source) {
            const float weight = gates[count + source * count + target];
            sum = multiply_add(broadcast(weight), before[source], sum);
          }
          store_some(y + target * task.size + i, sum, left);
        }
        continue;
      }
      for (int64_t target = 0; target < count; ++target) {
        Number* at = y + target * task.size + i;
        store_some(at, multiply_add(broadcast(gates[target]), added, load_some(at, left)), left);
      }
    }
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNELS(rms_norm, NormTask, rms_norm)
PAGEWIRE_KERNELS(layer_norm, NormTask, layer_norm)
PAGEWIRE_KERNELS(match_rms, ElementwiseTask, match_rms)
PAGEWIRE_KERNELS(sparsify, ElementwiseTask, sparsify)
PAGEWIRE_KERNELS(mix_streams, StreamsTask, mix_streams)
PAGEWIRE_KERNELS(correct_streams, StreamsTask, correct_streams)
PAGEWIRE_KERNELS(read_streams, GatedStreamsTask, read_streams)
PAGEWIRE_KERNELS(write_streams, GatedStreamsTask, write_streams)
