// Layers with a state: causal convolutions and Mamba; `reference/states.py` defines them. Tokens are
// computed one after the other, each from the state before it, so that a token's result is the same in
// any step. A work item is a few channels of one sequence, whose state stays in the first-level cache
// for all rows of the step.
#pragma once

#include "batch.h"
#include "team.h"

namespace pagewire {

// Where one part of a layer's state is: `StateUnits` in batch.py. Lengths are in elements of the part.
struct StateUnits {
  void* pages;
  int64_t page_stride;
  const int64_t* places;  // [num_units, 2]: a column of the block table, the first element in the page
  int64_t num_units;
};

struct ConvolutionTask : Task {
  int64_t num_threads;
  const Batch* batch;
  StateUnits units;  // [width - 1, channels_per_unit] each, of the type of the rows
  const void* x;     // [num_rows, num_channels]
  int64_t x_stride;
  void* y;  // [num_rows, num_channels]
  int64_t y_stride;
  const float* weight;  // [width, num_channels]
  const float* bias;    // [num_channels] or null
  int64_t num_channels;
  int64_t width;
  int64_t has_silu;
};

struct Mamba1Task : Task {
  int64_t num_threads;
  const Batch* batch;
  StateUnits units;  // float32 [state_size, channels_per_unit] each
  const void* x;     // [num_rows, num_channels], as dt, gate and y
  int64_t x_stride;
  const void* dt;
  int64_t dt_stride;
  const void* b;  // [num_rows, state_size], as c
  int64_t b_stride;
  const void* c;
  int64_t c_stride;
  const void* gate;  // or null
  int64_t gate_stride;
  void* y;
  int64_t y_stride;
  const float* a;        // [state_size, num_channels]
  const float* d;        // [num_channels]
  const float* dt_bias;  // [num_channels]
  int64_t num_channels;
  int64_t state_size;
};

struct Mamba2Task : Task {
  int64_t num_threads;
  const Batch* batch;
  StateUnits units;  // float32 [state_size, head_dim] each, one per head
  const void* x;     // [num_rows, num_heads, head_dim], as y
  int64_t x_stride, x_head_stride;
  const void* dt;  // [num_rows, num_heads]
  int64_t dt_stride;
  const void* b;  // [num_rows, num_groups, state_size], as c
  int64_t b_stride, b_group_stride;
  const void* c;
  int64_t c_stride, c_group_stride;
  const void* gate;  // as x, or null
  int64_t gate_stride, gate_head_stride;
  void* y;
  int64_t y_stride, y_head_stride;
  const float* a;        // [num_heads], as d and dt_bias
  const float* d;
  const float* dt_bias;
  int64_t num_heads;
  int64_t heads_per_group;
  int64_t head_dim;
  int64_t state_size;
  float min_dt, max_dt;
};

// The gated delta rule. With k and q normalized to length 1, and q divided by the square root of its size,
// a state s becomes d * s + beta_scale * sigmoid(beta) * k (v - k d * s), of which the result is the product with q.
struct DeltaTask : Task {
  int64_t num_threads;
  const Batch* batch;
  StateUnits units;   // float32 [key_dim, value_dim] each, one per head
  const void* query;  // [num_rows, num_heads / heads_per_key, key_dim], as key
  int64_t query_stride, query_head_stride;
  const void* key;
  int64_t key_stride, key_head_stride;
  const void* value;  // [num_rows, num_heads, value_dim], as y
  int64_t value_stride, value_head_stride;
  // [num_rows, num_heads, decay_width]. With t = decay + dt_bias and r = exp(a_log), d is exp(-r * softplus(t)), or
  // with a bound below 0 exp(bound * sigmoid(r * t)).
  const void* decay;
  int64_t decay_stride, decay_head_stride;
  const void* beta;  // [num_rows, num_heads], before the sigmoid
  int64_t beta_stride;
  void* y;
  int64_t y_stride, y_head_stride;
  const float* a_log;    // [num_heads]
  const float* dt_bias;  // [num_heads, decay_width]
  int64_t num_heads;
  int64_t heads_per_key;
  int64_t key_dim;
  int64_t value_dim;
  int64_t decay_width;  // 1, or key_dim: one for each element of keys
  float beta_scale;
  float decay_bound;
};

// The real-gated linear recurrent unit: with d = exp(rate * sigmoid(decay_gate + decay_bias)), a state s, which
// is also the result, becomes d * s + sqrt(1 - d^2) * sigmoid(input_gate + input_bias) * x.
struct RglruTask : Task {
  int64_t num_threads;
  const Batch* batch;
  StateUnits units;  // float32 [channels_per_unit] each
  const void* x;     // [num_rows, num_channels], as the gates and y
  int64_t x_stride;
  const void* input_gate;
  int64_t input_gate_stride;
  const void* decay_gate;
  int64_t decay_gate_stride;
  void* y;
  int64_t y_stride;
  const float* input_bias;  // [num_channels], as decay_bias and rate
  const float* decay_bias;
  const float* rate;
  int64_t num_channels;
};

// norm(x * silu(gate)) * weight, or norm(x) * weight * silu(gate), by groups of elements; or with the
// sigmoid of the gate.
struct GatedNormTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, num_groups, group_size], as gate and y
  int64_t x_stride, x_group_stride;
  const void* gate;
  int64_t gate_stride, gate_group_stride;
  const void* weight;  // [num_groups, group_size], or [group_size]
  int64_t weight_group_stride;  // 0 if all groups have one weight
  int64_t has_float_weight;  // whether it is float32, whatever the rows are
  void* y;
  int64_t y_stride, y_group_stride;
  int64_t num_groups;
  int64_t group_size;
  int64_t gates_first;
  int64_t has_sigmoid;
  float eps;
};

constexpr int64_t kMaxConvolutionWidth = 8;
constexpr int64_t kMaxStateSize = 256;

}  // namespace pagewire
