// The vector layer for NEON, Arm's vector instructions; see vectors.h.
//
// A pair of 128-bit registers serves as one of eight lanes, so that a step of a panel (linear.h)
// fills a cache line.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace pagewire {

struct Floats {
  float32x4_t low, high;
};
struct Words {
  int32x4_t low, high;
};
struct Mask {
  uint32x4_t low, high;
};
constexpr int64_t kLanes = 8;

inline Floats broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Floats zeros() { return broadcast(0.0f); }
inline Floats load_floats(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
inline void store_floats(float* to, Floats x) {
  vst1q_f32(to, x.low);
  vst1q_f32(to + 4, x.high);
}

inline Floats add(Floats a, Floats b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Floats subtract(Floats a, Floats b) {
  return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
}
inline Floats multiply(Floats a, Floats b) {
  return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}
inline Floats divide(Floats a, Floats b) {
  return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)};
}
inline Floats square_root(Floats a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
inline Floats multiply_add(Floats a, Floats b, Floats sum) {
  return {vfmaq_f32(sum.low, a.low, b.low), vfmaq_f32(sum.high, a.high, b.high)};
}

inline Words broadcast_word(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Words add_words(Words a, Words b) {
  return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)};
}
inline Words lane_numbers() {
  const int32x4_t first = {0, 1, 2, 3};
  return {first, vaddq_s32(first, vdupq_n_s32(4))};
}
inline Words load_words(const void* from) {
  const auto* bytes = static_cast<const int8_t*>(from);
  return {vreinterpretq_s32_s8(vld1q_s8(bytes)), vreinterpretq_s32_s8(vld1q_s8(bytes + 16))};
}
inline void store_words(void* to, Words x) {
  auto* bytes = static_cast<int8_t*>(to);
  vst1q_s8(bytes, vreinterpretq_s8_s32(x.low));
  vst1q_s8(bytes + 16, vreinterpretq_s8_s32(x.high));
}
// GCC has no intrinsic for NEON stores that bypass the caches.
inline void store_past_caches(void* to, Words x) { store_words(to, x); }
inline void finish_stores_past_caches() {}

inline Floats as_floats(Words x) {
  return {vreinterpretq_f32_s32(x.low), vreinterpretq_f32_s32(x.high)};
}
inline Words as_words(Floats x) {
  return {vreinterpretq_s32_f32(x.low), vreinterpretq_s32_f32(x.high)};
}
inline Floats to_floats(Words x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }

inline Floats first_of_pairs(Words x) {
  return as_floats({vshlq_n_s32(x.low, 16), vshlq_n_s32(x.high, 16)});
}
inline Floats second_of_pairs(Words x) {
  const int32x4_t mask = vdupq_n_s32(static_cast<int32_t>(0xffff0000u));
  return as_floats({vandq_s32(x.low, mask), vandq_s32(x.high, mask)});
}

inline float32x4_t greater_of(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
inline Floats greater_of(Floats a, Floats b) {
  return {greater_of(a.low, b.low), greater_of(a.high, b.high)};
}
inline Floats select(Mask mask, Floats a, Floats b) {
  return {vbslq_f32(mask.low, a.low, b.low), vbslq_f32(mask.high, a.high, b.high)};
}
inline Mask both(Mask a, Mask b) { return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }
inline Mask less_than(Words a, Words b) {
  return {vcltq_s32(a.low, b.low), vcltq_s32(a.high, b.high)};
}
inline Mask not_less_than(Floats a, Floats b) {
  return {vmvnq_u32(vcltq_f32(a.low, b.low)), vmvnq_u32(vcltq_f32(a.high, b.high))};
}

inline Floats round_to_whole(Floats x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
inline float32x4_t power_of_two(float32x4_t n) {
  const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
}
inline Floats times_power_of_two(Floats x, Floats n) {
  return multiply(x, {power_of_two(n.low), power_of_two(n.high)});
}

inline float sum_lanes(Floats x) {
  const float32x4_t quarters = vaddq_f32(x.low, x.high);
  const float32x2_t pair = vadd_f32(vget_low_f32(quarters), vget_high_f32(quarters));
  return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
inline float greatest_lane(Floats x) {
  const float32x4_t a = greater_of(x.low, x.high);
  const float32x4_t b = greater_of(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(greater_of(b, vextq_f32(b, b, 1)), 0);
}
inline float first_lane(Floats x) { return vgetq_lane_f32(x.low, 0); }

inline Floats widen(const BFloat16* from) {
  const uint16x8_t bits = vld1q_u16(reinterpret_cast<const uint16_t*>(from));
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
          vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(bits), 16))};
}
inline Floats widen(const Float16* from) {
  const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(from)));
  return {vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x))};
}
inline void store_rounded(Float16* to, Floats x) {
  const float16x8_t rounded = vcombine_f16(vcvt_f16_f32(x.low), vcvt_f16_f32(x.high));
  vst1q_u16(reinterpret_cast<uint16_t*>(to), vreinterpretq_u16_f16(rounded));
}

