// More arithmetic on registers of float32: lane by lane, over lanes, and with masks.
#pragma once

#include "intrinsics.h"

#include "floats.h"

namespace pagewire {

struct Float16 {
  uint16_t bits;
};

#if defined(__AVX512F__)

using Mask = __mmask16;

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
// b where either is NaN.
inline Floats greater_of(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats select(Mask mask, Floats a, Floats b) { return _mm512_mask_blend_ps(mask, b, a); }
inline Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
inline Mask less_than(Words a, Words b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Mask not_less_than(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline Floats to_floats(Words x) { return _mm512_cvtepi32_ps(x); }
inline Floats round_to_whole(Floats x) { return _mm512_roundscale_ps(x, 8); }
// x * 2^n, n whole and no less than the least exponent of a normal number.
inline Floats times_power_of_two(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words lane_numbers() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline __m256 lower_half(Floats x) { return _mm512_castps512_ps256(x); }
inline __m256 upper_half(Floats x) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
inline __m256 added_halves(Floats x) { return _mm256_add_ps(lower_half(x), upper_half(x)); }
inline __m256 greater_halves(Floats x) { return _mm256_max_ps(lower_half(x), upper_half(x)); }

inline Floats widen(const Float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline void store_rounded(Float16* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

using Mask = __m256;

inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats greater_of(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats select(Mask mask, Floats a, Floats b) { return _mm256_blendv_ps(b, a, mask); }
inline Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
inline Mask less_than(Words a, Words b) { return as_floats(_mm256_cmpgt_epi32(b, a)); }
inline Mask not_less_than(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }
inline Floats to_floats(Words x) { return _mm256_cvtepi32_ps(x); }
inline Floats round_to_whole(Floats x) { return _mm256_round_ps(x, 8); }
inline Floats times_power_of_two(Floats x, Floats n) {
  const Words exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, as_floats(_mm256_slli_epi32(exponent, 23)));
}
inline Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

inline __m256 added_halves(Floats x) { return x; }
inline __m256 greater_halves(Floats x) { return x; }

inline Floats widen(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void store_rounded(Float16* to, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#endif

// Over lanes: halves, quarters and so on, always the same tree.

inline float sum_lanes(Floats x) {
  const __m256 a = added_halves(x);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

inline float greatest_lane(Floats x) {
  const __m256 a = greater_halves(x);
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

inline float first_lane(Floats x) {
#if defined(__AVX512F__)
  return _mm512_cvtss_f32(x);
#else
  return _mm256_cvtss_f32(x);
#endif
}

// e^x, within 2 ulp; 0 where it would be less than the least normal number; NaN stays NaN. Finite
// for any x up to 88.37. e^x = 2^n * e^r with |r| <= ln(2) / 2; e^r by the polynomial of Cephes'
// expf.
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
