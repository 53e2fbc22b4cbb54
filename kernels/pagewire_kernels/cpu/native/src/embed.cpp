// Token embeddings.
#include <cstring>

#include "layers.h"

using namespace pagewire;

PAGEWIRE_KERNEL pw_embed(EmbedTask* task) {
  const Batch& batch = *task->batch;
  for (int64_t i = take_item(*task); i < batch.num_rows; i = take_item(*task)) {
    char* y = static_cast<char*>(task->y) + i * task->row_bytes;
    const int64_t token = batch.token_ids[i];
    if (token < 0 || token >= task->num_tokens) {
      memset(y, 0, task->row_bytes);
    } else {
      const char* table = static_cast<const char*>(task->table);
      memcpy(y, table + token * task->table_row_bytes, task->row_bytes);
    }
  }
}
