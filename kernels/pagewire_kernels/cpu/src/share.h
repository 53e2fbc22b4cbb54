// The share of a step's items that a thread has, which the other threads of a program may take over.
//
// A thread takes runs of consecutive items, since sequential reads are faster. If it loses its core in
// the middle of a run, other threads take the items that it has not started, and finally its current
// item, which they compute again. Only the thread that holds an item when its result is ready may write
// it. A thread that resumes late therefore finds its share gone, and writes nothing; what it has read
// meanwhile does not matter.
#pragma once

#include "team.h"

namespace pagewire {

enum class At : uint64_t { kNothing, kComputing, kWriting, kGone };

// The items of one thread: those from `next` to `end` are not started, and `next - 1` is the current one.
struct Holding {
  int64_t step, next, end;
  At at;
};

// `Holding` in one word, which is changed atomically.
struct alignas(64) Share {
  static constexpr int kItemBits = 24, kStepBits = 14;
  static constexpr uint64_t kItemMask = (1 << kItemBits) - 1;

  uint64_t word;

  static uint64_t pack(const Holding& h) {
    return uint64_t(h.step) << (2 * kItemBits + 2) | uint64_t(h.end) << (kItemBits + 2) |
           uint64_t(h.next) << 2 | uint64_t(h.at);
  }
  Holding get() const {
    const uint64_t w = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
    return {int64_t(w >> (2 * kItemBits + 2)), int64_t(w >> 2 & kItemMask),
            int64_t(w >> (kItemBits + 2) & kItemMask), At(w & 3)};
  }
  void set(const Holding& h) { __atomic_store_n(&word, pack(h), __ATOMIC_RELEASE); }
  // Changes it, unless another thread has changed it meanwhile; returns whether it did.
  bool change(const Holding& from, const Holding& to) {
    uint64_t expected = pack(from);
    return __atomic_compare_exchange_n(&word, &expected, pack(to), false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED);
  }
};

// The processor's cycle counter, with about two or more ticks per nanosecond.
inline uint64_t now() {
#if defined(__aarch64__)
  uint64_t ticks, ticks_per_second;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  asm("mrs %0, cntfrq_el0" : "=r"(ticks_per_second));  // from 24 million to 1 billion
  return ticks * (2000000000 / ticks_per_second);
#else
  return __builtin_ia32_rdtsc();
#endif
}

// A thread's position in a program.
struct Place {
  Share* shares;  // of all threads; null outside of programs
  int64_t num_shares;
  Share* own;
  int64_t step;
  uint64_t* item_cycles;  // that the step's item took which was finished last
};

inline Place& place() {
  static thread_local Place here;
  return here;
}

// The items of a task, for one thread, which takes one, computes it, and writes it only if `may_write`.
class SharedItems {
 public:
  SharedItems(Task& task, int64_t num_items, int64_t num_threads)
      : task_(task), num_items_(num_items), num_threads_(num_threads), place_(place()),
        own_(place_.shares == nullptr ? alone_ : *place_.own) {}

  // Takes the next item; negative if there is none.
  int64_t take() {
    for (;;) {
      const Holding h = own_.get();
      if (h.at == At::kGone || (h.next >= h.end && !refill())) return -1;
      if (h.next < h.end && own_.change(h, {h.step, h.next + 1, h.end, At::kComputing})) {
        began_ = now();
        return h.next;
      }
    }
  }

  // Whether this thread still holds the item that it took last.
  bool may_write() {
    if (place_.item_cycles != nullptr) {
      __atomic_store_n(place_.item_cycles, now() - began_, __ATOMIC_RELAXED);
    }
    for (;;) {
      const Holding h = own_.get();
      if (h.at == At::kGone) return false;
      if (own_.change(h, {h.step, h.next, h.end, At::kWriting})) return true;
    }
  }

  // The item that this thread will take next, as far as is known.
  int64_t following(int64_t item) const {
    const Holding h = own_.get();
    return h.next < h.end ? h.next : item;
  }

 private:
  bool refill() {
    const Run run = take_run(task_, num_items_, num_threads_);
    if (run.item < num_items_) {
      own_.set({place_.step, run.item, run.end, At::kNothing});
      return true;
    }
    for (int64_t i = 0; i < place_.num_shares; ++i) {
      if (take_half(place_.shares[i])) return true;
    }
    own_.set({place_.step, 0, 0, At::kNothing});
    return false;
  }

  // Takes the later half of the items that another thread has not started.
  bool take_half(Share& other) {
    for (;;) {
      const Holding h = other.get();
      if (h.step != place_.step || h.next >= h.end) return false;
      const int64_t middle = h.next + (h.end - h.next) / 2;
      if (other.change(h, {h.step, h.next, middle, h.at})) {
        own_.set({h.step, middle, h.end, At::kNothing});
        return true;
      }
    }
  }

  Task& task_;
  const int64_t num_items_, num_threads_;
  Place& place_;
  Share alone_{};
  Share& own_;
  uint64_t began_ = 0;
};

// Takes over all items of a thread that is computing one: this thread starts that item again. Returns
// whether there is such a thread.
inline bool take_over(const Place& place) {
  for (int64_t i = 0; i < place.num_shares; ++i) {
    Share& other = place.shares[i];
    const Holding h = other.get();
    if (&other == place.own || h.step != place.step || h.at != At::kComputing) continue;
    if (!other.change(h, {h.step, 0, 0, At::kGone})) continue;
    place.own->set({h.step, h.next - 1, h.end, At::kNothing});
    return true;
  }
  return false;
}

}  // namespace pagewire
