// Weights in fewer bits, packed and unpacked.
//
// A weight is value(code) * scale + offset, where scale and offset are those of a group of inputs.
// It is packed in panels as dense weights are (linear.h); a panel has, for each group,
//
//   scales[kPanel]   float16 or float32
//   offsets[kPanel]  the same, if there are any
//   codes[group_size / Codes::kInputsPerWord][kPanel] words of 32 bits
//
// so that it is read once, from its beginning to its end. Of a word's inputs, the even ones are in
// the lower half and the odd ones in the upper half, which suits steps of pairs and single steps.
#pragma once

#include <utility>

#include "linear.h"

namespace pagewire {

// Where input `i` of a word begins.
constexpr int bit_of(int i, int bits) { return i % 2 * 16 + i / 2 * bits; }

// Four bits, with a table of their values.
struct Codes4 {
  static constexpr int kBits = 4;
  static constexpr int64_t kInputsPerWord = 8;
  using Table = CodeTable;

  static float value(uint32_t code, const int8_t* table) { return table[code]; }

  Codes4(const char* words, const Table& table) : codes(load_words(words)), table(table) {}

  // The weights of a step, as `Dot` takes them.
  template <class Dot, int kStep>
  typename Dot::Operand operand() const {
    if constexpr (Dot::kInputsPerStep == 1) {
      return look_up<bit_of(kStep, kBits)>(codes, table);
    } else {
#if defined(__AVX512BF16__)
      return look_up_pair<kStep * kBits>(codes, table);
#else
      return {look_up<bit_of(2 * kStep, kBits)>(codes, table),
              look_up<bit_of(2 * kStep + 1, kBits)>(codes, table)};
#endif
    }
  }

  Words codes;
  const Table& table;
};

// Eight bits: whole numbers from -128 to 127.
struct Codes8 {
  static constexpr int kBits = 8;
  static constexpr int64_t kInputsPerWord = 4;
  using Table = CodeTable;

  static float value(uint32_t code, const int8_t*) { return static_cast<int8_t>(code); }

  Codes8(const char* words, const Table&) : codes(load_words(words)) {}

  template <class Dot, int kStep>
  typename Dot::Operand operand() const {
    if constexpr (Dot::kInputsPerStep == 1) {
      return signed_byte<bit_of(kStep, kBits)>(codes);
    } else {
      const Floats first = signed_byte<bit_of(2 * kStep, kBits)>(codes);
      const Floats second = signed_byte<bit_of(2 * kStep + 1, kBits)>(codes);
#if defined(__AVX512BF16__)
      return join_pairs(first, second);
#else
      return {first, second};
#endif
    }
  }

  Words codes;
};

// A group's bytes in a panel.
template <class Codes>
struct GroupLayout {
  explicit GroupLayout(const Quantization& quantization)
      : num_words(quantization.group_size / Codes::kInputsPerWord),
        scale_bytes(kPanel * (quantization.wide_scales ? 4 : 2)),
        codes_at(scale_bytes * (quantization.has_offsets ? 2 : 1)),
        bytes(codes_at + num_words * kStepBytes) {}

  const int64_t num_words, scale_bytes, codes_at, bytes;
};

}  // namespace pagewire
