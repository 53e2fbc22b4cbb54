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

// Where the outputs of a block of rows for one panel will be.
struct OutputPlace {
  // Prefetches those of some rows into the second-level cache.
  void fetch(int64_t row, int64_t count) const {
    for (int64_t r = row; r < row + count; ++r) {
      for (int64_t at = 0; at < num_bytes; at += 64) {
        __builtin_prefetch(first + r * row_bytes + at, 1, 2);
      }
    }
  }

  const char* first;
  int64_t row_bytes;  // from row to row
  int64_t num_bytes;  // of a row
};

// The memory that is accessed after the products with a panel.
struct Upcoming {
  const char* panel;  // the next one
  OutputPlace outputs;
};

struct Identity {
  Floats operator()(Floats x) const { return x; }
};

// y = function(sums + bias)
template <class Input, class Output, class Function = Identity>
struct Finish {
  using Number = Input;
  static constexpr int64_t kColumns = kPanel, kBytes = sizeof(Output);
  static constexpr bool kIsGated = false;
  static int64_t num_panels(const LinearTask& task) {
    return divide_up(task.out_features, kPanel);
  }
  void operator()(const LinearTask& task, int64_t row, int64_t panel, const float* sums) const {
    Output* y = static_cast<Output*>(task.y) + row * task.y_stride;
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t column = panel * kPanel + v * kLanes;
      const int64_t count = task.out_features - column;
      if (count <= 0) return;
      const Floats sum = add_bias<Input>(sums + v * kLanes, task.bias, column, count);
      store_some(y + column, function(sum), count);
    }
  }

  Function function{};
};

// y = activation(sums + bias), of the task's activation
template <class Input>
struct FinishActivated : Finish<Input, Input> {
  void operator()(const LinearTask& task, int64_t row, int64_t panel, const float* sums) const {
    with_activation(task.activation, [&](auto function) {
      Finish<Input, Input, decltype(function)>{function}(task, row, panel, sums);
    });
  }
};

// y = function(gate) * up
template <class Input, class Function>
struct FinishGated {
  using Number = Input;
  static constexpr int64_t kColumns = kLanes, kBytes = sizeof(Number);
  static constexpr bool kIsGated = true;
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

// That of the rows from `row` on.
template <class Finish>
OutputPlace place_of(const LinearTask& task, int64_t row, int64_t panel) {
  const int64_t row_bytes = task.y_stride * Finish::kBytes;
  const int64_t num_bytes = Finish::kColumns * Finish::kBytes;
  const char* const first = static_cast<const char*>(task.y) + row * row_bytes + panel * num_bytes;
  return {first, row_bytes, num_bytes};
}

// The outputs in both registers of a panel, counted so that the blocks of U begin after those of G.
template <class Finish>
struct PanelColumns {
  PanelColumns(const LinearTask& task, int64_t panel) {
    static_assert(kPanelVectors == 2);
    const int64_t up = divide_up(task.out_features / 2, kBlockOutputs) * kBlockOutputs;
    columns[0] = panel * Finish::kColumns;
    columns[1] = columns[0] + (Finish::kIsGated ? up : kLanes);
  }

  int64_t columns[2];
};

// Adds what adapters change to the sums of a panel, [num_rows, kPanel], of the rows from `row` on. next:
// the panel that will be computed next; head, num_heads: as of `add_deltas`.
template <class Finish>
inline void add_adapters(const LinearTask& task, int64_t row, int64_t num_rows, int64_t panel,
                         int64_t next, float* sums, int64_t head = 0, int64_t num_heads = 1) {
  if (task.deltas.slots == nullptr) return;
  const PanelColumns<Finish> of_panel(task, panel), of_next(task, next);
  add_deltas<DotOf<typename Finish::Number>>(task.deltas, row, num_rows, of_panel.columns,
                                             of_next.columns, sums, kPanel, head, num_heads);
}

}  // namespace pagewire
