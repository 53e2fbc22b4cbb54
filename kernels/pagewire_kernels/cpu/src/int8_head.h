// A key or value of one token and KV head in int8: head_dim codes, then their scale, a float32.
// An element is code * scale; the scale is chosen so that the element with the largest magnitude has
// the code 127 or -127.
#pragma once

#include <cfloat>

#include "rows.h"

namespace pagewire {

constexpr int64_t kScaleBytes = sizeof(float);

inline float load_scale(const char* head, int64_t head_dim) {
  float scale;
  memcpy(&scale, head + head_dim, sizeof(scale));
  return scale;
}

// Rounds to nearest, ties to even. The scale is NaN if a number is not finite, and 0 if it would be
// subnormal.
template <class Number>
inline void store_int8_head(const Number* from, int64_t head_dim, char* to) {
  Floats greatest = zeros(), nothing = zeros();
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const Floats x = load_some(from + i, head_dim - i);
    greatest = greater_of(greatest, greater_of(x, subtract(zeros(), x)));
    nothing = add(nothing, subtract(x, x));  // NaN for what is not finite, which a maximum loses
  }
  float scale = greatest_lane(greatest) / 127.0f;
  if (sum_lanes(nothing) != 0.0f) scale = __builtin_nanf("");
  if (scale < FLT_MIN) scale = 0.0f;
  memset(to, 0, head_dim);
  memcpy(to + head_dim, &scale, sizeof(scale));
  if (!(scale > 0.0f)) return;
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    alignas(64) float whole[kLanes];
    store_floats(whole, round_to_whole(divide(load_some(from + i, head_dim - i), broadcast(scale))));
    int8_t codes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) codes[lane] = static_cast<int8_t>(whole[lane]);
    memcpy(to + i, codes, head_dim - i < kLanes ? head_dim - i : kLanes);
  }
}

}  // namespace pagewire
