// Mixture of experts: a row's output is the weighted sum of the outputs of a few of many MLPs, most with gates.
//
// The first task chooses the experts of each row, and sorts the pairs of row and expert by expert, then
// by row: a pair's place in this order is its slot. Then two products compute the slots of each expert,
// as a linear layer does, and the last task adds up the slots of each row, in the order of experts.
// So a row has the same bits in any batch. How many rows an expert has differs between steps: a program
// that was recorded once finds the numbers in the plan.
#pragma once

#include "linear.h"

namespace pagewire {

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxChosen = 64;  // experts of a row

// What the first task writes, for the others. A thread that lost its core in the middle of an item may
// read `rows` after later steps have changed them (share.h): this memory is never used for anything
// else, so that they are rows always.
struct ExpertPlan {
  int64_t num_active;  // experts with rows
  int32_t* active;     // [num_experts]: the active ones, in order
  int32_t* starts;     // [num_experts + 1]: the first slot of each active one, and the number of slots
  int32_t* rows;       // [max_rows * num_chosen]: the row of each slot
  int32_t* slots;      // [max_rows, num_chosen]: of each row, in the order of experts; -1: of zero experts
  float* weights;      // as `slots`
};

enum Scoring : int64_t { kSoftmax, kSigmoid, kSoftmaxOfChosen, kSigmoidOfChosen, kSparseMixer };

struct RouteTask : Task {
  int64_t num_done;  // rows whose experts are chosen; 0 before the task runs
  const int64_t* num_rows;
  const float* logits;  // [*num_rows, num_experts]
  int64_t logits_stride;
  const float* bias;  // [num_experts], which is added to scores for the choice alone; or null
  const float* factors;  // [num_experts], of the weights at the end; or null
  ExpertPlan* plan;
  int64_t num_experts;
  int64_t num_zero_experts;  // the last ones, which return their inputs, and have no slots
  int64_t num_chosen;
  Scoring scoring;
  int64_t normalizes;  // whether weights are divided by their sum
  int64_t num_groups;  // of experts; only those in the best `num_chosen_groups` are chosen
  int64_t num_chosen_groups;
  int64_t num_best;  // experts, 1 or 2, whose scores are a group's
  float nearness;  // of logits, for kSparseMixer
  float epsilon;  // is added to the sum of weights
  float min_sum;
  float scale;  // by which weights are multiplied at the end
};

// The parameters of `ClampedSilu` in activation.h are after those of the product.
struct ExpertsTask : LinearTask {
  int64_t expert_bytes;  // from one expert's weight to the next
  const ExpertPlan* plan;
  int64_t gathers;  // whether x has the rows of a step, and not those of slots
  int64_t num_experts;  // `deltas` has as many weights in each slot of adapters
  ClampedSilu clamped;
};

// The products of the slots of experts with A of the adapters of their rows, as `AdapterTask`.
struct ExpertAdapterTask : AdapterTask {
  const ExpertPlan* plan;
  int64_t gathers;
  int64_t num_experts;
};

// Multiplies the rows of slots by their weights: y[slot] = x[row] * weight.
struct ScatterTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, size]
  int64_t x_stride;
  const ExpertPlan* plan;
  int64_t num_chosen;
  void* y;  // [slots, size]
  int64_t y_stride;
  int64_t size;
};

struct CombineTask : Task {
  const int64_t* num_rows;
  const float* x;  // [slots, size]
  int64_t x_stride;
  const ExpertPlan* plan;
  int64_t num_chosen;
  const void* shared;  // [*num_rows, size], which is added at the end; or null
  int64_t shared_stride;
  const float* gate;  // [*num_rows]: shared rows are multiplied by its sigmoid; or null
  int64_t gate_stride;
  const void* zero;  // [*num_rows, size]: the outputs of zero experts; null: they are not added
  int64_t zero_stride;
  void* y;  // [*num_rows, size]
  int64_t y_stride;
  int64_t size;
  int64_t is_weighted;  // otherwise all weights are 1
};

}  // namespace pagewire
