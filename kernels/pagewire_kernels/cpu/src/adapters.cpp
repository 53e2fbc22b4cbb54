// The products of rows with A of their adapters, and rows of embeddings; see adapters.h.
#include "adapters.h"

#include "linear_multiply.h"

namespace pagewire {
namespace {

constexpr int64_t kItemRows = 4, kItemRanks = 16;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRanks = 4;  // with 4 rows, 16 registers of sums of 32
#else
constexpr int kRanks = 2;
#endif

// The dot products of `kRows` rows with `kRanks` rows of A, a register at a time.
template <class Dot, int kRows>
void multiply_ranks(const char* const* x, const char* a, int64_t a_row_bytes, int64_t num_bytes,
                    float (*to)[kItemRanks]) {
  constexpr int64_t kStep = kLanes * 4;
  Floats sums[kRows][kRanks];
  PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEWIRE_UNROLL for (int k = 0; k < kRanks; ++k) sums[r][k] = zeros();
  }
  const auto add_step = [&](int64_t at, const auto& inputs) {
    PAGEWIRE_UNROLL for (int k = 0; k < kRanks; ++k) {
      const char* from = a + k * a_row_bytes + at;
      __builtin_prefetch(from + kRanks * a_row_bytes, 0, 2);
      const auto weights = Dot::load(from);
      PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) sums[r][k] = Dot::add(inputs[r], weights, sums[r][k]);
    }
  };
  int64_t at = 0;
  typename Dot::Operand inputs[kRows];
  for (; at + kStep <= num_bytes; at += kStep) {
    PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) inputs[r] = Dot::load(x[r] + at);
    add_step(at, inputs);
  }
  if (at < num_bytes) {  // the last inputs, padded as the rows of A are
    PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      alignas(64) char padded[kStep] = {};
      memcpy(padded, x[r] + at, num_bytes - at);
      inputs[r] = Dot::load(padded);
    }
    add_step(at, inputs);
  }
  PAGEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEWIRE_UNROLL for (int k = 0; k < kRanks; ++k) to[r][k] = sum_lanes(sums[r][k]);
  }
}

// The same for any number of rows up to `kItemRows`, and of ranks up to `kItemRanks`.
template <class Dot>
void multiply_item(const char* const* x, int64_t num_rows, const char* a, int64_t a_row_bytes,
                   int64_t num_ranks, int64_t num_bytes, float (*sums)[kItemRanks]) {
  for (int64_t k = 0; k < num_ranks; k += kRanks) {
    const char* from = a + k * a_row_bytes;
    auto* to = reinterpret_cast<float(*)[kItemRanks]>(&sums[0][k]);
    if (num_rows == 1) multiply_ranks<Dot, 1>(x, from, a_row_bytes, num_bytes, to);
    if (num_rows == 2) multiply_ranks<Dot, 2>(x, from, a_row_bytes, num_bytes, to);
    if (num_rows == 3) multiply_ranks<Dot, 3>(x, from, a_row_bytes, num_bytes, to);
    if (num_rows == 4) multiply_ranks<Dot, 4>(x, from, a_row_bytes, num_bytes, to);
  }
}

// Stores the scaled products of a row with some ranks.
template <class Number>
void store_inner(const AdapterTask& task, const AdapterSlot& slot, int64_t row, int64_t first_rank,
                 int64_t num_ranks, const float* sums, int64_t first_inner = 0) {
  Number* to = static_cast<Number*>(task.inner) + row * task.inner_stride + first_inner + first_rank;
  for (int64_t k = 0; k < num_ranks; k += kLanes) {
    const Floats scaled = multiply(load_floats(sums + k), load_floats(slot.scales + first_rank + k));
    store_some(to + k, scaled, num_ranks - k);
  }
}

// The items of a task: some rows of a group, and some ranks of its adapter.
class Items {
 public:
  struct Item {
    const AdapterSlot* slot;
    const int32_t* rows;
    int64_t num_rows, first_rank, num_ranks, head;
  };

  explicit Items(const AdapterTask& task) : task_(task) {
    for (int64_t g = 0; g < task_.rows->num_groups; ++g) head_size_ += size_of(g);
  }

  int64_t size() const { return head_size_ * task_.num_heads; }

  Item operator[](int64_t item) const {
    const int64_t head = item / head_size_;
    item %= head_size_;
    int64_t g = 0;
    while (item >= size_of(g)) item -= size_of(g++);
    const AdapterRows& rows = *task_.rows;
    const AdapterSlot& slot = slot_of(g, head);
    const int64_t num_parts = divide_up(slot.rank, kItemRanks);
    const int64_t first = rows.starts[g] + item / num_parts * kItemRows;
    const int64_t first_rank = item % num_parts * kItemRanks;
    return {&slot, rows.rows + first, least(rows.starts[g + 1] - first, kItemRows), first_rank,
            least(slot.rank - first_rank, kItemRanks), head};
  }

 private:
  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  const AdapterSlot& slot_of(int64_t g, int64_t head) const {
    return task_.slots[task_.rows->slots[g] * task_.num_heads + head];
  }

  // Of a head: an adapter has the same rank in all.
  int64_t size_of(int64_t g) const {
    const AdapterRows& rows = *task_.rows;
    const int64_t num_rows = rows.starts[g + 1] - rows.starts[g];
    return divide_up(num_rows, kItemRows) * divide_up(slot_of(g, 0).rank, kItemRanks);
  }

