// A list of kernels run one after the other by one team. Between two of them the threads meet at a
// barrier in the team itself: starting and ending a team for each would cost more than the smallest
// kernels take.
#include "team.h"

namespace {

using pagewire::Task;

struct Step {
  void (*kernel)(Task*);
  Task* task;
};

struct Program {
  const Step* steps;
  int64_t num_steps;
  int64_t num_threads;  // that will call `pw_run_program`, each once
  int64_t num_arrived;  // at all barriers so far; 0 before the program runs
  int64_t num_passed;   // barriers; 0 before the program runs
};

// Spinning costs nothing while all threads run. One that waits long, since another's core is taken
// by a different process, should let that process run rather than burn the core beside it.
constexpr int kSpinsBeforeYield = 4096;

#if defined(__x86_64__)
inline void relax() { __builtin_ia32_pause(); }
#else
inline void relax() {}
#endif

}  // namespace

extern "C" int sched_yield(void);

// The last thread to arrive readies the step's task for the program's next run.
PAGEWIRE_KERNEL pw_run_program(Program* program) {
  for (int64_t i = 0; i < program->num_steps; ++i) {
    const Step& step = program->steps[i];
    step.kernel(step.task);
    const int64_t arrived = __atomic_add_fetch(&program->num_arrived, 1, __ATOMIC_ACQ_REL);
    if (arrived == (i + 1) * program->num_threads) {
      step.task->next_item = 0;
      __atomic_store_n(&program->num_passed, i + 1, __ATOMIC_RELEASE);
      continue;
    }
    for (int spins = 0; __atomic_load_n(&program->num_passed, __ATOMIC_ACQUIRE) <= i; ++spins) {
      if (spins < kSpinsBeforeYield) {
        relax();
      } else {
        sched_yield();
      }
    }
  }
}
