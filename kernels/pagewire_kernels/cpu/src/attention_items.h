// The division of a batch into work items.
#pragma once

#include "attention.h"

namespace pagewire {

// The tiles of a batch, from the last to the first, since the last tiles of a sequence have the most
// keys.
class Tiles {
 public:
  explicit Tiles(const AttentionTask& task) : task_(task), seq_(task.batch->num_seqs) {
    for (int64_t seq = 0; seq < task.batch->num_seqs; ++seq) count_ += tiles_of(seq);
    before_ = count_;
  }

  int64_t count() const { return count_; }

  // The sequence of a tile, and the tile's index in it. Tiles must be queried in decreasing order.
  int64_t find(int64_t tile, int64_t& seq) {
    while (before_ > tile) before_ -= tiles_of(--seq_);
    seq = seq_;
    return tile - before_;
  }

 private:
  int64_t tiles_of(int64_t seq) const {
    const int64_t tokens = task_.batch->query_start[seq + 1] - task_.batch->query_start[seq];
    return tokens == 1 ? 1 : (tokens + task_.tile_tokens - 1) / task_.tile_tokens;
  }

  const AttentionTask& task_;
  int64_t count_ = 0;
  int64_t before_;  // tiles of the sequences before `seq_`
  int64_t seq_;
};

// The rows of a tile for some of the KV heads.
struct Item {
  int64_t seq;
  int64_t first_row;  // of the batch
  int64_t num_tokens;
  int64_t position;  // of the first token
  int64_t end_key;  // after the last key that any row sees
  int64_t first_head;
  int64_t num_heads;

  // The first key that any row sees.
  int64_t first_visible_key(int64_t keys_before) const { return larger(0, position - keys_before); }
  // The first key of its step.
  int64_t first_key(int64_t keys_before) const {
    return first_visible_key(keys_before) / kStep * kStep;
  }
};

// The smallest factor above 1 of n > 1.
inline int64_t least_factor(int64_t n) {
  int64_t factor = 2;
  while (n % factor != 0) ++factor;
  return factor;
}

// The items that a thread takes in turn.
class Items {
 public:
  explicit Items(AttentionTask& task)
      : task_(task), tiles_(task), taken_heads_(heads_taken(task, tiles_.count())) {}

  // The next item, without taking it from the thread; null when there is none.
  const Item* upcoming() {
    if (!has_upcoming_) has_upcoming_ = heads_left_ > 0 || take_tile();
    return has_upcoming_ ? &item_ : nullptr;
  }

  // Advances past the upcoming item.
  void pass() {
    has_upcoming_ = false;
    heads_left_ -= item_.num_heads;
    item_.first_head += item_.num_heads;
  }

 private:
  static constexpr int64_t kTakesPerThread = 4, kManyRows = 24;

  // The number of KV heads that a thread takes at once: all of a tile, unless there would be too few
  // items for all threads. Heads in one place are read and packed for each item of a decode, which
  // takes long for few rows: these are divided only if threads would have no item.
  static int64_t heads_taken(const AttentionTask& task, int64_t num_tiles) {
    const bool is_shared = task.head_bytes == 0 && num_tiles == task.batch->num_rows;
    int64_t heads = task.num_kv_heads;
    const auto num_takes = [&] { return num_tiles * task.num_kv_heads / heads; };
    const auto takes_per_thread = [&] {
      return is_shared && heads / 2 * task.group < kManyRows ? 1 : kTakesPerThread;
    };
    while (heads % 2 == 0 && num_takes() < takes_per_thread() * task.num_slots) heads /= 2;
    while (heads > 1 && num_takes() < task.num_slots) heads /= least_factor(heads);
    return heads;
  }

  bool take_tile() {
    const int64_t parts = task_.num_kv_heads / taken_heads_;
    const int64_t taken = take_item(task_);
    if (taken >= tiles_.count() * parts) return false;
    const int64_t tile = tiles_.find(tiles_.count() - 1 - taken / parts, item_.seq);
    const int32_t* const query_start = task_.batch->query_start + item_.seq;
    item_.first_row = query_start[0] + tile * task_.tile_tokens;
    const int64_t rows_left = query_start[1] - item_.first_row;
    item_.num_tokens = smaller(task_.tile_tokens, rows_left);
    const int64_t num_keys = task_.batch->context_lens[item_.seq];
    item_.position = num_keys - rows_left;
    item_.end_key = smaller(num_keys, item_.position + item_.num_tokens + task_.keys_after);
    item_.first_head = taken % parts * taken_heads_;
    // The heads of a decode are computed together, so that blocks are read sequentially; those of a
    // prefill one after the other, so that its rows stay in the processor's cache.
    item_.num_heads = item_.num_tokens == 1 ? taken_heads_ : 1;
    heads_left_ = taken_heads_;
    return true;
  }

  AttentionTask& task_;
  Tiles tiles_;
  const int64_t taken_heads_;
  Item item_;
  int64_t heads_left_ = 0;
  bool has_upcoming_ = false;
};

}  // namespace pagewire
