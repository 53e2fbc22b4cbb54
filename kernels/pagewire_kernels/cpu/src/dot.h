// How the products of a linear layer are summed, for each type of inputs. A step multiplies one or two
// inputs of a row by the same inputs of several outputs' weights, 32 bits each, and adds the products
// to the sums of the outputs. A sum always consists of the same additions in the same order, whatever
// else is in the batch, so that results are batch-invariant.
#pragma once

#include <type_traits>

#include "vectors.h"

// Before a loop over sums in registers: an array that is indexed by variables would be in memory.
#define PAGEWIRE_UNROLL _Pragma("GCC unroll 16")

namespace pagewire {

struct Float32Dot {
  using Input = float;
  static constexpr int64_t kInputsPerStep = 1;
#if defined(__AVX512F__)
  static constexpr int kMaxRows = 12;  // 2 registers of sums each, of 32; the rest for operands
#elif defined(__aarch64__)
  static constexpr int kMaxRows = 5;  // 4 registers each, of 32
#else
  static constexpr int kMaxRows = 6;  // 2 registers each, of 16
#endif

  using Operand = Floats;
  static Operand load(const void* weights) {
    return load_floats(static_cast<const float*>(weights));
  }
  static Operand operand(Floats units) { return units; }
  static Operand broadcast(int32_t input) { return as_floats(broadcast_word(input)); }
  static Floats add(Operand row, Operand weights, Floats sum) {
    return multiply_add(row, weights, sum);
  }
};

struct BFloat16Dot {
  using Input = BFloat16;
  static constexpr int64_t kInputsPerStep = 2;

#if defined(__AVX512BF16__)
  static constexpr int kMaxRows = 12;
  using Operand = Words;
  static Operand load(const void* weights) { return load_words(weights); }
  static Operand operand(Floats units) { return as_words(units); }
  static Operand broadcast(int32_t inputs) { return broadcast_word(inputs); }
  static Floats add(Operand row, Operand weights, Floats sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(row),
                            reinterpret_cast<__m512bh>(weights));
  }
#else
#if defined(__AVX512F__)
  static constexpr int kMaxRows = 12;
#else
  static constexpr int kMaxRows = 4;
#endif
  struct Operand {
    Floats first, second;
  };
  static Operand load(const void* weights) { return split(load_words(weights)); }
  static Operand operand(Floats units) { return split(as_words(units)); }
  static Operand broadcast(int32_t inputs) { return split(broadcast_word(inputs)); }
  static Operand split(Words pairs) { return {first_of_pairs(pairs), second_of_pairs(pairs)}; }
  static Floats add(const Operand& row, const Operand& weights, Floats sum) {
    sum = multiply_add(row.first, weights.first, sum);
    return multiply_add(row.second, weights.second, sum);
  }
#endif
};

template <class Input>
using DotOf = std::conditional_t<std::is_same_v<Input, float>, Float32Dot, BFloat16Dot>;

}  // namespace pagewire
