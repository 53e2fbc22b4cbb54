// Conversion of the sums of a row and panel to outputs.
#pragma once

#include "linear.h"
#include "rows.h"

namespace pagewire {

template <class Input>
inline Floats add_bias(const float* sums, const void* bias, int64_t column, int64_t count) {
  const Floats sum = load_floats(sums);
  if (bias == nullptr) return sum;
  return add(sum, load_some(static_cast<const Input*>(bias) + column, count));
}

// y = sums + bias
template <class Input, class Output>
struct Finish {
  static constexpr int64_t kColumns = kPanel, kBytes = sizeof(Output);
  static int64_t num_panels(const LinearTask& task) {
    return divide_up(task.out_features, kPanel);
  }
  void operator()(const LinearTask& task, int64_t row, int64_t panel, const float* sums) const {
    Output* y = static_cast<Output*>(task.y) + row * task.y_stride;
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t column = panel * kPanel + v * kLanes;
      const int64_t count = task.out_features - column;
      if (count <= 0) return;
      store_some(y + column, add_bias<Input>(sums + v * kLanes, task.bias, column, count), count);
    }
  }
};

// y = function(gate) * up
template <class Number, class Function>
struct FinishGated {
  static constexpr int64_t kColumns = kLanes, kBytes = sizeof(Number);
  static int64_t num_panels(const LinearTask& task) {
    return divide_up(task.out_features / 2, kLanes);
  }
  void operator()(const LinearTask& task, int64_t row, int64_t panel, const float* sums) const {
    static_assert(kPanelVectors == 2, "gate and up");
    const int64_t size = task.out_features / 2;
    const int64_t column = panel * kLanes;
    const int64_t count = size - column;
    const Floats gate = add_bias<Number>(sums, task.bias, column, count);
    const Floats up = add_bias<Number>(sums + kLanes, task.bias, size + column, count);
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    store_some(y + column, pagewire::gate(function, gate, up), count);
  }

  Function function{};
};

}  // namespace pagewire
