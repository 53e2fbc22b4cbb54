// How a row's products with codes grow, from what the row's inputs were turned into beforehand.
//
// A step is four inputs: a register of bytes has their codes, one output in each word. Codes are
// `zero` larger than what they mean, so sums begin at as much less.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace pagewire {

inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Whole numbers of `kDigits` digits of 8 bits for a group's inputs, which are rounded to multiples of a
// power of two.
template <int kDigits>
struct WholeNumbers {
  static constexpr uint32_t kInfinity = 0x7f800000;
  static constexpr int32_t kOnes = kDigits == 2 ? 0x0101 : 0x010101;  // one in every digit

  // largest: the bits of the largest magnitude; those of NaN are above infinity's.
  explicit WholeNumbers(uint32_t largest) {
    constexpr uint32_t kBits = 8 * kDigits - 2;  // of the largest whole number, less its first one
    // Digits are at most 127: there is no room for whole numbers beyond.
    constexpr uint32_t kMost = 127 * kOnes;
    constexpr uint32_t kNearPowerOfTwo = (((2u << kBits) - kMost) << (23 - kBits)) - 1;
    uint32_t exponent = (largest + kNearPowerOfTwo) >> 23;
    if (exponent < kBits + 1) exponent = kBits + 1;
    units_per_one = from_bits((254 + kBits - exponent) << 23);
    unit = from_bits((exponent - kBits) << 23) + (largest < kInfinity ? 0.0f : __builtin_nanf(""));
  }

  float units_per_one;
  float unit;  // NaN if an input is NaN or infinite
};

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define PAGEWIRE_HAS_PAIRS

// Inputs of bfloat16 as whole numbers of 15 bits and a sign, whose products with whole numbers of 16
// bits are summed exactly, two at a time. The sums are those of `DigitsDot<2>`, and so are the results.
struct PairsDot {
  static constexpr bool kIsExact = true;
  static constexpr int kRegisterRows = kLanes == 16 ? 6 : 4;
  static constexpr int64_t kTurnedBytes = 2;
  struct Operand {
    Words even, odd;  // of four inputs the first and the third, and the others
  };
  using Step = Operand;
  using Sum = Words;

  struct Inputs {
    float unit, sum;
    int32_t start;
  };

  template <class Input>
  static Inputs turn(const Input* x, int64_t num_inputs, int32_t zero, char* pairs) {
    Words most = broadcast_word(0);
    for (int64_t i = 0; i < num_inputs; i += kLanes) {
      const Words magnitude = and_words(as_words(widen(x + i)), broadcast_word(0x7fffffff));
      most = greater_words(most, magnitude);
    }
    const WholeNumbers<2> whole(static_cast<uint32_t>(greatest_word(most)));
    const Floats units_per_one = broadcast(whole.units_per_one);
    Words sums = broadcast_word(0);
    for (int64_t i = 0; i < num_inputs; i += kLanes, pairs += kLanes * kTurnedBytes) {
      const Words numbers = to_whole(multiply(widen(x + i), units_per_one));
      store_pairs(pairs, numbers);
      sums = add_words(sums, numbers);
    }
    const int32_t total = sum_of_words(sums);
    return {whole.unit, static_cast<float>(total) * whole.unit, -zero * total};
  }

  static Sum first_sum(const Inputs& inputs) { return broadcast_word(inputs.start); }
  static Sum no_sum() { return broadcast_word(0); }

  static Operand operand(Words bytes) {
    return {and_words(bytes, broadcast_word(0x00ff00ff)), shift_right_halves<8>(bytes)};
  }
  static void store(char* to, const Operand& x) {
    store_words(to, x.even);
    store_words(to + sizeof(Words), x.odd);
  }
  static Operand load(const char* from) { return {load_words(from), load_words(from + sizeof(Words))}; }

  static Step load_step(const char* turned) {
    return {broadcast_word_at(turned), broadcast_word_at(turned + 4)};
  }
  static void add(const Step& step, const Operand& weights, Sum& sum) {
    add_pairs(step.even, weights.even, sum);
    add_pairs(step.odd, weights.odd, sum);
  }

  static Words whole(Sum a, Sum b) { return add_words(a, b); }
  static Floats total(Sum a, Sum b, const Inputs& inputs) {
    return multiply(to_floats(whole(a, b)), broadcast(inputs.unit));
  }
};

#endif

