// Gathers and sums of rows, reordered columns, and the argmax of logits; see layers.h.
#include "layers.h"
#include "rows.h"

namespace pagewire {
namespace {

constexpr int64_t kStretch = 1024;  // numbers looked at together

// A word that is negative if the number is NaN: it exceeds infinity, its sign aside.
inline Words beyond_infinity(Floats x) {
  const Words magnitude = and_words(as_words(x), broadcast_word(0x7fffffff));
  return add_words(magnitude, broadcast_word(0x007fffff));
}

// The largest of some numbers; NaN if there is one.
inline float largest_of(const float* x, int64_t count) {
  alignas(64) float padded[kLanes];
  if (count < kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) padded[i] = x[i < count ? i : 0];
    x = padded;
    count = kLanes;
  }
  Floats most = load_floats(x + count - kLanes);
  Words beyond = beyond_infinity(most);
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) {
    const Floats numbers = load_floats(x + i);
    most = greater_of(numbers, most);
    beyond = or_words(beyond, beyond_infinity(numbers));
  }
  alignas(64) int32_t lanes[kLanes];
  store_floats(reinterpret_cast<float*>(lanes), as_floats(beyond));
  int32_t any = 0;
  for (int64_t i = 0; i < kLanes; ++i) any |= lanes[i];
  return any < 0 ? __builtin_nanf("") : greatest_lane(most);
}

void find_largest(const LargestTask& task, int64_t row) {
  const float* x = task.x + row * task.x_stride;
  float value = -__builtin_inff();
  int64_t found = 0;  // where the stretch with the largest begins
  for (int64_t i = 0; i < task.size; i += kStretch) {
    const int64_t left = task.size - i;
    const float most = largest_of(x + i, left < kStretch ? left : kStretch);
    if (most > value || most != most) {
      value = most;
      found = i;
      if (most != most) break;
    }
  }
  int64_t place = found;
  while (x[place] != value && x[place] == x[place]) ++place;
  task.place[row] = place;
  task.value[row] = value;
}

void take_row(const TakeTask& task, int64_t row) {
  char* y = static_cast<char*>(task.y) + row * task.y_row_bytes;
  const int64_t index = (*task.indices)[row];
  if (index < 0 || index >= task.table_rows) {
    memset(y, 0, task.row_bytes);
  } else {
    memcpy(y, static_cast<const char*>(task.table) + index * task.table_row_bytes, task.row_bytes);
  }
}

template <class Number>
void add_row(const TakeTask& task, int64_t row) {
  const int64_t index = (*task.indices)[row];
  if (index < 0 || index >= task.table_rows) return;
  auto* y = reinterpret_cast<Number*>(static_cast<char*>(task.y) + row * task.y_row_bytes);
  const auto* from = reinterpret_cast<const Number*>(static_cast<const char*>(task.table) +
                                                     index * task.table_row_bytes);
  const int64_t size = task.row_bytes / static_cast<int64_t>(sizeof(Number));
  for (int64_t i = 0; i < size; i += kLanes) {
    store_some(y + i, add(load_some(y + i, size - i), load_some(from + i, size - i)), size - i);
  }
}

template <class Number>
void add_rows(TakeTask& task) {
  for_each_row(task, *task.num_rows, task.row_bytes,
               [&](int64_t row) { add_row<Number>(task, row); });
}

// A work item is a range of columns of one text's sum.
template <class Number>
void sum_rows(SumRowsTask& task) {
  constexpr int64_t kVectors = 4, kColumns = kVectors * kLanes;
  const int64_t parts = divide_up(task.size, kColumns);
  for (int64_t item = take_item(task); item < task.num_seqs * parts; item = take_item(task)) {
    const int64_t seq = item / parts, first = item % parts * kColumns, left = task.size - first;
    float* const sums = task.sums + seq * task.sums_stride + first;
    const auto visit = [&](auto visit_register) {
      for (int64_t j = 0; j < kVectors && j * kLanes < left; ++j) {
        visit_register(j, left - j * kLanes);
      }
    };
    Floats sum[kVectors];
    visit([&](int64_t j, int64_t count) { sum[j] = load_some(sums + j * kLanes, count); });
    for (int64_t row = task.starts[seq]; row < task.starts[seq + 1]; ++row) {
      const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride + first;
      visit([&](int64_t j, int64_t count) { sum[j] = add(sum[j], load_some(x + j * kLanes, count)); });
    }
    visit([&](int64_t j, int64_t count) { store_some(sums + j * kLanes, sum[j], count); });
  }
}

// Number: an integer of the same size as the elements.
template <class Number>
void permute(PermuteTask& task) {
  for_each_row(task, *task.num_rows, task.size, [&](int64_t row) {
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    for (int64_t i = 0; i < task.size; ++i) y[i] = x[task.order[i]];
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNEL pw_take(TakeTask* task) {
  for_each_row(*task, *task->num_rows, task->row_bytes, [&](int64_t row) { take_row(*task, row); });
}

PAGEWIRE_KERNELS(add_rows, TakeTask, add_rows)

PAGEWIRE_KERNELS(sum_rows, SumRowsTask, sum_rows)

PAGEWIRE_KERNEL pw_permute_float32(PermuteTask* task) { permute<uint32_t>(*task); }
PAGEWIRE_KERNEL pw_permute_bfloat16(PermuteTask* task) { permute<uint16_t>(*task); }

PAGEWIRE_KERNEL pw_largest(LargestTask* task) {
  for_each_row(*task, *task->num_rows, task->size, [&](int64_t row) { find_largest(*task, row); });
}
