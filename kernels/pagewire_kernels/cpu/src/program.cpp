// A list of kernels, run in order by one team of threads without returning in between: starting and
// ending a team for each kernel would take longer than the smallest kernels do.
//
// A thread joins the current step of the program, and leaves it when no item is left to take. The last
// thread to leave advances the program to the next step. A step therefore waits for threads that work
// on it, but not for threads that never joined; nor does it wait long for a thread that lost its core to
// another process, if the kernel lets its work be taken over (share.h).
#include "share.h"
#include "team.h"

extern "C" int sched_yield(void);

namespace {

using pagewire::At;
using pagewire::now;
using pagewire::Place;
using pagewire::Share;
using pagewire::Task;

struct ProgramStep {
  void (*kernel)(Task*);
  Task* task;
  uint64_t item_cycles;  // that the item took which was finished last; 0 before there is one
};

struct ProgramTask {
  ProgramStep* steps;
  int64_t num_steps;
  int64_t state;  // step * kMaxThreads + threads on it; 0 before the program runs
  Share* shares;  // of threads as they come; those beyond have none
  int64_t num_shares;
  int64_t num_threads;  // that have come; 0 before the program runs
  int64_t num_taken_over;  // items that were begun again, in all runs
};

constexpr int64_t kMaxThreads = 1 << 16;

// Spinning costs nothing while all threads run. A thread that waits long, because another thread lost
// its core to a different process, should yield its own core to that process.
constexpr uint64_t kCyclesBeforeYield = 1 << 18;

// A thread that waits for longer than items take restarts the item of another thread. A few
// microseconds are negligible compared with the time for which a thread loses its core.
constexpr uint64_t kCyclesBeforeTakingOver = 1 << 14;

// Longer than the step's items take: restarting an item too early gains nothing, and two threads that
// keep taking it from each other would never finish it.
inline uint64_t patience(const ProgramStep& step) {
  return kCyclesBeforeTakingOver + 2 * __atomic_load_n(&step.item_cycles, __ATOMIC_RELAXED);
}

inline void relax() {
#if defined(__aarch64__)
  asm volatile("isb");  // a pause; `yield` does nothing on most processors
#else
  __builtin_ia32_pause();
#endif
}

inline int64_t load(const int64_t& state) { return __atomic_load_n(&state, __ATOMIC_ACQUIRE); }

// Joins the current step of the program. Returns its index, or the number of steps if all are done.
int64_t join(ProgramTask& program) {
  int64_t state = load(program.state);
  while (state / kMaxThreads < program.num_steps) {
    if (__atomic_compare_exchange_n(&program.state, &state, state + 1, true, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) {
      break;
    }
  }
  return state / kMaxThreads;
}

// Leaves step `i`, and advances the program if no other thread works on it.
void leave(ProgramTask& program, int64_t i) {
  int64_t state = load(program.state), after;
  do {
    const bool is_last = state == i * kMaxThreads + 1;
    after = is_last ? (i + 1) * kMaxThreads : state - 1;
  } while (!__atomic_compare_exchange_n(&program.state, &state, after, true, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE));
  // For the next run of the program; in this one, no thread can join the step any more.
  if (after == (i + 1) * kMaxThreads) program.steps[i].task->next_item = 0;
}

// Works on a step that this thread has joined, until no item is left.
void work(ProgramTask& program, int64_t i, const Place& here) {
  program.steps[i].kernel(program.steps[i].task);
  if (here.own->get().at == At::kGone) {
    here.own->set({});  // another thread has joined in this one's stead
  } else {
    leave(program, i);
  }
}

// Waits until step `i` is done.
void wait(ProgramTask& program, int64_t i, const Place& here) {
  uint64_t since = now();
  while (load(program.state) < (i + 1) * kMaxThreads) {
    const uint64_t waited = now() - since;
    if (waited > patience(program.steps[i]) && take_over(here)) {
      __atomic_fetch_add(&program.num_taken_over, 1, __ATOMIC_RELAXED);
      work(program, i, here);
      since = now();
    } else if (waited < kCyclesBeforeYield) {
      relax();
    } else {
      sched_yield();
    }
  }
}

}  // namespace

PAGEWIRE_KERNEL pw_run_program(ProgramTask* program) {
  const int64_t number = __atomic_fetch_add(&program->num_threads, 1, __ATOMIC_RELAXED);
  if (number >= program->num_shares) return;
  Place& here = pagewire::place();
  here = {program->shares, program->num_shares, program->shares + number, 0, nullptr};
  for (int64_t i = join(*program); i < program->num_steps; i = join(*program)) {
    here.step = i;
    here.item_cycles = &program->steps[i].item_cycles;
    work(*program, i, here);
    wait(*program, i, here);
  }
  here = {};
}

PAGEWIRE_STRUCT_SIZE(ProgramStep)
PAGEWIRE_STRUCT_SIZE(ProgramTask)
