// Software prefetching of keys and values.
#pragma once

#include <stdint.h>

namespace pagewire {

// Prefetches the keys and values of some tokens into the second-level cache, a few lines at a time, in
// the order of their addresses: the hardware prefetcher then runs ahead of this one, with more lines in
// flight than a program can have. A burst of many prefetches would delay the loads after it.
class Ahead {
 public:
  // Prefetches `num_bytes` of each token, from its offset on, in both caches.
  Ahead(const char* keys, const char* values, const int64_t* offsets, int64_t num_tokens,
        int64_t num_bytes)
      : keys_(keys), values_(values), offset_(offsets), end_(offsets + num_tokens),
        num_bytes_(num_bytes) {}

  // Prefetches the next few lines, if any are left.
  __attribute__((always_inline)) void fetch() {
    if (offset_ == end_) return;
    const int64_t at = *offset_ + at_;
#pragma GCC unroll 4
    for (int64_t line = 0; line < kBytes; line += kLine) {
      __builtin_prefetch(keys_ + at + line, 0, kIntoSecondLevel);
      __builtin_prefetch(values_ + at + line, 0, kIntoSecondLevel);
    }
    at_ += kBytes;
    if (at_ < num_bytes_) return;
    at_ = 0;
    ++offset_;
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int64_t kBytes = 4 * kLine;
  static constexpr int kIntoSecondLevel = 2;

  const char* keys_;
  const char* values_;
  const int64_t* offset_;
  const int64_t* end_;
  int64_t num_bytes_;
  int64_t at_ = 0;
};

}  // namespace pagewire
