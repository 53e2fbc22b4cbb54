// The layout of a step's batch: the C counterpart of `batch.AttentionMetadata`. Tasks point to it, so
// that a program that was recorded once runs with the batch of each step.
#pragma once

#include <cstdint>

namespace pagewire {

struct Batch {
  int64_t num_rows;             // tokens of all sequences, flattened
  int64_t num_seqs;
  const int64_t* token_ids;     // [num_rows]
  const int64_t* positions;     // [num_rows]
  const int64_t* token_types;   // [num_rows] or null
  const int64_t* slot_mapping;  // [num_rows]; negative: not written. Without a cache there are none
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, table_width]
  int64_t table_width;
  int64_t num_sampled;          // rows that go on to the head
  const int64_t* sampled;       // [num_sampled]
  const int32_t* saves;         // [num_rows] or null: the row of saved_tables for the state after each row, or -1
  const int32_t* saved_tables;  // [num_saves, table_width]: blocks that states are copied to
};

}  // namespace pagewire
