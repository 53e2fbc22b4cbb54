// The common parts of the vector layers for AVX2 and AVX-512.
#pragma once

// GCC 12 warns that its intrinsics' undefined operands are used uninitialized (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>

#include <cstdint>

namespace pagewire {

inline void finish_stores_past_caches() { _mm_sfence(); }

// Adds halves, quarters and so on, always in the same tree.

inline float sum_lanes_of_8(__m256 a) {
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

inline float greatest_lane_of_8(__m256 a) {
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

using ByteTable = __m128i;

inline ByteTable load_table(const uint8_t* values) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
}

}  // namespace pagewire
