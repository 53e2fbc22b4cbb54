// Copies whole blocks within a cache, or to another cache.
#include "team.h"
#include "vectors.h"

namespace {

using namespace pagewire;

struct BlockCopyTask : Task {
  int64_t num_threads;
  const char* source;
  char* target;
  const int64_t* pairs;  // [num_pairs, 2]: a block of the source and one of the target
  int64_t num_pairs;
  int64_t block_bytes;  // of both
};

constexpr int64_t kPieceBytes = 64 << 10;  // of a block; what a work item copies
constexpr int64_t kWordsBytes = sizeof(Words);

// A store that bypasses the caches writes its line directly. Other stores read the line first, although
// all of it is overwritten.
void copy_past_caches(char* to, const char* from, int64_t num_bytes) {
  const int64_t to_alignment = -reinterpret_cast<intptr_t>(to) & (kWordsBytes - 1);
  int64_t at = to_alignment < num_bytes ? to_alignment : num_bytes;
  memcpy(to, from, at);
  for (; at + kWordsBytes <= num_bytes; at += kWordsBytes) {
    store_past_caches(to + at, load_words(from + at));
  }
  memcpy(to + at, from + at, num_bytes - at);
}

void copy_piece(const BlockCopyTask& task, int64_t pair, int64_t first) {
  const int64_t left = task.block_bytes - first;
  copy_past_caches(task.target + task.pairs[2 * pair + 1] * task.block_bytes + first,
                   task.source + task.pairs[2 * pair] * task.block_bytes + first,
                   left < kPieceBytes ? left : kPieceBytes);
}

}  // namespace

PAGEWIRE_KERNEL pw_copy_blocks(BlockCopyTask* task) {
  const int64_t pieces = divide_up(task->block_bytes, kPieceBytes);
  const int64_t num_items = task->num_pairs * pieces;
  for (;;) {
    const Run run = take_run(*task, num_items, task->num_threads);
    if (run.item >= num_items) break;
    for (int64_t i = run.item; i < run.end; ++i) {
      copy_piece(*task, i / pieces, i % pieces * kPieceBytes);
    }
  }
  finish_stores_past_caches();
}

PAGEWIRE_STRUCT_SIZE(BlockCopyTask)
