// Attention over a paged cache, and over whole texts without one: its task, and constants that its
// parts share.
//
// A work item is a tile of consecutive query tokens of one sequence with one KV head, or a single
// token with several KV heads; its rows are the tile's tokens times the query heads that share a KV
// head. An item processes the sequence's keys in steps of 64, whatever the size of a block. The keys
// and values of a step and head are packed once for all rows, in the layout in which their product is
// a chain of multiply-adds per lane; for a few rows, and for more of values than of keys, this layout
// is made in registers and not stored.
// Then each row computes (online softmax, Milakov and Gimelshein 2018)
//
//     score   = q . k                       summed over the head from its first element on
//     maximum = max(maximum, scores)
//     total   = total * e^(old maximum - maximum) + sum of e^(score - maximum)
//     output  = output * e^(old maximum - maximum) + e^(score - maximum) * v, key after key
//
// Steps start at multiples of 64 within the sequence, not within the tile, and keys that a row does
// not see have weight zero, so that the result of a row does not depend on its tile. With bfloat16,
// weights are rounded to bfloat16, in the total as well, and pairs of products are added by one
// instruction if the processor has it, or by tiles (attention_sums.h).
//
// Without a cache, keys and values are rows of the batch, as queries are: a sequence's are those from
// `query_start` on, and a row sees keys after its own position, too.
//
// With an int8 cache, float32 numbers are multiplied by codes: scores are multiplied by the scales of
// their keys afterwards, and weights by the scales of their values before.
#pragma once

#include "attention_sums.h"
#include "batch.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kStep = 64;  // keys; a multiple of every instruction set's lanes
constexpr int64_t kStepVectors = kStep / kLanes;

struct AttentionTask : Task {
  int64_t next_slot;  // of scratch; every thread takes one each time the task runs
  int64_t num_slots;  // at least the threads that come
  int64_t slot_bytes;  // as `pw_attention_slot_bytes` finds
  char* scratch;       // num_slots * slot_bytes, aligned to 64
  const Batch* batch;
  const char* query;  // [num_rows, num_heads, head_dim] with a dense last axis
  int64_t query_token_bytes;
  int64_t query_head_bytes;
  char* output;  // [num_rows, num_heads, head_dim], heads one after the other
  int64_t output_token_bytes;
  const char* key_cache;  // without blocks, the keys of the batch's rows; the same for values
  const char* value_cache;
  int64_t block_bytes;  // strides of both
  int64_t token_bytes;
  int64_t head_bytes;
  int64_t block_size;  // 0 without a cache
  int64_t num_kv_heads;
  int64_t group;  // query heads per KV head
  int64_t head_dim;
  int64_t value_dim;  // elements of a head's outputs that are computed, the first ones
  int64_t tile_tokens;
  int64_t keys_before;  // that a row sees at most, before its position and after it
  int64_t keys_after;
  const float* sinks;         // [num_heads] or null
  const float* alibi_slopes;  // [num_heads] or null
  const float* bias;  // [num_heads, bias_width] or null: by distance of the key, 0 in the middle
  int64_t bias_width;
  float scale;
  float soft_cap;  // 0 without
};

inline int64_t rounded_up(int64_t x, int64_t multiple) {
  return divide_up(x, multiple) * multiple;
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The units of 32 bits in which numbers of the cache are multiplied: a float32, to which int8 is
// converted, or a pair of bfloat16.
template <class Cached>
struct Units {
  using Dot = Float32Dot;
  using Packed = float;
};
template <>
struct Units<BFloat16> {
#if defined(PAGEWIRE_HAS_TILES)
  using Dot = TileDot;
#else
  using Dot = BFloat16Dot;
#endif
  using Packed = BFloat16;
};

template <class Cached>
constexpr int64_t kPerUnit = Units<Cached>::Dot::kInputsPerStep;

// The number of elements in a register of units; heads are padded to a multiple of it.
template <class Cached>
constexpr int64_t kChunk = kLanes * kPerUnit<Cached>;

inline Floats load_units(const float* from) { return load_floats(from); }
inline Floats load_units(const int8_t* from) { return widen(from); }
inline Floats load_units(const BFloat16* from) { return as_floats(load_words(from)); }

}  // namespace pagewire
