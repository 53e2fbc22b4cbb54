// Activations of an MLP, alone or times what they gate; see layers.h.
#include "layers.h"
#include "rows.h"

namespace pagewire {
namespace {

constexpr int64_t kColumnsPerItem = 1024;

// e^-x, with -x bounded so that it stays finite.
inline Floats exp_of_negative(Floats x) {
  return exp(subtract(zeros(), greater_of(broadcast(-87.0f), x)));
}

inline Floats silu(Floats x) {
  return divide(x, add(broadcast(1.0f), exp_of_negative(x)));
}

// The tanh approximation (Hendrycks and Gimpel 2016): (1 + tanh(y)) / 2 is 1 / (1 + e^-2y).
inline Floats gelu_tanh(Floats x) {
  const Floats cube = multiply(multiply(x, x), x);
  const Floats y = multiply_add(cube, broadcast(0.044715f), x);
  const Floats twice = multiply(y, broadcast(1.5957691216057308f));
  return divide(x, add(broadcast(1.0f), exp_of_negative(twice)));
}

// 1 - erf(z) for z >= 0, within 2e-7 of its size: t e^(-z^2 + p(t)) with t = 1 / (1 + z / 2) and
// a Chebyshev fit p (Press et al. 1992, section 6.2).
inline Floats erfc(Floats z) {
  static const float kCoefficients[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f,
                                        0.27886807f,  -0.18628806f, 0.09678418f, 0.37409196f,
                                        1.00002368f, -1.26551223f};
  const Floats one = broadcast(1.0f);
  const Floats t = divide(one, multiply_add(z, broadcast(0.5f), one));
  Floats p = zeros();
  for (const float c : kCoefficients) p = multiply_add(p, t, broadcast(c));
  return multiply(t, exp(subtract(p, multiply(z, z))));
}

// x times the normal distribution of x.
inline Floats gelu(Floats x) {
  const Floats size = greater_of(subtract(zeros(), x), x);
  const Floats tail = multiply(broadcast(0.5f), erfc(multiply(size, broadcast(0.7071067811865476f))));
  const Floats positive = subtract(broadcast(1.0f), tail);
  return multiply(x, select(not_less_than(x, zeros()), positive, tail));
}

inline Floats relu(Floats x) { return greater_of(zeros(), x); }

// A work item is some columns of one row. `apply` takes the task's row of x from a column on.
template <class Number, class Apply>
void for_each_register(ActivationTask& task, Apply apply) {
  const int64_t items_per_row = (task.size + kColumnsPerItem - 1) / kColumnsPerItem;
  const int64_t num_items = *task.num_rows * items_per_row;
  for (int64_t item = take_item(task); item < num_items; item = take_item(task)) {
    const int64_t row = item / items_per_row;
    const int64_t first = item % items_per_row * kColumnsPerItem;
    const int64_t end = first + kColumnsPerItem < task.size ? first + kColumnsPerItem : task.size;
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    for (int64_t i = first; i < end; i += kLanes) store_some(y + i, apply(x + i, end - i), end - i);
  }
}

template <class Number, bool kGated, class Function>
void apply_function(ActivationTask& task, Function function) {
  for_each_register<Number>(task, [&](const Number* x, int64_t left) {
    const Floats active = function(load_some(x, left));
    if constexpr (!kGated) return active;
    return multiply(active, load_some(x + task.size, left));
  });
}

template <class Number, bool kGated>
void activate(ActivationTask& task) {
  switch (task.activation) {
    case kSilu: return apply_function<Number, kGated>(task, silu);
    case kGelu: return apply_function<Number, kGated>(task, gelu);
    case kGeluTanh: return apply_function<Number, kGated>(task, gelu_tanh);
    case kRelu: return apply_function<Number, kGated>(task, relu);
  }
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNEL pw_activate_float32(ActivationTask* task) { activate<float, false>(*task); }
PAGEWIRE_KERNEL pw_activate_bfloat16(ActivationTask* task) { activate<BFloat16, false>(*task); }
PAGEWIRE_KERNEL pw_act_and_mul_float32(ActivationTask* task) { activate<float, true>(*task); }
PAGEWIRE_KERNEL pw_act_and_mul_bfloat16(ActivationTask* task) { activate<BFloat16, true>(*task); }