#if defined(__AVX512VNNI__)

// Inputs are rounded to multiples of a power of two, so they are whole numbers of some digits of 8
// bits, whose products the processor sums exactly, four at a time. The result does not depend on the
// order. With three digits the unit is 2^-23 to 2^-22 of the group's largest input: what is rounded
// away is about what sums of float32 lose. With two it is 2^-15 to 2^-14, which numbers of bfloat16
// up to 2^-7 of the largest are multiples of, or nearly so.
template <int kNumDigits>
struct DigitsDot {
  static constexpr bool kIsExact = true;
  static constexpr int kDigits = kNumDigits;
  static constexpr int kRegisterRows = kDigits == 2 ? 6 : 4;
  static constexpr int64_t kTurnedBytes = 4;  // that an input becomes
  using Operand = Words;
  struct Sum {
    Words of_digits[kDigits];
  };

  // A row's group of inputs, turned.
  struct Inputs {
    float unit, sum;
    int32_t start[kDigits];
  };

  // `store` is called with the digits of 16 inputs after the other, four inputs in 16 bytes: their
  // first digits, their second ones and so on.
  template <class Input, class Store>
  static Inputs turn(const Input* x, int64_t num_inputs, int32_t zero, Store store) {
    // The largest magnitude as bits: NaN is above infinity, and infinity above numbers.
    Words most = broadcast_word(0);
    for (int64_t i = 0; i < num_inputs; i += kLanes) {
      const Words magnitude = and_words(as_words(widen(x + i)), broadcast_word(0x7fffffff));
      most = _mm512_max_epi32(most, magnitude);
    }
    const WholeNumbers<kDigits> whole(static_cast<uint32_t>(_mm512_reduce_max_epi32(most)));
    const Floats units_per_one = broadcast(whole.units_per_one);
    const Words bias = broadcast_word(0x80 * whole.kOnes);
    const __m128i by_digit = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    Words sums = broadcast_word(0);
    for (int64_t i = 0; i < num_inputs; i += kLanes) {
      const Words numbers = _mm512_cvtps_epi32(multiply(widen(x + i), units_per_one));
      const Words bytes = _mm512_xor_si512(add_words(numbers, bias), bias);
      const Words of_fours = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(by_digit));
      store(of_fours);
      sums = _mm512_dpbusd_epi32(sums, broadcast_word(0x01010101), of_fours);
    }
    const __m256i of_eight = _mm256_add_epi32(_mm512_castsi512_si256(sums),
                                              _mm512_extracti64x4_epi64(sums, 1));
    alignas(16) int32_t of_digits[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(of_digits),
                    _mm_add_epi32(_mm256_castsi256_si128(of_eight),
                                  _mm256_extracti128_si256(of_eight, 1)));
    Inputs turned;
    turned.unit = whole.unit;
    int32_t total = 0;
    for (int d = 0; d < kDigits; ++d) {
      turned.start[d] = -zero * of_digits[d];
      total += of_digits[d] * (1 << 8 * d);
    }
    turned.sum = static_cast<float>(total) * turned.unit;
    return turned;
  }

  template <class Input>
  static Inputs turn(const Input* x, int64_t num_inputs, int32_t zero, char* digits) {
    return turn(x, num_inputs, zero, [digits](Words of_fours) mutable {
      _mm512_storeu_si512(digits, of_fours);
      digits += kLanes * kTurnedBytes;
    });
  }

  static Sum first_sum(const Inputs& inputs) {
    Sum sum;
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) sum.of_digits[d] = broadcast_word(inputs.start[d]);
    return sum;
  }
  static Sum no_sum() { return {}; }

  static Operand operand(Words bytes) { return bytes; }
  static void store(char* to, Operand x) { _mm512_store_si512(to, x); }
  static Operand load(const char* from) { return load_words(from); }

  struct Step {
    Words of_digits[kDigits];
  };
  static Step load_step(const char* turned) {
    Step step;
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) {
      int32_t four;
      memcpy(&four, turned + 4 * d, 4);
      step.of_digits[d] = broadcast_word(four);
    }
    return step;
  }
  // As assembly, since GCC 12 copies the sums for its intrinsic.
  static void add(const Step& step, Operand weights, Sum& sum) {
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) {
      asm("vpdpbusd %2, %1, %0" : "+v"(sum.of_digits[d]) : "v"(weights), "v"(step.of_digits[d]));
    }
  }

  static inline __attribute__((always_inline)) Words whole(const Sum& a, const Sum& b) {
    static_assert(kDigits == 2, "whole numbers of 32 bits");
    const Words upper = add_words(a.of_digits[1], b.of_digits[1]);
    return add_words(add_words(a.of_digits[0], b.of_digits[0]), shift_left<8>(upper));
  }
  // GCC keeps the sums of some numbers of rows in memory, for a call, unless this is inlined.
  static inline __attribute__((always_inline)) Floats total(const Sum& a, const Sum& b,
                                                            const Inputs& inputs) {
    Sum sum;
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) sum.of_digits[d] = add_words(a.of_digits[d], b.of_digits[d]);
    Floats all = to_floats(add_words(sum.of_digits[0], shift_left<8>(sum.of_digits[1])));
    if constexpr (kDigits == 3) {
      all = multiply_add(to_floats(sum.of_digits[2]), broadcast(65536.0f), all);
    }
    return multiply(all, broadcast(inputs.unit));
  }
};

