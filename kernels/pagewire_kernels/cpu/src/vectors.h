// Arithmetic on vector registers, for one instruction set at a time.
//
// avx512.h, avx2.h and neon.h define the same types and functions, lane by lane unless stated:
//
//   Floats, Words, Mask      registers of float32, of 32-bit words, and of conditions
//   kLanes                   numbers in a register
//   first_of_pairs, second_of_pairs  each word's lower and upper bfloat16, as float32
//   greater_of(a, b)         b if either is NaN
//   times_power_of_two(x, n) x * 2^n; n is whole and at least the smallest exponent of a normal number
//   sum_lanes, greatest_lane  over lanes, always by the same tree: halves, quarters and so on
//   store_past_caches        to an address aligned to the register's size; another thread may read
//                            it after `finish_stores_past_caches`
//   transpose(x)             a square of 32-bit words, one row in each register
//   interleave(a, b, low, high)  the 16-bit numbers of `a` and `b`, alternating
//   shift_left<bits>, shift_right<bits>  of each word, zeros come in
//   look_up(table, x)        for each byte below 16, the table's
//   look_up_or_zero(table, x)  the same of the lower four bits; 0 where the upper bit is set
//   add_bytes_saturating     of unsigned bytes
//   interleave_bytes(a, b, low, high)  the bytes of `a` and `b`, alternating: of each 128 bits, those
//                            of the first 64, and those of the others
//
// Results with NEON are those with AVX2, bit by bit, except where AVX2 multiplies whole numbers
// (quantized_dot.h).
#pragma once

#include <cstdint>
#include <cstring>

namespace pagewire {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

}  // namespace pagewire

#if defined(__aarch64__)
#include "neon.h"
#elif defined(__AVX512F__)
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace pagewire {

inline Floats widen(const float* from) { return load_floats(from); }

// Rounds to nearest, ties to even; NaN stays NaN. The corresponding vector instructions also treat
// subnormal numbers as zero, so they are used for all conversions or for none.
inline BFloat16 round_to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline void store_rounded_number(float* to, float x) { *to = x; }
inline void store_rounded_number(BFloat16* to, float x) { *to = round_to_bfloat16(x); }

inline void store_rounded(float* to, Floats x) { store_floats(to, x); }

inline void store_rounded(BFloat16* to, Floats x) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  memcpy(to, &rounded, sizeof(rounded));
#else
  alignas(64) float wide[kLanes];
  store_floats(wide, x);
  for (int64_t i = 0; i < kLanes; ++i) to[i] = round_to_bfloat16(wide[i]);
#endif
}

// e^x, within 2 ulp; 0 if it would be subnormal; NaN stays NaN. Finite for x up to 88.37.
// e^x = 2^n * e^r with |r| <= ln(2) / 2; e^r by the polynomial of expf in Cephes.
inline Floats exp(Floats x) {
  const Floats n = round_to_whole(multiply(x, broadcast(1.4426950216293335f)));
  Floats r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(0.00021219444170128554f), r);
  Floats y = broadcast(0.00019875691214110702f);
  y = multiply_add(y, r, broadcast(0.001398199936375022f));
  y = multiply_add(y, r, broadcast(0.008333452045917511f));
  y = multiply_add(y, r, broadcast(0.04166579619050026f));
  y = multiply_add(y, r, broadcast(0.1666666567325592f));
  y = multiply_add(y, r, broadcast(0.5f));
  y = multiply_add(y, multiply(r, r), add(r, broadcast(1.0f)));
  const Mask large_enough = not_less_than(x, broadcast(-87.33654022216797f));
  return select(large_enough, times_power_of_two(y, n), zeros());
}

inline Floats tanh(Floats x) {  // 1 - 2 / (e^2x + 1)
  const Floats bounded = greater_of(broadcast(-40.0f), x);
  const Floats power = exp(multiply(broadcast(-2.0f), bounded));
  const Floats one = broadcast(1.0f);
  return divide(subtract(one, power), add(one, power));
}

}  // namespace pagewire
