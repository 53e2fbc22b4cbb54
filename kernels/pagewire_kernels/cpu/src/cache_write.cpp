// New keys and values, put into their slots of the cache.
#include <string.h>

#include "batch.h"
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
  int64_t copied_bytes;  // of a row
};

constexpr int64_t kRowsPerItem = 64;

void write_row(const CacheWriteTask& task, int64_t row) {
  const int64_t slot = task.batch->slot_mapping[row];
  if (slot < 0) return;
  const int64_t block = slot / task.block_size, offset = slot % task.block_size;
  const int64_t at = block * task.block_bytes + offset * task.token_bytes;
  memcpy(task.key_cache + at, task.key + row * task.key_row_bytes, task.copied_bytes);
  memcpy(task.value_cache + at, task.value + row * task.value_row_bytes, task.copied_bytes);
}

}  // namespace

PAGEWIRE_KERNEL pw_cache_write(CacheWriteTask* task) {
  const int64_t num_rows = task->batch->num_rows;
  for (;;) {
    const int64_t first = take_item(*task) * kRowsPerItem;
    if (first >= num_rows) return;
    const int64_t end = first + kRowsPerItem < num_rows ? first + kRowsPerItem : num_rows;
    for (int64_t row = first; row < end; ++row) write_row(*task, row);
  }
}

PAGEWIRE_STRUCT_SIZE(CacheWriteTask)
