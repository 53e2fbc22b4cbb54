// Scratch memory of one thread for attention.
#pragma once

#include "attention.h"

namespace pagewire {

// The rows of a work item are ordered by KV head, then token, then query head within the group.
struct Scratch {
  float* keys;      // [units of the head][kStep]
  float* values;    // [units of a step][padded values]
  float* queries;   // [rows][units of the head]
  float* outputs;   // [rows][padded values]
  float* totals;    // [rows][kLanes], to be summed over lanes
  float* maxima;    // [rows]
  char* no_key;     // zeros, a padded head in the cache's numbers
  char* padded_keys;    // [kStep][padded head], copies of heads that do not fill registers
  char* padded_values;  // the same
};

template <class Cached>
int64_t padded_dim(const AttentionTask& task) {
  return rounded_up(task.head_dim, kChunk<Cached>);
}

// Of the part of values that outputs have.
template <class Cached>
int64_t padded_value_dim(const AttentionTask& task) {
  return rounded_up(task.value_dim, kChunk<Cached>);
}

inline int64_t max_rows(const AttentionTask& task) {
  return larger(task.tile_tokens, task.num_kv_heads) * task.group;
}

// Assigns memory from `memory` on to all parts. Returns its end.
template <class Cached>
char* lay_out(const AttentionTask& task, char* memory, Scratch& scratch) {
  const int64_t dim = padded_dim<Cached>(task), rows = max_rows(task);
  const int64_t value_dim = padded_value_dim<Cached>(task);
  const auto part = [&memory](int64_t bytes) {
    char* const begin = memory;
    memory += rounded_up(bytes, 64);
    return begin;
  };
  const auto words = [&part](int64_t count) { return reinterpret_cast<float*>(part(4 * count)); };
  const int64_t head_units = dim / kPerUnit<Cached>;
  scratch.keys = words(head_units * kStep);
  scratch.values = words(kStep / kPerUnit<Cached> * value_dim);
  scratch.queries = words(rows * head_units);
  scratch.outputs = words(rows * value_dim);
  scratch.totals = words(rows * kLanes);
  scratch.maxima = words(rows);
  const int64_t head_bytes = dim * static_cast<int64_t>(sizeof(Cached));
  scratch.no_key = part(head_bytes);
  const int64_t padded_bytes = dim == task.head_dim ? 0 : kStep * head_bytes;
  scratch.padded_keys = part(padded_bytes);
  scratch.padded_values = part(padded_bytes);
  return memory;
}

// The scratch memory of the calling thread, with its zeros initialized. Slots are assigned in turn, so
// that concurrent threads of a task have different ones.
template <class Cached>
Scratch take_scratch(AttentionTask& task) {
  const int64_t taken = __atomic_fetch_add(&task.next_slot, 1, __ATOMIC_RELAXED);
  Scratch scratch;
  lay_out<Cached>(task, task.scratch + taken % task.num_slots * task.slot_bytes, scratch);
  memset(scratch.no_key, 0, padded_dim<Cached>(task) * sizeof(Cached));
  return scratch;
}

}  // namespace pagewire
