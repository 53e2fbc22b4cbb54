// Weights in fewer bits, packed and unpacked.
//
// A weight is value(code) * scale + offset, where scale and offset are those of a group of inputs.
// It is packed in panels as dense weights are (linear.h); a panel has, for each group,
//
//   scales[kPanel]   float32, float16, or int8 numbers of units
//   offsets[kPanel]  the same, if there are any
//   codes[group_size / Codes::kInputsPerWord][kPanel] words of 32 bits
//
// and before the first of the groups that share units, these: float16 [kPanel], of scales, then of
// offsets. So a panel is read once, from its beginning to its end. Of a word's inputs, the even ones are in
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

// The scales or the offsets of a group's outputs.
struct Scales {
  // Of output `first` and those after it.
  Floats load(int64_t first) const {
    if (number_bytes == 4) return widen(reinterpret_cast<const float*>(numbers) + first);
    if (number_bytes == 2) return widen(reinterpret_cast<const Float16*>(numbers) + first);
    const Floats unit = widen(reinterpret_cast<const Float16*>(units) + first);
    return multiply(widen(reinterpret_cast<const int8_t*>(numbers) + first), unit);
  }

  const char* numbers;  // null of offsets that a weight does not have
  const char* units;
  int64_t number_bytes;
};

struct Group {
  const char* codes;
  Scales scales, offsets;
};

// Where a panel's groups are.
template <class Codes>
struct GroupLayout {
  GroupLayout(const Quantization& q, int64_t in_features)
      : num_words(q.group_size / Codes::kInputsPerWord),
        num_groups(in_features / q.group_size),
        groups_per_unit(q.unit_groups ? q.unit_groups : num_groups),
        number_bytes(q.scale_bytes),
        offsets_at(q.has_offsets ? kPanel * q.scale_bytes : 0),
        codes_at(kPanel * q.scale_bytes * (q.has_offsets ? 2 : 1)),
        group_bytes(codes_at + num_words * kStepBytes),
        units_bytes(q.unit_groups ? kPanel * 2 * (q.has_offsets ? 2 : 1) : 0),
        panel_bytes(num_groups * group_bytes + num_groups / groups_per_unit * units_bytes) {}

  Group at(const char* panel, int64_t g) const {
    const int64_t unit = g / groups_per_unit;
    const char* units = panel + unit * (groups_per_unit * group_bytes + units_bytes);
    const char* group = units + units_bytes + g % groups_per_unit * group_bytes;
    const char* offsets = offsets_at ? group + offsets_at : nullptr;
    return {group + codes_at,
            {group, units, number_bytes},
            {offsets, units + kPanel * 2, number_bytes}};
  }

  const int64_t num_words, num_groups, groups_per_unit, number_bytes, offsets_at, codes_at;
  const int64_t group_bytes, units_bytes, panel_bytes;
};

}  // namespace pagewire
