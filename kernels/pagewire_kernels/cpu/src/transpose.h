// A square of 32-bit words, one row in each register, turned about its diagonal.
#pragma once

#include "floats.h"

namespace pagewire {

#if defined(__AVX512F__)

// Four rounds. The first two turn each 4 x 4 square within 128 bits, the others move those squares.
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

#else

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

#endif

}  // namespace pagewire
