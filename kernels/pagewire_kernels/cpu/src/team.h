// A kernel is a function that every thread of a team calls with the same task. The work of a task is
// divided into items; each thread takes the next one until none is left, so that a thread that is
// delayed, for instance by another process on its core, leaves more items to the other threads instead
// of making them wait.
#pragma once

#include <cstdint>

#define PAGEWIRE_KERNEL extern "C" __attribute__((visibility("default"))) void

// The kernels of rows of both dtypes, which call `function<Number>`.
#define PAGEWIRE_KERNELS(name, TaskType, function) \
  PAGEWIRE_KERNEL pw_##name##_float32(TaskType* task) { function<float>(*task); } \
  PAGEWIRE_KERNEL pw_##name##_bfloat16(TaskType* task) { function<BFloat16>(*task); }

// Exports the size of a structure that Python mirrors: loading fails if the two differ.
#define PAGEWIRE_STRUCT_SIZE(name) \
  extern "C" __attribute__((visibility("default"))) int64_t pw_size_of_##name() { \
    return sizeof(name); \
  }

namespace pagewire {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The size of a part if `n` is divided evenly into as few parts of at most `most` as there can be.
inline int64_t even_part(int64_t n, int64_t most) { return divide_up(n, divide_up(n, most)); }

// The first field of every task.
struct Task {
  int64_t next_item;  // 0 before the task runs
};

inline int64_t take_item(Task& task) {
  return __atomic_fetch_add(&task.next_item, 1, __ATOMIC_RELAXED);
}

// Consecutive items taken by one thread.
struct Run {
  int64_t item, end;
};

// Takes a part of the remaining items: long runs first and short ones last, so that all threads end at
// the same time (guided self-scheduling, Polychronopoulos and Kuck 1987). Reading sequentially is up
// to 1.5 times as fast as jumping every few pages.
inline Run take_run(Task& task, int64_t num_items, int64_t num_threads) {
  int64_t first = __atomic_load_n(&task.next_item, __ATOMIC_RELAXED), end;
  do {
    if (first >= num_items) return {num_items, num_items};
    const int64_t part = (num_items - first) / (2 * num_threads);
    end = first + (part > 1 ? part : 1);
  } while (!__atomic_compare_exchange_n(&task.next_item, &first, end, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  return {first, end};
}

}  // namespace pagewire
