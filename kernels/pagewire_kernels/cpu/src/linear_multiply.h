// The loops over the items of a product, for any kind of packed weight.
//
// A work item is a panel of outputs for a block of rows. While one item is computed, the panel of the
// thread's next item is prefetched. A thread takes consecutive panels.
//
// A `Product` has
//
//   Input, kMostRows      what rows consist of; the most rows of a block
//   panel_bytes()         of the packed weight
//   most_rows()           of a block, at most kMostRows, so that they stay in the second-level cache
//   set_rows(rows, count) the block's rows
//   operator()(panel, upcoming, sums)  their products with a panel, [count, kPanel]
#pragma once

#include <stdlib.h>

#include "experts.h"
#include "linear_finish.h"
#include "share.h"

namespace pagewire {

// Rows of inputs: consecutive ones of x, or those that `index` lists.
template <class Input>
struct InputRows {
  const Input* operator[](int64_t r) const {
    return x + (index == nullptr ? r : index[r]) * stride;
  }

  const Input* x;
  int64_t stride;
  const int32_t* index;  // or null
};

// The calling thread's working memory, which grows as needed and is kept; 64 bytes aligned.
inline char* working_memory(int64_t num_bytes) {
  static thread_local char* memory = nullptr;
  static thread_local int64_t size = 0;
  if (size < num_bytes) {
    free(memory);
    size = num_bytes + num_bytes / 4;
    size += -size & 63;
    memory = static_cast<char*>(aligned_alloc(64, size));
    if (memory == nullptr) abort();
  }
  return memory;
}

// The rows of a block at one distance from each other, copied if they are not.
template <class Input>
class BlockRows {
 public:
  void set(const InputRows<Input>& rows, int64_t count, int64_t size) {
    num_rows = count;
    x = rows[0];
    stride = rows.stride;
    if (rows.index == nullptr || count == 1) return;
    // An odd number of cache lines: see `new_rows` of program.py.
    const int64_t row_bytes = (divide_up(size * sizeof(Input), 64) | 1) * 64;
    char* to = working_memory(count * row_bytes);
    for (int64_t r = 0; r < count; ++r) memcpy(to + r * row_bytes, rows[r], size * sizeof(Input));
    x = reinterpret_cast<const Input*>(to);
    stride = row_bytes / static_cast<int64_t>(sizeof(Input));
  }

  const Input* x = nullptr;
  int64_t stride = 0, num_rows = 0;
};

template <class Product, class Finish>
void multiply(LinearTask& task, Finish finish) {
  using Input = typename Product::Input;
  const int64_t num_rows = *task.num_rows;
  if (num_rows == 0) return;
  alignas(64) float sums[Product::kMostRows * kPanel];
  Product product(task);
  const int64_t block_rows = even_part(num_rows, product.most_rows());
  const int64_t num_panels = Finish::num_panels(task);
  const auto* weights = static_cast<const char*>(task.weight);
  int64_t first = -1, count = 0;  // of the block
  SharedItems items(task, divide_up(num_rows, block_rows) * num_panels, task.num_threads);
  for (int64_t item = items.take(); item >= 0; item = items.take()) {
    const int64_t row = item / num_panels * block_rows, panel = item % num_panels;
    if (row != first) {
      first = row;
      count = num_rows - row < block_rows ? num_rows - row : block_rows;
      const auto* x = static_cast<const Input*>(task.x) + row * task.x_stride;
      product.set_rows({x, task.x_stride, nullptr}, count);
    }
    const int64_t next = items.following(item) % num_panels;
    const char* const next_panel = weights + next * product.panel_bytes();
    product(weights + panel * product.panel_bytes(),
            {next_panel, place_of<Finish>(task, first, panel)}, sums);
    add_adapters<Finish>(task, first, count, panel, next, sums);
    if (!items.may_write()) return;
    for (int64_t r = 0; r < count; ++r) finish(task, row + r, panel, sums + r * kPanel);
  }
}

// The blocks of rows of all active experts, one after the other. It is a copy of what it needs of the
// plan, since that may change before a thread that lost its core notices.
class ExpertBlocks {
 public:
  ExpertBlocks(const ExpertPlan& plan, int64_t most_rows)
      : num_active_(plan.num_active), most_rows_(most_rows) {
    int64_t num_blocks = 0;
    for (int64_t a = 0; a < num_active_; ++a) {
      experts_[a] = {plan.active[a], plan.starts[a], num_blocks};
      num_blocks += divide_up(plan.starts[a + 1] - plan.starts[a], most_rows);
    }
    experts_[num_active_] = {0, num_active_ ? plan.starts[num_active_] : 0, num_blocks};
  }

