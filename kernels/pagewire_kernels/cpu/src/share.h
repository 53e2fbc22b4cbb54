// A thread's share of a step's items, which the other threads of a program may take from it.
//
// A thread takes runs of items, since memory gives more to one that reads on where it is. If the
// system keeps it from its core in the middle of one, others take what it has not begun, and in the
// end also the item that it is at: they compute that again. Whoever still has an item when its
// result is ready may write it, and nobody else does, so a thread that comes back late finds its
// share gone and changes nothing. What it has read meanwhile does not matter.
#pragma once

#include "team.h"

namespace pagewire {

enum class At : uint64_t { kNothing, kComputing, kWriting, kGone };

// What one thread has: the items from `next` to `end` are not begun, and it is at the one before.
struct Holding {
  int64_t step, next, end;
  At at;
};

// `Holding` in one word, to be changed in one go.
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
  // Whether nobody has changed it meanwhile.
  bool change(const Holding& from, const Holding& to) {
    uint64_t expected = pack(from);
    return __atomic_compare_exchange_n(&word, &expected, pack(to), false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED);
  }
};

// The processor's clock, of about two ticks a nanosecond or more.
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

// Where a thread is, in which program.
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

// The items of a task, for one thread: take one, compute it, and write it only if it `may_write`.
class SharedItems {
 public:
  SharedItems(Task& task, int64_t num_items, int64_t num_threads)
      : task_(task), num_items_(num_items), num_threads_(num_threads), place_(place()),
        own_(place_.shares == nullptr ? alone_ : *place_.own) {}

  // The next one; negative if there is none.
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

  // Whether the item taken last is still this thread's.
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

  // What it will take next, as far as is known.
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

  // Of what another thread has not begun, the later half.
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

// Takes all that another thread has of the step, if it is computing something: what it is at is
// begun again by this thread. Whether there is such a thread.
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