inline void transpose_square(float32x4_t (&x)[4]) {
  const auto as_pairs = [](float32x4_t words) { return vreinterpretq_f64_f32(words); };
  const float64x2_t even_top = as_pairs(vtrn1q_f32(x[0], x[1]));
  const float64x2_t odd_top = as_pairs(vtrn2q_f32(x[0], x[1]));
  const float64x2_t even_bottom = as_pairs(vtrn1q_f32(x[2], x[3]));
  const float64x2_t odd_bottom = as_pairs(vtrn2q_f32(x[2], x[3]));
  x[0] = vreinterpretq_f32_f64(vtrn1q_f64(even_top, even_bottom));
  x[1] = vreinterpretq_f32_f64(vtrn1q_f64(odd_top, odd_bottom));
  x[2] = vreinterpretq_f32_f64(vtrn2q_f64(even_top, even_bottom));
  x[3] = vreinterpretq_f32_f64(vtrn2q_f64(odd_top, odd_bottom));
}

inline void transpose(Floats (&x)[kLanes]) {
  float32x4_t top_left[4], top_right[4], bottom_left[4], bottom_right[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    top_left[i] = x[i].low;
    top_right[i] = x[i].high;
    bottom_left[i] = x[i + 4].low;
    bottom_right[i] = x[i + 4].high;
  }
  transpose_square(top_left);
  transpose_square(top_right);
  transpose_square(bottom_left);
  transpose_square(bottom_right);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = {top_left[i], bottom_left[i]};
    x[i + 4] = {top_right[i], bottom_right[i]};
  }
}

inline void interleave(Words a, Words b, Floats& low, Floats& high) {
  const auto zip = [](int32x4_t first, int32x4_t second) -> Floats {
    const uint16x8_t x = vreinterpretq_u16_s32(first), y = vreinterpretq_u16_s32(second);
    return {vreinterpretq_f32_u16(vzip1q_u16(x, y)), vreinterpretq_f32_u16(vzip2q_u16(x, y))};
  };
  low = zip(a.low, b.low);
  high = zip(a.high, b.high);
}

inline Floats widen(const int8_t* from) {
  const int16x8_t wide = vmovl_s8(vld1_s8(from));
  return to_floats({vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide)});
}

using ByteTable = uint8x16_t;

inline ByteTable load_table(const uint8_t* values) { return vld1q_u8(values); }

template <int kBits>
inline int32x4_t shift_left(int32x4_t x) {
  return kBits == 0 ? x : vshlq_n_s32(x, kBits);
}
template <int kBits>
inline Words shift_left(Words x) {
  return {shift_left<kBits>(x.low), shift_left<kBits>(x.high)};
}
template <int kBits>
inline int32x4_t shift_right(int32x4_t x) {
  if constexpr (kBits == 0) return x;
  else return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), kBits));
}
template <int kBits>
inline Words shift_right(Words x) {
  return {shift_right<kBits>(x.low), shift_right<kBits>(x.high)};
}
inline Words and_words(Words a, Words b) {
  return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)};
}
inline Words or_words(Words a, Words b) {
  return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)};
}
inline int32x4_t look_up(const ByteTable& table, int32x4_t bytes) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(table, vreinterpretq_u8_s32(bytes)));
}
inline Words look_up(const ByteTable& table, Words bytes) {
  return {look_up(table, bytes.low), look_up(table, bytes.high)};
}

inline Words look_up_or_zero(const ByteTable& table, Words bytes) {
  return look_up(table, and_words(bytes, broadcast_word(static_cast<int32_t>(0x8f8f8f8fu))));
}
inline Words xor_words(Words a, Words b) {
  return {veorq_s32(a.low, b.low), veorq_s32(a.high, b.high)};
}
inline int32x4_t add_bytes_saturating(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_u8(vqaddq_u8(vreinterpretq_u8_s32(a), vreinterpretq_u8_s32(b)));
}
inline Words add_bytes_saturating(Words a, Words b) {
  return {add_bytes_saturating(a.low, b.low), add_bytes_saturating(a.high, b.high)};
}
inline void interleave_bytes(int32x4_t a, int32x4_t b, int32x4_t& low, int32x4_t& high) {
  const int8x16_t x = vreinterpretq_s8_s32(a), y = vreinterpretq_s8_s32(b);
  low = vreinterpretq_s32_s8(vzip1q_s8(x, y));
  high = vreinterpretq_s32_s8(vzip2q_s8(x, y));
}
inline void interleave_bytes(Words a, Words b, Words& low, Words& high) {
  interleave_bytes(a.low, b.low, low.low, high.low);
  interleave_bytes(a.high, b.high, low.high, high.high);
}
}  // namespace pagewire
