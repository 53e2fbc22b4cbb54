// Activations of an MLP, alone or multiplied by the up projection, and sums, multiples and caps of rows;
// see layers.h.
#include "activation.h"

#include "layers.h"
#include "rows.h"

namespace pagewire {
namespace {

template <class Number>
void activate(ActivationTask& task) {
  with_activation(task.activation, [&](auto function) {
    for_each_register<Number>(task, [&](const Number* x, const Number*, int64_t left) {
      return function(load_some(x, left));
    });
  });
}

template <class Number>
void act_and_mul(ActivationTask& task) {
  with_gate(task.activation, task.clamped, [&](auto function) {
    for_each_register<Number>(task, [&](const Number* x, const Number*, int64_t left) {
      return gate(function, load_some(x, left), load_some(x + task.size, left));
    });
  });
}

template <class Number>
void scale(ElementwiseTask& task) {
  const Floats factor = broadcast(task.factor);
  for_each_register<Number>(task, [&](const Number* x, const Number*, int64_t left) {
    return multiply(load_some(x, left), factor);
  });
}

template <class Number>
void soft_cap(ElementwiseTask& task) {
  const Floats cap = broadcast(task.factor);
  for_each_register<Number>(task, [&](const Number* x, const Number*, int64_t left) {
    return multiply(tanh(divide(load_some(x, left), cap)), cap);
  });
}

template <class Number>
void add_rows(ElementwiseTask& task) {
  for_each_register<Number>(task, [&](const Number* x, const Number* y, int64_t left) {
    return add(load_some(y, left), load_some(x, left));
  });
}

template <class Number>
void multiply_rows(ElementwiseTask& task) {
  for_each_register<Number>(task, [&](const Number* x, const Number* y, int64_t left) {
    return multiply(load_some(y, left), load_some(x, left));
  });
}

template <class Number>
void multiply_sigmoid(ElementwiseTask& task) {
  const Floats one = broadcast(1.0f);
  for_each_register<Number>(task, [&](const Number* x, const Number* y, int64_t left) {
    return divide(load_some(y, left), add(one, exp_of_negative(load_some(x, left))));
  });
}

template <class Number>
void multiply_softplus(ElementwiseTask& task) {
  for_each_register<Number>(task, [&](const Number* x, const Number* y, int64_t left) {
    return multiply(load_some(y, left), softplus(load_some(x, left)));
  });
}

// e^x - 1 - x for x <= 0: a series where the difference would lose its digits.
inline Floats exp_beyond_linear(Floats x) {
  static const float kCoefficients[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
  Floats series = broadcast(1.0f / 720);
  for (const float c : kCoefficients) series = multiply_add(series, x, broadcast(c));
  const Floats small = multiply(series, multiply(x, x));
  const Floats large = subtract(subtract(exp(x), broadcast(1.0f)), x);
  return select(not_less_than(x, broadcast(-0.25f)), small, large);
}

template <class Number>
void xielu(ElementwiseTask& task) {
  const Floats positive = broadcast(task.numbers[0]), negative = broadcast(task.numbers[1]);
  const Floats beta = broadcast(task.numbers[2]), epsilon = broadcast(task.numbers[3]);
  for_each_register<Number>(task, [&](const Number* from, const Number*, int64_t left) {
    const Floats x = load_some(from, left), linear = multiply(beta, x);
    const Floats least = select(not_less_than(x, epsilon), epsilon, x);
    // e^min(x, epsilon) - 1 - x
    const Floats beyond = add(exp_beyond_linear(least), subtract(least, x));
    const Floats square = multiply(multiply(positive, x), x);
    const Mask is_negative = not_less_than(zeros(), x);
    return add(select(is_negative, multiply(beyond, negative), square), linear);
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNELS(activate, ActivationTask, activate)
PAGEWIRE_KERNELS(act_and_mul, ActivationTask, act_and_mul)
PAGEWIRE_KERNELS(scale, ElementwiseTask, scale)
PAGEWIRE_KERNELS(add, ElementwiseTask, add_rows)
PAGEWIRE_KERNELS(multiply, ElementwiseTask, multiply_rows)
PAGEWIRE_KERNELS(multiply_sigmoid, ElementwiseTask, multiply_sigmoid)
PAGEWIRE_KERNELS(multiply_softplus, ElementwiseTask, multiply_softplus)
PAGEWIRE_KERNELS(soft_cap, ElementwiseTask, soft_cap)
PAGEWIRE_KERNELS(xielu, ElementwiseTask, xielu)