  const AdapterTask& task_;
  int64_t head_size_ = 0;
};

template <class Number>
void multiply_a(AdapterTask& task) {
  using Dot = DotOf<Number>;
  const Items all(task);
  const int64_t num_bytes = task.in_features * static_cast<int64_t>(sizeof(Number));
  SharedItems items(task, all.size(), task.num_threads);
  for (int64_t i = items.take(); i >= 0; i = items.take()) {
    const Items::Item item = all[i];
    const char* x[kItemRows];
    alignas(64) float sums[kItemRows][kItemRanks] = {};
    for (int64_t r = 0; r < item.num_rows; ++r) {
      const int64_t at = item.rows[r] * task.x_stride + item.head * task.x_head_stride;
      x[r] = static_cast<const char*>(task.x) + at * sizeof(Number);
    }
    const char* a = static_cast<const char*>(item.slot->a) + item.first_rank * item.slot->a_row_bytes;
    multiply_item<Dot>(x, item.num_rows, a, item.slot->a_row_bytes, item.num_ranks, num_bytes, sums);
    if (!items.may_write()) return;
    const int64_t first_inner = item.head * (task.inner_stride / task.num_heads);
    for (int64_t r = 0; r < item.num_rows; ++r) {
      store_inner<Number>(task, *item.slot, item.rows[r], item.first_rank, item.num_ranks, sums[r],
                          first_inner);
    }
  }
}

// A work item is a few slots of one expert.
template <class Number>
void multiply_a_of_experts(ExpertAdapterTask& task) {
  using Dot = DotOf<Number>;
  constexpr int64_t kItemSlots = 16;
  const AdapterRows& all = *task.rows;
  const int64_t num_bytes = task.in_features * static_cast<int64_t>(sizeof(Number));
  const ExpertBlocks blocks(*task.plan, kItemSlots);
  for (int64_t item = take_item(task); item < blocks.size(); item = take_item(task)) {
    const ExpertBlocks::Block block = blocks[item];
    for (int64_t g = 0; g < all.num_groups; ++g) {
      const AdapterSlot& slot = task.slots[all.slots[g] * task.num_experts + block.expert];
      if (slot.rank == 0) continue;
      int32_t slots[kItemSlots];
      const int64_t count = slots_of_group(*task.plan, all, g, block, slots);
      for (int64_t first = 0; first < count; first += kItemRows) {
        const int64_t num_rows = count - first < kItemRows ? count - first : kItemRows;
        const char* x[kItemRows];
        for (int64_t r = 0; r < num_rows; ++r) {
          const int64_t row = task.gathers ? task.plan->rows[slots[first + r]] : slots[first + r];
          x[r] = static_cast<const char*>(task.x) + row * task.x_stride * sizeof(Number);
        }
        for (int64_t rank = 0; rank < slot.rank; rank += kItemRanks) {
          const int64_t num_ranks = slot.rank - rank < kItemRanks ? slot.rank - rank : kItemRanks;
          alignas(64) float sums[kItemRows][kItemRanks] = {};
          const char* a = static_cast<const char*>(slot.a) + rank * slot.a_row_bytes;
          multiply_item<Dot>(x, num_rows, a, slot.a_row_bytes, num_ranks, num_bytes, sums);
          for (int64_t r = 0; r < num_rows; ++r) {
            store_inner<Number>(task, slot, slots[first + r], rank, num_ranks, sums[r]);
          }
        }
      }
    }
  }
}

// A work item is a row that has an adapter.
template <class Number>
void add_embedding_deltas(EmbeddingDeltaTask& task) {
  using Dot = DotOf<Number>;
  const AdapterRows& all = *task.rows;
  const int64_t num_items = all.starts[all.num_groups];
  for (int64_t item = take_item(task); item < num_items; item = take_item(task)) {
    int64_t g = 0;
    while (item >= all.starts[g + 1]) ++g;
    const AdapterSlot& slot = task.slots[all.slots[g]];
    const int64_t row = all.rows[item], token = task.batch->token_ids[row];
    if (slot.rank == 0 || token < 0 || token >= task.num_tokens) continue;
    const Deltas deltas{nullptr, nullptr, static_cast<const char*>(slot.a) + token * slot.a_row_bytes, 0};
    const int32_t first = 0;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    for (int64_t column = 0; column < task.size; column += kLanes) {
      alignas(64) float sums[kLanes];
      store_floats(sums, load_some(y + column, task.size - column));
      const AdapterOutputs outputs(slot, column);
      add_delta<Dot, 1, 1>(deltas, &first, 0, &outputs, sums, kLanes);
      store_some(y + column, load_floats(sums), task.size - column);
    }
  }
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNELS(multiply_a, AdapterTask, multiply_a)

PAGEWIRE_KERNELS(multiply_a_of_experts, ExpertAdapterTask, multiply_a_of_experts)

PAGEWIRE_KERNELS(add_embedding_deltas, EmbeddingDeltaTask, add_embedding_deltas)

PAGEWIRE_STRUCT_SIZE(AdapterSpan)
PAGEWIRE_STRUCT_SIZE(AdapterSlot)
PAGEWIRE_STRUCT_SIZE(AdapterRows)
PAGEWIRE_STRUCT_SIZE(AdapterTask)
PAGEWIRE_STRUCT_SIZE(EmbeddingDeltaTask)
