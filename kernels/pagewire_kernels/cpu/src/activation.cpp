// Activations of an MLP, alone or multiplied by the up projection; see layers.h.
#include "activation.h"

#include "layers.h"
#include "rows.h"

namespace pagewire {
namespace {

constexpr int64_t kColumnsPerItem = 1024;

// A work item is a range of columns of one row. `apply` gets the task's row of x from its first
// column on.
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

template <class Number, bool kGated>
void activate(ActivationTask& task) {
  with_activation(task.activation, [&](auto function) {
    for_each_register<Number>(task, [&](const Number* x, int64_t left) {
      const Floats active = function(load_some(x, left));
      if constexpr (!kGated) return active;
      return multiply(active, load_some(x + task.size, left));
    });
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNEL pw_activate_float32(ActivationTask* task) { activate<float, false>(*task); }
PAGEWIRE_KERNEL pw_activate_bfloat16(ActivationTask* task) { activate<BFloat16, false>(*task); }
PAGEWIRE_KERNEL pw_act_and_mul_float32(ActivationTask* task) { activate<float, true>(*task); }
PAGEWIRE_KERNEL pw_act_and_mul_bfloat16(ActivationTask* task) { activate<BFloat16, true>(*task); }
