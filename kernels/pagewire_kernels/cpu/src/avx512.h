// The vector layer for AVX-512; see vectors.h.
#pragma once

#include "x86.h"

namespace pagewire {

using Floats = __m512;
using Words = __m512i;
constexpr int64_t kLanes = 16;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline void store_past_caches(void* to, Words x) {
  _mm512_stream_si512(static_cast<Words*>(to), x);
}
inline void store_words(void* to, Words x) { _mm512_storeu_si512(to, x); }
inline Words broadcast_word(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words as_words(Floats x) { return _mm512_castps_si512(x); }

inline Floats first_of_pairs(Words x) { return as_floats(_mm512_slli_epi32(x, 16)); }
inline Floats second_of_pairs(Words x) {
  return as_floats(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

inline Floats widen(const BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

using Mask = __mmask16;

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats square_root(Floats a) { return _mm512_sqrt_ps(a); }
inline Floats greater_of(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats select(Mask mask, Floats a, Floats b) { return _mm512_mask_blend_ps(mask, b, a); }
inline Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
inline Mask less_than(Words a, Words b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Mask not_less_than(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline Floats to_floats(Words x) { return _mm512_cvtepi32_ps(x); }
inline Floats round_to_whole(Floats x) { return _mm512_roundscale_ps(x, 8); }
inline Floats times_power_of_two(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words lane_numbers() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline __m256 lower_half(Floats x) { return _mm512_castps512_ps256(x); }
inline __m256 upper_half(Floats x) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
inline float sum_lanes(Floats x) {
  return sum_lanes_of_8(_mm256_add_ps(lower_half(x), upper_half(x)));
}
inline float greatest_lane(Floats x) {
  return greatest_lane_of_8(_mm256_max_ps(lower_half(x), upper_half(x)));
}
inline float first_lane(Floats x) { return _mm512_cvtss_f32(x); }

inline Floats widen(const Float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline void store_rounded(Float16* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Four rounds: the first two transpose each 4 x 4 square within 128 bits, the others exchange squares.
inline void transpose(Floats (&x)[kLanes]) {
  Floats y[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  const auto low = [](Floats a, Floats b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](Floats a, Floats b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = low(y[i], y[i + 2]);
    x[i + 1] = high(y[i], y[i + 2]);
    x[i + 2] = low(y[i + 1], y[i + 3]);
    x[i + 3] = high(y[i + 1], y[i + 3]);
  }
  // x[4 * r + c] holds rows 4 * r to 4 * r + 3 of columns c, c + 4, c + 8 and c + 12.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const Floats even_low = _mm512_shuffle_f32x4(x[c], x[c + 4], 0x88);
    const Floats odd_low = _mm512_shuffle_f32x4(x[c], x[c + 4], 0xdd);
    const Floats even_high = _mm512_shuffle_f32x4(x[c + 8], x[c + 12], 0x88);
    const Floats odd_high = _mm512_shuffle_f32x4(x[c + 8], x[c + 12], 0xdd);
    y[c] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    y[c + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    y[c + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    y[c + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

inline void interleave(Words a, Words b, Floats& low, Floats& high) {
  const Words step = _mm512_set1_epi32(0x00010001);
  const Words zigzag = _mm512_add_epi32(_mm512_mullo_epi32(lane_numbers(), step),
                                        _mm512_set1_epi32(0x00200000));
  const Words later = _mm512_add_epi32(zigzag, _mm512_set1_epi32(0x00100010));
  low = as_floats(_mm512_permutex2var_epi16(a, zigzag, b));
  high = as_floats(_mm512_permutex2var_epi16(a, later, b));
}

inline Words widen_to_words(const int8_t* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Floats widen(const int8_t* from) { return to_floats(widen_to_words(from)); }

template <int kBits>
inline Words shift_left(Words x) {
  return _mm512_slli_epi32(x, kBits);
}
template <int kBits>
inline Words shift_right(Words x) {
  return _mm512_srli_epi32(x, kBits);
}
inline Words and_words(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words or_words(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Words look_up(const ByteTable& table, Words bytes) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bytes);
}

inline Words look_up_or_zero(const ByteTable& table, Words bytes) { return look_up(table, bytes); }
inline Words xor_words(Words a, Words b) { return _mm512_xor_si512(a, b); }
inline Words add_bytes_saturating(Words a, Words b) { return _mm512_adds_epu8(a, b); }
inline void interleave_bytes(Words a, Words b, Words& low, Words& high) {
  low = _mm512_unpacklo_epi8(a, b);
  high = _mm512_unpackhi_epi8(a, b);
}

// Of whole numbers, as in avx2.h.

inline Words to_whole(Floats x) { return _mm512_cvtps_epi32(x); }
inline Words greater_words(Words a, Words b) { return _mm512_max_epi32(a, b); }
inline Words multiply_words(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words subtract_halves(Words a, Words b) { return _mm512_sub_epi16(a, b); }
inline Words multiply_halves(Words a, Words b) { return _mm512_mullo_epi16(a, b); }
template <int kBits>
inline Words shift_right_halves(Words x) {
  return _mm512_srli_epi16(x, kBits);
}
inline int32_t greatest_word(Words x) { return _mm512_reduce_max_epi32(x); }
inline int32_t sum_of_words(Words x) { return _mm512_reduce_add_epi32(x); }

inline Words broadcast_word_at(const void* from) {
  int32_t word;
  memcpy(&word, from, sizeof(word));
  return broadcast_word(word);
}

#if defined(__AVX512VNNI__)
// As assembly, since GCC 12 copies the sums for its intrinsic.
inline void add_pairs(Words a, Words b, Words& sums) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}
#endif

inline void store_pairs(char* to, Words x) {
  const __m128i places = _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
  const Words of_fours = _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(places));
  const Words together = _mm512_maskz_compress_epi64(0x55, of_fours);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(together));
}

}  // namespace pagewire
