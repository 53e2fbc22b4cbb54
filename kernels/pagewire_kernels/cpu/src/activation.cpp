// Activations of an MLP, alone or multiplied by the up projection, and sums, multiples and caps of rows;
// see layers.h.
#include "activation.h"

#include "layers.h"
#include "rows.h"

namespace pagewire {
namespace {

template <class Number, bool kGated>
void activate(ActivationTask& task) {
  with_activation(task.activation, [&](auto function) {
    for_each_register<Number>(task, [&](const Number* x, const Number*, int64_t left) {
      const Floats active = function(load_some(x, left));
      if constexpr (!kGated) return active;
      return multiply(active, load_some(x + task.size, left));
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

void soft_cap(ElementwiseTask& task) {
  const Floats cap = broadcast(task.factor);
  for_each_register<float>(task, [&](const float* x, const float*, int64_t left) {
    return multiply(tanh(divide(load_some(x, left), cap)), cap);
  });
}

template <class Number>
void add_rows(ElementwiseTask& task) {
  for_each_register<Number>(task, [&](const Number* x, const Number* y, int64_t left) {
    return add(load_some(y, left), load_some(x, left));
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNEL pw_activate_float32(ActivationTask* task) { activate<float, false>(*task); }
PAGEWIRE_KERNEL pw_activate_bfloat16(ActivationTask* task) { activate<BFloat16, false>(*task); }
PAGEWIRE_KERNEL pw_act_and_mul_float32(ActivationTask* task) { activate<float, true>(*task); }
PAGEWIRE_KERNEL pw_act_and_mul_bfloat16(ActivationTask* task) { activate<BFloat16, true>(*task); }
PAGEWIRE_KERNEL pw_scale_float32(ElementwiseTask* task) { scale<float>(*task); }
PAGEWIRE_KERNEL pw_scale_bfloat16(ElementwiseTask* task) { scale<BFloat16>(*task); }
PAGEWIRE_KERNEL pw_add_float32(ElementwiseTask* task) { add_rows<float>(*task); }
PAGEWIRE_KERNEL pw_add_bfloat16(ElementwiseTask* task) { add_rows<BFloat16>(*task); }
PAGEWIRE_KERNEL pw_soft_cap_float32(ElementwiseTask* task) { soft_cap(*task); }
