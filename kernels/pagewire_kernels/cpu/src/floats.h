// A vector register of float32 numbers, as wide as the instruction set has them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pagewire {

struct BFloat16 {
  uint16_t bits;
};

#if defined(__AVX512F__)

using Floats = __m512;
using Words = __m512i;  // lanes of 32 bits
constexpr int64_t kLanes = 16;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline void store_past_caches(void* to, Words x) {  // aligned to their size
  _mm512_stream_si512(static_cast<Words*>(to), x);
}
inline Words broadcast_word(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words as_words(Floats x) { return _mm512_castps_si512(x); }

// Of each lane's two bfloat16 numbers the first (lower) and the second, as float32.
inline Floats first_of_pairs(Words x) { return as_floats(_mm512_slli_epi32(x, 16)); }
inline Floats second_of_pairs(Words x) {
  return as_floats(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

inline Floats widen(const BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

#else

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

#endif

// Before another thread reads what was stored so.
inline void finish_stores_past_caches() { _mm_sfence(); }

inline Floats widen(const float* from) { return load_floats(from); }

// To the nearest, ties to even; a NaN stays one. The vector instructions that do the same also
// take numbers below the smallest normal one for zero, so they are used for all or for none.
inline BFloat16 round_to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

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

}  // namespace pagewire