  struct Block {
    int64_t expert, first_slot, num_rows;
  };

  int64_t size() const { return experts_[num_active_].first_block; }

  Block operator[](int64_t block) const {
    int64_t low = 0, high = num_active_;  // the expert is one of these
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (experts_[middle].first_block <= block ? low : high) = middle;
    }
    const Expert &expert = experts_[low], &next = experts_[low + 1];
    const int64_t size = even_part(next.first_slot - expert.first_slot, most_rows_);
    const int64_t first = expert.first_slot + (block - expert.first_block) * size;
    const int64_t left = next.first_slot - first;
    return {expert.index, first, left < size ? left : size};
  }

 private:
  struct Expert {
    int64_t index, first_slot, first_block;
  };

  const int64_t num_active_, most_rows_;
  Expert experts_[kMaxExperts + 1];
};

// The slots of a block whose rows have the adapter of a group, in order; returns their number.
inline int64_t slots_of_group(const ExpertPlan& plan, const AdapterRows& rows, int64_t group,
                              const ExpertBlocks::Block& block, int32_t* slots) {
  int64_t count = 0;
  for (int64_t slot = block.first_slot; slot < block.first_slot + block.num_rows; ++slot) {
    if (rows.groups[plan.rows[slot]] == group) slots[count++] = static_cast<int32_t>(slot);
  }
  return count;
}

// Adds what adapters change to the sums of a block of slots, [num_rows, kPanel].
template <class Finish, int64_t kMostRows>
inline void add_adapters_of_experts(const ExpertsTask& task, const ExpertBlocks::Block& block,
                                    int64_t panel, float* sums) {
  if (task.deltas.slots == nullptr) return;
  const AdapterRows& all = *task.deltas.rows;
  const PanelColumns<Finish> of_panel(task, panel);
  int32_t slots[kMostRows];
  for (int64_t g = 0; g < all.num_groups; ++g) {
    const AdapterSlot& slot = task.deltas.slots[all.slots[g] * task.num_experts + block.expert];
    if (slot.rank == 0) continue;
    const int64_t count = slots_of_group(*task.plan, all, g, block, slots);
    if (count == 0) continue;
    add_deltas_of<DotOf<typename Finish::Number>>(task.deltas, slot, slots, count, block.first_slot,
                                                  of_panel.columns, sums, kPanel);
  }
}

// The same product for the slots of all experts, each with its own weight. `finish` is called with the
// task of an expert's block, the number of its rows, a panel and sums.
template <class Product, class Finish>
void multiply_experts(ExpertsTask& task, Finish finish) {
  using Input = typename Product::Input;
  alignas(64) float sums[Product::kMostRows * kPanel];
  Product product(task);
  const ExpertBlocks blocks(*task.plan, product.most_rows());
  const int64_t num_panels = Finish::num_panels(task);
  const auto* weights = static_cast<const char*>(task.weight);
  LinearTask of_block = task;
  int64_t current = -1;
  ExpertBlocks::Block block{};
  SharedItems items(task, blocks.size() * num_panels, task.num_threads);
  for (int64_t item = items.take(); item >= 0; item = items.take()) {
    const int64_t panel = item % num_panels;
    if (item / num_panels != current) {
      current = item / num_panels;
      block = blocks[current];
      const auto* x = static_cast<const Input*>(task.x);
      if (task.gathers) {
        product.set_rows({x, task.x_stride, task.plan->rows + block.first_slot}, block.num_rows);
      } else {
        const auto* first = x + block.first_slot * task.x_stride;
        product.set_rows({first, task.x_stride, nullptr}, block.num_rows);
      }
      of_block.y = static_cast<char*>(task.y) + block.first_slot * task.y_stride * finish.num_bytes;
      if (task.bias != nullptr) {
        of_block.bias = static_cast<const Input*>(task.bias) + block.expert * task.out_features;
      }
    }
    const int64_t next = items.following(item);
    const int64_t next_expert =
        next / num_panels == current ? block.expert : blocks[next / num_panels].expert;
    const auto panel_at = [&](int64_t expert, int64_t of_expert) {
      return weights + expert * task.expert_bytes + of_expert * product.panel_bytes();
    };
    product(panel_at(block.expert, panel),
            {panel_at(next_expert, next % num_panels),
             place_of<typename Finish::OfRow>(of_block, 0, panel)},
            sums);
    add_adapters_of_experts<typename Finish::OfRow, Product::kMostRows>(task, block, panel, sums);
    if (!items.may_write()) return;
    finish(of_block, block.num_rows, panel, sums);
  }
}

