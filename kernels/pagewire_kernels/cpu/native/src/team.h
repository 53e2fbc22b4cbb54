// A kernel is a function that every thread of a team calls with the same task. A task's work is cut
// into items; each thread takes the next one until none is left, so a thread that is held up, by
// another process on its core for instance, leaves more to the others instead of making them wait.
#pragma once

#include <cstdint>

#define PAGEWIRE_KERNEL extern "C" __attribute__((visibility("default"))) void

namespace pagewire {

// What every task begins with.
struct Task {
  int64_t next_item;  // 0 before the task runs
};

inline int64_t take_item(Task& task) {
  return __atomic_fetch_add(&task.next_item, 1, __ATOMIC_RELAXED);
}

}  // namespace pagewire
