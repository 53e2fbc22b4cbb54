// The softmax of one step: from the scores of a row to its weights, and its new maximum and total.
#pragma once

#include <float.h>

#include "attention.h"
#include "rows.h"

namespace pagewire {

constexpr float kNoMaximum = -FLT_MAX;  // finite, so that differences of maxima are numbers

// How the scores of a row are modified.
struct ScoreRule {
  float scale;
  float soft_cap;  // 0 without
  float slope;     // of ALiBi, 0 without
  int64_t first;   // the keys that the row sees, counted within the step
  int64_t end;
  int64_t position;  // the row's own, counted from the step's first key
  const float* key_scales;  // [kStep] or null
  const float* bias;  // [bias_left], at least of the keys that the row sees; or null
  int64_t bias_left;
};

// The bias of a register of keys; that of keys which the row does not see is arbitrary.
inline Floats bias_of(const ScoreRule& rule, int64_t key) {
  const int64_t left = rule.bias_left - key;
  return left > 0 ? load_some(rule.bias + key, left) : zeros();
}

inline Floats adjusted(Floats score, const ScoreRule& rule, int64_t key, Words keys) {
  score = multiply(score, broadcast(rule.scale));
  if (rule.soft_cap > 0) {
    const Floats cap = broadcast(rule.soft_cap);
    score = multiply(cap, tanh(divide(score, cap)));
  }
  if (rule.slope != 0) {
    const Words behind = broadcast_word(static_cast<int32_t>(-rule.position));
    score = multiply_add(broadcast(rule.slope), to_floats(add_words(keys, behind)), score);
  }
  if (rule.bias != nullptr) score = add(score, bias_of(rule, key));
  if (rule.first > 0 || rule.end < kStep) {
    const Mask begun = less_than(broadcast_word(static_cast<int32_t>(rule.first) - 1), keys);
    const Mask visible = both(begun, less_than(keys, broadcast_word(static_cast<int32_t>(rule.end))));
    score = select(visible, score, broadcast(-__builtin_inff()));
  }
  return score;
}

inline void store_weights(float* to, const Floats (&weights)[kStepVectors]) {
#pragma GCC unroll 8
  for (int j = 0; j < kStepVectors; ++j) store_floats(to + j * kLanes, weights[j]);
}

inline void store_weights(BFloat16* to, const Floats (&weights)[kStepVectors]) {
#pragma GCC unroll 8
  for (int j = 0; j < kStepVectors; j += 2) {
#if defined(__AVX512BF16__)
    const __m512bh pairs = _mm512_cvtne2ps_pbh(weights[j + 1], weights[j]);
    memcpy(to + j * kLanes, &pairs, sizeof(pairs));
#else
    store_rounded(to + j * kLanes, weights[j]);
    store_rounded(to + (j + 1) * kLanes, weights[j + 1]);
#endif
  }
}

// Applies the rule to the scores of a row. Returns the greatest of them, lane by lane.
inline Floats adjust(const float* scores, const ScoreRule& rule, Floats (&score)[kStepVectors]) {
  Words keys = lane_numbers();
#pragma GCC unroll 8
  for (int j = 0; j < kStepVectors; ++j) {
    score[j] = load_floats(scores + j * kLanes);
    if (rule.key_scales != nullptr) {
      score[j] = multiply(score[j], load_floats(rule.key_scales + j * kLanes));
    }
    score[j] = adjusted(score[j], rule, j * kLanes, keys);
    keys = add_words(keys, broadcast_word(kLanes));
  }
  Floats greatest = score[0];
#pragma GCC unroll 8
  for (int j = 1; j < kStepVectors; ++j) greatest = greater_of(greatest, score[j]);
  return greatest;
}

template <class Packed>
inline void store_weights_of(Floats (&score)[kStepVectors], Floats maximum, Packed* weights) {
#pragma GCC unroll 8
  for (int j = 0; j < kStepVectors; ++j) score[j] = exp(subtract(score[j], maximum));
  store_weights(weights, score);
}

// Replaces scores by weights, [kStep]. Returns the factor by which earlier sums are multiplied.
template <class Packed>
float weigh(const float* scores, const ScoreRule& rule, float& maximum, Packed* weights) {
  Floats score[kStepVectors];
  const float step_maximum = greatest_lane(adjust(scores, rule, score));
  const float before = maximum;
  maximum = step_maximum > before ? step_maximum : before;
  const Floats origin = broadcast(maximum);
  store_weights_of(score, origin, weights);
  if (maximum == before) return 1.0f;
  return first_lane(exp(subtract(broadcast(before), origin)));
}

// The next three do the same for up to `kLanes` rows. This one applies the rule in place.
inline Floats adjust_scores(float* scores, const ScoreRule& rule) {
  Floats score[kStepVectors];
  const Floats greatest = adjust(scores, rule, score);
#pragma GCC unroll 8
  for (int j = 0; j < kStepVectors; ++j) store_floats(scores + j * kLanes, score[j]);
  return greatest;
}

// Raises the maxima of rows; all of them are also written to `raised`. Returns the factors, row by row.
inline Floats raise_maxima(Floats (&greatest)[kLanes], float* maxima, int64_t num_rows,
                           float* raised) {
  transpose(greatest);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) greatest[i] = greater_of(greatest[i], greatest[i + half]);
  }
  const Floats before = load_some(maxima, num_rows);
  const Floats after = greater_of(greatest[0], before);
  store_some(maxima, after, num_rows);
  store_floats(raised, after);
  const Floats factors = exp(subtract(before, after));
  return select(not_less_than(before, after), broadcast(1.0f), factors);
}

template <class Packed>
inline void weigh_scores(const float* scores, Floats maximum, Packed* weights) {
  Floats score[kStepVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kStepVectors; ++j) score[j] = load_floats(scores + j * kLanes);
  store_weights_of(score, maximum, weights);
}

// Adds a step's weights to a row's total, lane by lane.
template <class Dot>
void add_weights(const float* weights, float factor, float* total) {
  const bool pairs = Dot::kInputsPerStep == 2;
  const typename Dot::Operand ones = Dot::broadcast(pairs ? 0x3f803f80 : 0x3f800000);
  Floats sum = multiply(load_floats(total), broadcast(factor));
#pragma GCC unroll 8
  for (int j = 0; j < kStepVectors / Dot::kInputsPerStep; ++j) {
    sum = Dot::add(ones, Dot::load(weights + j * kLanes), sum);
  }
  store_floats(total, sum);
}

// Multiplies a step's weights by the scales of their values.
inline void scale_weights(float* weights, const float* scales) {
#pragma GCC unroll 8
  for (int j = 0; j < kStepVectors; ++j) {
    float* const at = weights + j * kLanes;
    store_floats(at, multiply(load_floats(at), load_floats(scales + j * kLanes)));
  }
}

}  // namespace pagewire