// y = sums + bias in float32, or of the first product of experts without gates, function(sums + bias)
template <class Number>
struct FinishExperts {
  using OfRow = Finish<Number, float>;
  static int64_t num_panels(const LinearTask& task) {
    return Finish<Number, float>::num_panels(task);
  }
  void operator()(const LinearTask& task, int64_t num_rows, int64_t panel, const float* sums) const {
    if (task.activation == kNone) return finish(task, num_rows, panel, sums, Finish<Number, float>());
    with_activation(task.activation, [&](auto function) {
      finish(task, num_rows, panel, sums, Finish<Number, Number, decltype(function)>{function});
    });
  }
  template <class OfRow>
  static void finish(const LinearTask& task, int64_t num_rows, int64_t panel, const float* sums,
                     const OfRow& of_row) {
    for (int64_t r = 0; r < num_rows; ++r) of_row(task, r, panel, sums + r * kPanel);
  }

  int64_t num_bytes;  // of a number of y
};

template <class Number>
struct FinishGatedExperts {
  using OfRow = FinishGated<Number, Silu>;  // of any activation
  static int64_t num_panels(const LinearTask& task) {
    return FinishGated<Number, Silu>::num_panels(task);
  }
  void operator()(const LinearTask& task, int64_t num_rows, int64_t panel, const float* sums) const {
    with_gate(task.activation, clamped, [&](auto function) {
      const FinishGated<Number, decltype(function)> finish{function};
      for (int64_t r = 0; r < num_rows; ++r) finish(task, r, panel, sums + r * kPanel);
    });
  }

  const ClampedSilu& clamped;
  int64_t num_bytes = sizeof(Number);
};

template <class Product>
void multiply_gated(LinearTask& task) {
  with_activation(task.activation, [&](auto function) {
    multiply<Product>(task, FinishGated<typename Product::Input, decltype(function)>{function});
  });
}

template <class Product>
void multiply_gated_experts(ExpertsTask& task) {
  multiply_experts<Product>(task, FinishGatedExperts<typename Product::Input>{task.clamped});
}

template <class Product>
void multiply_experts(ExpertsTask& task) {
  using Input = typename Product::Input;
  const int64_t num_bytes = task.activation == kNone ? sizeof(float) : sizeof(Input);
  multiply_experts<Product>(task, FinishExperts<Input>{num_bytes});
}

}  // namespace pagewire

// The kernels of one kind of weight: `Product` is a template of what `float` and `BFloat16` stand for.
// `bfloat16_float32` is for the LM head: sums of bfloat16 products are not rounded.
#define PAGEWIRE_LINEAR(suffix, Product) \
  PAGEWIRE_KERNEL pw_linear_float32##suffix(LinearTask* task) { \
    multiply<Product<float>>(*task, Finish<float, float>()); \
  } \
  PAGEWIRE_KERNEL pw_linear_bfloat16##suffix(LinearTask* task) { \
    multiply<Product<BFloat16>>(*task, Finish<BFloat16, BFloat16>()); \
  } \
  PAGEWIRE_KERNEL pw_linear_bfloat16_float32##suffix(LinearTask* task) { \
    multiply<Product<BFloat16>>(*task, Finish<BFloat16, float>()); \
  } \
  PAGEWIRE_KERNEL pw_activated_linear_float32##suffix(LinearTask* task) { \
    multiply<Product<float>>(*task, FinishActivated<float>()); \
  } \
  PAGEWIRE_KERNEL pw_activated_linear_bfloat16##suffix(LinearTask* task) { \
    multiply<Product<BFloat16>>(*task, FinishActivated<BFloat16>()); \
  } \
  PAGEWIRE_KERNEL pw_gated_linear_float32##suffix(LinearTask* task) { \
    multiply_gated<Product<float>>(*task); \
  } \
  PAGEWIRE_KERNEL pw_gated_linear_bfloat16##suffix(LinearTask* task) { \
    multiply_gated<Product<BFloat16>>(*task); \
  } \
  PAGEWIRE_KERNEL pw_gated_experts_float32##suffix(ExpertsTask* task) { \
    multiply_gated_experts<Product<float>>(*task); \
  } \
  PAGEWIRE_KERNEL pw_gated_experts_bfloat16##suffix(ExpertsTask* task) { \
    multiply_gated_experts<Product<BFloat16>>(*task); \
  } \
  PAGEWIRE_KERNEL pw_experts_float32##suffix(ExpertsTask* task) { \
    multiply_experts<Product<float>>(*task); \
  } \
  PAGEWIRE_KERNEL pw_experts_bfloat16##suffix(ExpertsTask* task) { \
    multiply_experts<Product<BFloat16>>(*task); \
  }
