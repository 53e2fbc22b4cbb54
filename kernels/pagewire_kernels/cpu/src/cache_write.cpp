// Writes new keys and values to their slots of the cache.
#include <string.h>

#include "batch.h"
#include "int8_head.h"
#include "team.h"

namespace {

using namespace pagewire;

struct CacheWriteTask : Task {
  const Batch* batch;
  const char* key;    // [num_rows, num_kv_heads, head_dim], heads one after the other
  const char* value;  // as key
  int64_t key_row_bytes;
  int64_t value_row_bytes;
  char* key_cache;
  char* value_cache;
  int64_t block_bytes;  // strides of both caches
  int64_t token_bytes;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t copied_bytes;  // of a row that is stored as it is
};

constexpr int64_t kRowsPerItem = 64;

// Calls `store(row, to)` for the key and the value of a row, if it has a slot, with their addresses in
// the cache.
template <class Store>
void write_row(const CacheWriteTask& task, int64_t row, Store store) {
  const int64_t slot = task.batch->slot_mapping[row];
  if (slot < 0) return;
  const int64_t block = slot / task.block_size, offset = slot % task.block_size;
  const int64_t at = block * task.block_bytes + offset * task.token_bytes;
  store(task.key + row * task.key_row_bytes, task.key_cache + at);
  store(task.value + row * task.value_row_bytes, task.value_cache + at);
}

template <class Store>
void write_rows(CacheWriteTask& task, Store store) {
  const int64_t num_rows = task.batch->num_rows;
  for (;;) {
    const int64_t first = take_item(task) * kRowsPerItem;
    if (first >= num_rows) return;
    const int64_t end = first + kRowsPerItem < num_rows ? first + kRowsPerItem : num_rows;
    for (int64_t row = first; row < end; ++row) write_row(task, row, store);
  }
}

template <class Number>
void write_int8_rows(CacheWriteTask& task) {
  write_rows(task, [&](const char* row, char* to) {
    for (int64_t head = 0; head < task.num_kv_heads; ++head) {
      store_int8_head(reinterpret_cast<const Number*>(row) + head * task.head_dim, task.head_dim,
                      to + head * (task.head_dim + kScaleBytes));
    }
  });
}

}  // namespace

PAGEWIRE_KERNEL pw_cache_write(CacheWriteTask* task) {
  write_rows(*task, [&](const char* row, char* to) { memcpy(to, row, task->copied_bytes); });
}

PAGEWIRE_KERNELS(cache_write_int8, CacheWriteTask, write_int8_rows)

PAGEWIRE_STRUCT_SIZE(CacheWriteTask)
