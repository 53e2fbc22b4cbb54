// The vector layer for AVX2 with FMA; see vectors.h.
#pragma once

#include "x86.h"

namespace pagewire {

using Floats = __m256;
using Words = __m256i;
constexpr int64_t kLanes = 8;

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Words load_words(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline void store_past_caches(void* to, Words x) {
  _mm256_stream_si256(static_cast<Words*>(to), x);
}
inline void store_words(void* to, Words x) { _mm256_storeu_si256(static_cast<Words*>(to), x); }
inline Words broadcast_word(int32_t x) { return _mm256_set1_epi32(x); }
inline Floats as_floats(Words x) { return _mm256_castsi256_ps(x); }
inline Words as_words(Floats x) { return _mm256_castps_si256(x); }

inline Floats first_of_pairs(Words x) { return as_floats(_mm256_slli_epi32(x, 16)); }
inline Floats second_of_pairs(Words x) {
  return as_floats(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

inline Floats widen(const BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

using Mask = __m256;

inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats square_root(Floats a) { return _mm256_sqrt_ps(a); }
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

inline float sum_lanes(Floats x) { return sum_lanes_of_8(x); }
inline float greatest_lane(Floats x) { return greatest_lane_of_8(x); }
inline float first_lane(Floats x) { return _mm256_cvtss_f32(x); }

inline Floats widen(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void store_rounded(Float16* to, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline void transpose(Floats (&x)[kLanes]) {
  Floats y[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    y[c] = _mm256_permute2f128_ps(x[c], x[c + 4], 0x20);
    y[c + 4] = _mm256_permute2f128_ps(x[c], x[c + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

inline void interleave(Words a, Words b, Floats& low, Floats& high) {
  const Words even = _mm256_unpacklo_epi16(a, b), odd = _mm256_unpackhi_epi16(a, b);
  low = as_floats(_mm256_permute2x128_si256(even, odd, 0x20));
  high = as_floats(_mm256_permute2x128_si256(even, odd, 0x31));
}

inline Words widen_to_words(const int8_t* from) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Floats widen(const int8_t* from) { return to_floats(widen_to_words(from)); }

template <int kBits>
inline Words shift_left(Words x) {
  return _mm256_slli_epi32(x, kBits);
}
template <int kBits>
inline Words shift_right(Words x) {
  return _mm256_srli_epi32(x, kBits);
}
inline Words and_words(Words a, Words b) { return _mm256_and_si256(a, b); }
inline Words or_words(Words a, Words b) { return _mm256_or_si256(a, b); }
inline Words look_up(const ByteTable& table, Words bytes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bytes);
}

inline Words look_up_or_zero(const ByteTable& table, Words bytes) { return look_up(table, bytes); }
inline Words xor_words(Words a, Words b) { return _mm256_xor_si256(a, b); }
inline Words add_bytes_saturating(Words a, Words b) { return _mm256_adds_epu8(a, b); }
inline void interleave_bytes(Words a, Words b, Words& low, Words& high) {
  low = _mm256_unpacklo_epi8(a, b);
  high = _mm256_unpackhi_epi8(a, b);
}

// As assembly, since GCC takes two instructions for it, and changes the order of additions until the
// registers do not suffice.

inline Words broadcast_word_at(const void* from) {
  using AnyWord = int32_t __attribute__((may_alias));
  Words word;
  asm("vpbroadcastd %1, %0" : "=x"(word) : "m"(*static_cast<const AnyWord*>(from)));
  return word;
}

// Add products of 16-bit numbers, two for each word.
inline void add_pairs(Words a, Words b, Words& sums) {
  Words products;
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sums), "=&x"(products)
      : "x"(a), "x"(b));
}

// Of whole numbers.

inline Words to_whole(Floats x) { return _mm256_cvtps_epi32(x); }
inline Words greater_words(Words a, Words b) { return _mm256_max_epi32(a, b); }
inline Words multiply_words(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
inline Words subtract_halves(Words a, Words b) { return _mm256_sub_epi16(a, b); }
inline Words multiply_halves(Words a, Words b) { return _mm256_mullo_epi16(a, b); }
template <int kBits>
inline Words shift_right_halves(Words x) {
  return _mm256_srli_epi16(x, kBits);
}

inline int32_t greatest_word(Words x) {
  const __m128i a = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i b = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
inline int32_t sum_of_words(Words x) {
  const __m128i a = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i b = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}

// The lower halves of the words: of four the first, the third, the second and the fourth.
inline void store_pairs(char* to, Words x) {
  const __m128i places = _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
  const Words of_fours = _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(places));
  const Words together = _mm256_permute4x64_epi64(of_fours, 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(together));
}

}  // namespace pagewire