template <class Input>
using QuantizedDot = DigitsDot<std::is_same_v<Input, BFloat16> ? 2 : 3>;

#else

// Products of float32. Bytes become numbers where they are in their words, which makes them 1, 2^8 or
// 2^16 times too large; the inputs are as much smaller, and nothing is rounded by that.
struct FloatsDot {
  static constexpr bool kIsExact = false;
  static constexpr int64_t kTurnedBytes = 4;
#if defined(__AVX512F__)
  static constexpr int kRegisterRows = 6;
#elif defined(__aarch64__)
  static constexpr int kRegisterRows = 2;
#else
  static constexpr int kRegisterRows = 3;
#endif
  struct Operand {
    Floats of_inputs[4];
  };
  using Sum = Floats;

  struct Inputs {
    float sum, start;
  };

  template <class Input>
  static Inputs turn(const Input* x, int64_t num_inputs, int32_t zero, char* scaled) {
    alignas(64) float factors[kLanes];
    for (int64_t i = 0; i < kLanes; i += 4) {
      factors[i] = factors[i + 3] = 1.0f;
      factors[i + 1] = 1.0f / (1 << 8);
      factors[i + 2] = 1.0f / (1 << 16);
    }
    Floats sums = zeros();
    for (int64_t i = 0; i < num_inputs; i += kLanes) {
      const Floats values = widen(x + i);
      sums = pagewire::add(sums, values);
      store_floats(reinterpret_cast<float*>(scaled) + i, multiply(values, load_floats(factors)));
    }
    const float sum = sum_lanes(sums);
    return {sum, -static_cast<float>(zero) * sum};
  }

  static Sum first_sum(const Inputs& inputs) { return broadcast(inputs.start); }
  static Sum no_sum() { return zeros(); }

  static Operand operand(Words bytes) {
    return {to_floats(and_words(bytes, broadcast_word(0xff))),
            to_floats(and_words(bytes, broadcast_word(0xff00))),
            to_floats(and_words(bytes, broadcast_word(0xff0000))),
            to_floats(shift_right<24>(bytes))};
  }
  static void store(char* to, const Operand& x) {
    for (int i = 0; i < 4; ++i) store_floats(reinterpret_cast<float*>(to) + i * kLanes, x.of_inputs[i]);
  }
  static Operand load(const char* from) {
    const auto* floats = reinterpret_cast<const float*>(from);
    return {load_floats(floats), load_floats(floats + kLanes), load_floats(floats + 2 * kLanes),
            load_floats(floats + 3 * kLanes)};
  }

  struct Step {
    Floats of_inputs[4];
  };
  static Step load_step(const char* turned) {
    const auto* x = reinterpret_cast<const float*>(turned);
    return {broadcast(x[0]), broadcast(x[1]), broadcast(x[2]), broadcast(x[3])};
  }
  static void add(const Step& step, const Operand& weights, Sum& sum) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      sum = multiply_add(step.of_inputs[i], weights.of_inputs[i], sum);
    }
  }

  static Floats total(Sum a, Sum b, const Inputs&) { return pagewire::add(a, b); }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
template <class Input>
using QuantizedDot = std::conditional_t<std::is_same_v<Input, BFloat16>, PairsDot, FloatsDot>;
#else
template <class Input>
using QuantizedDot = FloatsDot;
#endif

#endif

}  // namespace pagewire
