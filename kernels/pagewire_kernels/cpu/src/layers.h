// The tasks of a model's operations between matrix products and attention. The numbers of a task are
// all float32 or all bfloat16; each is rounded once, from a float32 result. Strides are in elements,
// and last axes are dense.
#pragma once

#include "activation.h"
#include "batch.h"
#include "team.h"

namespace pagewire {

struct NormTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, size]
  int64_t x_stride;
  void* residual;  // null, or [*num_rows, size]: x is added to it, and the sum is normalised
  int64_t residual_stride;
  const void* weight;  // [size] or null
  int64_t has_float_weight;  // whether the weight is float32, whatever the rows are
  const void* bias;    // [size] or null
  void* y;             // [*num_rows, size]
  int64_t y_stride;
  int64_t size;
  float eps;
};

struct ActivationTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, size], or [*num_rows, 2 * size]: gate, then up
  int64_t x_stride;
  void* y;  // [*num_rows, size]; may be x if there is no gate
  int64_t y_stride;
  int64_t size;
  Activation activation;
  ClampedSilu clamped;  // for kClampedSilu
};

// y = factor * x; y = factor * tanh(x / factor); y += x; y *= x; y *= sigmoid(x);
// y *= softplus(x);
// y = xielu(x); y *= rms(x) / rms(y); or y = max(x - mean - factor * deviation, 0) of each row.
struct ElementwiseTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, size]
  int64_t x_stride;
  void* y;  // [*num_rows, size]; may be x
  int64_t y_stride;
  int64_t size;
  const float* numbers;  // of xIELU: for positive x, for others, beta, epsilon
  float factor;
};

// Streams of a row are added to each other, or corrected by the difference of x and the active one.
struct StreamsTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, num_streams * size]; of a correction [*num_rows, size]
  int64_t x_stride;
  const void* factors;  // [*num_rows, num_streams^2]; of a correction [*num_rows, num_streams]
  int64_t factors_stride;
  void* y;  // [*num_rows, num_streams * size]
  int64_t y_stride;
  int64_t num_streams;
  int64_t size;
  int64_t active;
};

// Gates are sigmoids of products with a row of all streams, divided by its root mean square. A row is
// the sum of the streams times their gates, and is added to them times further ones. If streams are mixed,
// the gates that follow are a matrix by which they are multiplied: softmaxes of its rows, which are divided
// by the sums of columns, and then by those of rows and columns in turn.
struct GatedStreamsTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, num_streams * size], which is read; or what is added, [*num_rows, size]
  int64_t x_stride;
  float* gates;  // [*num_rows, num_gates]: products, which are overwritten by gates; or [.., num_streams]
  int64_t gates_stride;
  void* y;  // [*num_rows, size]; or the streams, to which rows are added
  int64_t y_stride;
  const float* numbers;  // [2, num_gates]: factors of products, then what is added to them; or null
  int64_t num_gates;     // num_streams of what is read, and as many of what is added, or none; or the matrix
  int64_t num_streams;
  int64_t size;
  int64_t num_divisions;  // by the sums of columns; 0 if there is no matrix
  float eps;        // added to the mean square
  float offset;     // added to gates; with a matrix to those of what is read, and to its softmaxes and sums
  float magnitude;  // the factor of gates of what is added
};

struct RotateTask : Task {
  const Batch* batch;
  void* query;       // [num_rows, num_heads, head_dim], rotated in place
  void* key;         // [num_rows, num_kv_heads, head_dim], rotated in place without a cache
  const void* value; // as key
  int64_t query_stride, query_head_stride;
  int64_t key_stride, key_head_stride;
  int64_t value_stride, value_head_stride;
  void* key_cache;  // [num_blocks, block_size, num_kv_heads, head_dim], or heads of int8_head.h
  void* value_cache;
  int64_t block_stride, slot_stride, cache_head_stride;  // of both caches
  int64_t block_size;
  const void* cos;  // [num_positions, half]
  const void* sin;
  int64_t table_stride;
  const void* query_norm;  // [head_dim] or null
  const void* key_norm;
  int64_t has_float_norms;  // whether these are float32, whatever the heads are
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t half;  // half the number of a head's elements that are rotated
  float eps;
};

// Latent attention: rotates the ends of query heads, and writes latents, which are normalised first, with
// the end of keys that all heads share, which is rotated, to the cache.
struct LatentTask : Task {
  const Batch* batch;
  const void* query;  // [num_rows, num_heads, 2 * half]
  int64_t query_stride, query_head_stride;
  void* rotated;  // as query
  int64_t rotated_stride, rotated_head_stride;
  const void* latents;  // [num_rows, rank + 2 * half]: latent, then the end of keys
  int64_t latents_stride;
  const void* norm;  // [rank]
  int64_t has_float_norm;  // whether it is float32, whatever the latents are
  void* cache;  // [num_blocks, block_size, rank + 2 * half], or heads of int8_head.h
  int64_t block_stride, slot_stride;
  int64_t block_size;
  const void* cos;  // [num_positions, half]
  const void* sin;
  int64_t table_stride;
  int64_t num_heads;
  int64_t rank;
  int64_t half;  // half the number of elements that are rotated
  float eps;
};

// Gathers rows of a table, such as embeddings of tokens, or the hidden states of rows that sample, or
// adds them to y.
struct TakeTask : Task {
  const int64_t* num_rows;
  const int64_t* const* indices;  // [*num_rows]; those beyond the table give zeros
  const void* table;
  int64_t table_row_bytes;
  void* y;  // [*num_rows]
  int64_t y_row_bytes;  // from row to row
  int64_t row_bytes;    // of each
  int64_t table_rows;
};

// Adds the rows of each text to its sum, one after the other.
struct SumRowsTask : Task {
  const void* x;  // [starts[num_seqs], size]
  int64_t x_stride;
  const int32_t* starts;  // [num_seqs + 1]
  int64_t num_seqs;
  int64_t size;
  float* sums;  // [num_seqs, size]
  int64_t sums_stride;
};

// Reorders the columns of each row.
struct PermuteTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, size]
  int64_t x_stride;
  const int32_t* order;  // [size]: where each number of y is in x
  void* y;               // [*num_rows, size]
  int64_t y_stride;
  int64_t size;
};

// The largest number of each row and its first column; NaN counts as the largest.
struct LargestTask : Task {
  const int64_t* num_rows;
  const float* x;  // [*num_rows, size]
  int64_t x_stride;
  int64_t size;
  int64_t* place;  // [*num_rows]
  float* value;    // [*num_rows]
};

constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxStreams = 16;

}  // namespace pagewire
