// A list of kernels run one after the other by one team, without leaving it in between: starting
// and ending a team for each would cost more than the smallest kernels take.
//
// A thread joins the step that the program is at, and leaves it when there is no item left to take.
// The last one to leave takes the program on to the next step. So a step waits for those who work
// on it, but not for a thread that another process keeps from its core, or that never came.
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
  int64_t state;  // step * kMaxThreads + threads on it; 0 before the program runs
};

constexpr int64_t kMaxThreads = 1 << 16;

// Spinning costs nothing while all threads run. One that waits long, since another's core is taken
// by a different process, should let that process run rather than burn the core beside it.
constexpr int kSpinsBeforeYield = 4096;

#if defined(__x86_64__)
inline void relax() { __builtin_ia32_pause(); }
#else
inline void relax() {}
#endif

inline int64_t load(const int64_t& state) { return __atomic_load_n(&state, __ATOMIC_ACQUIRE); }

// Joins the step the program is at; returns which, or the number of steps when all are done.
int64_t join(Program& program) {
  int64_t state = load(program.state);
  while (state / kMaxThreads < program.num_steps) {
    if (__atomic_compare_exchange_n(&program.state, &state, state + 1, true, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) {
      break;
    }
  }
  return state / kMaxThreads;
}

// Leaves step `i`, and takes the program on if nobody else is on it.
void leave(Program& program, int64_t i) {
  int64_t state = load(program.state), after;
  do {
    const bool is_last = state == i * kMaxThreads + 1;
    after = is_last ? (i + 1) * kMaxThreads : state - 1;
  } while (!__atomic_compare_exchange_n(&program.state, &state, after, true, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE));
  // For the program's next run; in this one nobody can join the step any more.
  if (after == (i + 1) * kMaxThreads) program.steps[i].task->next_item = 0;
}

}  // namespace

extern "C" int sched_yield(void);

PAGEWIRE_KERNEL pw_run_program(Program* program) {
  for (int64_t i = join(*program); i < program->num_steps; i = join(*program)) {
    program->steps[i].kernel(program->steps[i].task);
    leave(*program, i);
    for (int spins = 0; load(program->state) < (i + 1) * kMaxThreads; ++spins) {
      if (spins < kSpinsBeforeYield) {
        relax();
      } else {
        sched_yield();
      }
    }
  }
}
