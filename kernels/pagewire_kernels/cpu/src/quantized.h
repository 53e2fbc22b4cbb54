// Weights in fewer bits, packed and unpacked.
//
// A weight is (code - zero) * scale + offset, where scale and offset are those of a group of inputs.
// It is packed in panels as dense weights are (linear.h); a panel has, for each group,
//
//   scales[kPanel]   float32, float16, or int8 numbers of units
//   offsets[kPanel]  the same, if there are any
//   codes[group_size / Codes::kInputs][Codes::kWords][kPanel] words of 32 bits
//
// and before the first of the groups that share units, these: float16 [kPanel], of scales, then of
// offsets. So a panel is read once, from its beginning to its end.
//
// A register of bytes has the codes of four inputs, one output in each word. The words of four bits
// have two such registers, first the lower halves of the bytes. Codes of 5 or 6 bits have their
// upper bits in a word after those of the lower four; of each byte, register after register. Codes
// of floats are in another order: of four outputs the first two inputs, then of these the others.
#pragma once

#include <type_traits>
#include <utility>

#include "linear.h"

namespace pagewire {

constexpr int64_t kMaxGroup = 256;
constexpr int64_t kFetchedBytes = 2048;  // ahead, into the first-level cache; measured on a Xeon

// Inlined, since GCC may remove calls of a function that does nothing but fetch.
template <int64_t kBytes>
inline __attribute__((always_inline)) void fetch_ahead(const char* from) {
  _Pragma("GCC unroll 16") for (int64_t at = 0; at < kBytes; at += 64) {
    __builtin_prefetch(from + kFetchedBytes + at, 0, 3);
  }
}

// The lower halves of the words' bytes, or the upper ones.
template <int kRegister>
inline Words half_bytes(const char* words) {
  const Words both = load_words(words + kRegister / 2 * kStepBytes);
  return and_words(shift_right<kRegister % 2 * 4>(both), broadcast_word(0x0f0f0f0f));
}

inline int half_byte(const uint8_t* codes, int i) {
  return codes[i / 8 * 4 + i % 4] >> (i / 4 % 2 * 4) & 15;
}

struct Codes4 {
  static constexpr int64_t kInputs = 8, kWords = 1;  // of what is unpacked at a time
  static constexpr int32_t kMost = 15;  // what a register's bytes may be

  template <int kRegister>
  static Words bytes(const char* words, const ByteTable&) {
    return half_bytes<kRegister>(words);
  }
  // The code of input `i`, of an output's words one after the other.
  static int code(const uint8_t* words, int i, const uint8_t*) { return half_byte(words, i); }
  static void put(uint8_t* words, int i, int code) {
    words[i / 8 * 4 + i % 4] |= static_cast<uint8_t>((code & 15) << (i / 4 % 2 * 4));
  }
};

// Four bits, with a table of the codes that they mean.
struct TableCodes4 : Codes4 {
  static constexpr int32_t kMost = 255;

  template <int kRegister>
  static Words bytes(const char* words, const ByteTable& table) {
    return look_up(table, half_bytes<kRegister>(words));
  }
  static int code(const uint8_t* words, int i, const uint8_t* table) {
    return table[half_byte(words, i)];
  }
};

// Four bits and `kUpper` more, whose word has those of `kInputs` inputs.
template <int kUpper>
struct LongCodes {
  static constexpr int64_t kInputs = 32 / kUpper, kWords = kInputs / 8 + 1;
  static constexpr int32_t kMost = (16 << kUpper) - 1;

  template <int kRegister>
  static Words bytes(const char* words, const ByteTable&) {
    constexpr int kLeft = 4 - kRegister * kUpper;
    constexpr int kMask = 0x01010101 * (((1 << kUpper) - 1) << 4);
    const Words upper = load_words(words + (kWords - 1) * kStepBytes);
    const Words shifted = shift_right<(kLeft < 0 ? -kLeft : 0)>(
        shift_left<(kLeft > 0 ? kLeft : 0)>(upper));
    return or_words(half_bytes<kRegister>(words), and_words(shifted, broadcast_word(kMask)));
  }
  static int code(const uint8_t* words, int i, const uint8_t*) {
    const int upper = words[(kWords - 1) * 4 + i % 4] >> (i / 4 * kUpper) & ((1 << kUpper) - 1);
    return half_byte(words, i) | upper << 4;
  }
  static void put(uint8_t* words, int i, int code) {
    Codes4::put(words, i, code);
    words[(kWords - 1) * 4 + i % 4] |= static_cast<uint8_t>(code >> 4 << (i / 4 * kUpper));
  }
};
using Codes5 = LongCodes<1>;
using Codes6 = LongCodes<2>;

struct Codes8 {
  static constexpr int64_t kInputs = 8, kWords = 2;
  static constexpr int32_t kMost = 255;

  template <int kRegister>
  static Words bytes(const char* words, const ByteTable&) {
    return load_words(words + kRegister * kStepBytes);
  }
  static int code(const uint8_t* words, int i, const uint8_t*) { return words[i]; }
  static void put(uint8_t* words, int i, int code) { words[i] = static_cast<uint8_t>(code); }
};

inline Words of_bytes(uint32_t byte) {
  return broadcast_word(static_cast<int32_t>(byte * 0x01010101u));
}

// Four bits, with a table of the 16 numbers of float32 that they mean. For rows of bfloat16, these are
// rounded to it, as a dense weight would be. A register has one byte of each number.
struct FloatCodes4 : Codes4 {
  static constexpr float kUnit = 1.0f;

  explicit FloatCodes4(const uint8_t* table) {
    for (int at = 0; at < 4; ++at) {
      uint8_t bytes[16], rounded[16];
      for (int code = 0; code < 16; ++code) {
        const BFloat16 number = round_to_bfloat16(value(code, table));
        bytes[code] = table[4 * code + at];
        rounded[code] = static_cast<uint8_t>(number.bits >> 8 * (at % 2));
      }
      bytes_[at] = load_table(bytes);
      rounded_[at % 2] = load_table(rounded);
    }
  }

  // As FloatCodes8.
  void unpack(Words codes, Words& first, Words& second) const {
    interleave_bytes(look_up(rounded_[0], codes), look_up(rounded_[1], codes), first, second);
  }
  void unpack(Words codes, Floats (&inputs)[4]) const {
    Words lower[2], upper[2];
    interleave_bytes(look_up(bytes_[0], codes), look_up(bytes_[1], codes), lower[0], lower[1]);
    interleave_bytes(look_up(bytes_[2], codes), look_up(bytes_[3], codes), upper[0], upper[1]);
    for (int i = 0; i < 2; ++i) {
      const Words low = and_words(lower[i], broadcast_word(0xffff));
      inputs[2 * i] = as_floats(or_words(as_words(first_of_pairs(upper[i])), low));
      const Words high = as_words(second_of_pairs(upper[i]));
      inputs[2 * i + 1] = as_floats(or_words(high, shift_right<16>(lower[i])));
    }
  }

  static int code(const uint8_t* words, int i, const uint8_t*) { return half_byte(words, i); }
  static float value(int code, const uint8_t* table) {
    float number;
    memcpy(&number, table + 4 * code, 4);
    return number;
  }

 private:
  ByteTable bytes_[4], rounded_[2];
};

// Floats of 8 bits, e4m3 without infinities; none is NaN. Packed, the sign is after the upper three
// bits of the exponent.
struct FloatCodes8 : Codes8 {
  static constexpr float kUnit = 256.0f;  // by which unpacked numbers are too small

  explicit FloatCodes8(const uint8_t*) {}

  static int code(const uint8_t* words, int i, const uint8_t*) {
    return (words[i] & 0x0f) | (words[i] & 0xe0) >> 1 | (words[i] & 0x10) << 3;
  }
  static void put(uint8_t* words, int i, int code) {
    words[i] = static_cast<uint8_t>((code & 0x0f) | (code & 0x70) << 1 | (code & 0x80) >> 3);
  }

  // Four inputs of each output as bfloat16: the first two in a word of `first`. Their upper bytes have
  // the sign and the upper bits of the exponent, which is 112 larger than the code's; the lower ones
  // its last bit and the fraction. Subnormal numbers are normal ones of bfloat16: tables have the bits
  // that differ.
  void unpack(Words codes, Words& first, Words& second) const {
    // The upper bit is set unless the upper bits of the exponent are zero.
    const Words place = add_bytes_saturating(codes, of_bytes(0x60));
    Words upper = look_up(upper_of_normal, and_words(shift_right<4>(codes), of_bytes(0x0f)));
    Words lower = and_words(shift_left<4>(codes), of_bytes(0xf0));
    upper = xor_words(upper, look_up_or_zero(upper_of_subnormal, place));
    lower = xor_words(lower, look_up_or_zero(lower_of_subnormal, place));
    interleave_bytes(lower, upper, first, second);
  }
  void unpack(Words codes, Floats (&inputs)[4]) const {
    Words first, second;
    unpack(codes, first, second);
    inputs[0] = first_of_pairs(first);
    inputs[1] = second_of_pairs(first);
    inputs[2] = first_of_pairs(second);
    inputs[3] = second_of_pairs(second);
  }

  static float value(int code, const uint8_t*) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const auto bits = static_cast<uint32_t>((exponent + 120) << 23 | fraction << 20);
    float size = static_cast<float>(fraction) * 0x1p-9f;
    if (exponent != 0) memcpy(&size, &bits, 4);
    return code & 128 ? -size : size;
  }

 private:
  alignas(16) static constexpr uint8_t kNormal[16] = {0x38, 0xb8, 0x39, 0xb9, 0x3a, 0xba,
                                                      0x3b, 0xbb, 0x3c, 0xbc, 0x3d, 0xbd,
                                                      0x3e, 0xbe, 0x3f, 0xbf};
  alignas(16) static constexpr uint8_t kUpper[16] = {0x38, 0x0f, 0x0f, 0x0f};
  alignas(16) static constexpr uint8_t kLower[16] = {0, 0x10, 0xa0, 0xf0, 0x40, 0x70, 0x20, 0x10};
  const ByteTable upper_of_normal = load_table(kNormal);
  const ByteTable upper_of_subnormal = load_table(kUpper), lower_of_subnormal = load_table(kLower);
};

template <class Codes>
constexpr bool kIsFloat =
    std::is_same_v<Codes, FloatCodes4> || std::is_same_v<Codes, FloatCodes8>;

// Where a step has the first two bytes of an output's word, or the others.
template <class Codes>
constexpr int64_t place_of(int64_t output, int half) {
  if (kIsFloat<Codes>) return output / 4 * 16 + half * 8 + output % 4 * 2;
  return output * 4 + half * 2;
}

// The scales or the offsets of a group's outputs.
struct Scales {
  const int8_t* whole() const { return reinterpret_cast<const int8_t*>(numbers); }

  // Of output `first` and those after it.
  Floats load(int64_t first) const {
    if (number_bytes == 4) return widen(reinterpret_cast<const float*>(numbers) + first);
    if (number_bytes == 2) return widen(reinterpret_cast<const Float16*>(numbers) + first);
    const Floats unit = widen(reinterpret_cast<const Float16*>(units) + first);
    return multiply(widen(whole() + first), unit);
  }

  const char* numbers;  // null of offsets that a weight does not have
  const char* units;
  int64_t number_bytes;
};

struct Group {
  const char* codes;
  Scales scales, offsets;
};

// Consecutive groups that share units.
struct GroupRun {
  int64_t first, count;
  const char* groups;
  const char* units;

  // Of scales.
  Floats load_units(int64_t first) const {
    return widen(reinterpret_cast<const Float16*>(units) + first);
  }
};

// Where a panel's groups are.
template <class Codes>
struct GroupLayout {
  GroupLayout(const Quantization& q, int64_t in_features)
      : num_words(q.group_size / Codes::kInputs * Codes::kWords),
        num_groups(in_features / q.group_size),
        groups_per_unit(q.unit_groups ? q.unit_groups : num_groups),
        run_groups(kMaxGroup / q.group_size),
        number_bytes(q.scale_bytes),
        offsets_at(q.has_offsets ? kPanel * q.scale_bytes : 0),
        codes_at(kPanel * q.scale_bytes * (q.has_offsets ? 2 : 1)),
        group_bytes(codes_at + num_words * kStepBytes),
        units_bytes(q.unit_groups ? kPanel * 2 * (q.has_offsets ? 2 : 1) : 0),
        panel_bytes(num_groups * group_bytes + num_groups / groups_per_unit * units_bytes) {}

  Group at(const char* panel, int64_t g) const {
    const int64_t unit = g / groups_per_unit;
    const char* units = panel + unit * (groups_per_unit * group_bytes + units_bytes);
    return group_at(units + units_bytes + g % groups_per_unit * group_bytes, units);
  }

  Group group_at(const char* group, const char* units) const {
    const char* offsets = offsets_at ? group + offsets_at : nullptr;
    return {group + codes_at,
            {group, units, number_bytes},
            {offsets, units + kPanel * 2, number_bytes}};
  }

  // Calls `visit` with a number and a group, one after the other.
  template <class Visit>
  inline __attribute__((always_inline)) void for_each_group(const char* panel, Visit visit) const {
    for (int64_t g = 0; g < num_groups;) {
      const char* units = panel;
      panel += units_bytes;
      for (const int64_t end = g + groups_per_unit; g < end; ++g, panel += group_bytes) {
        visit(g, group_at(panel, units));
      }
    }
  }

  // Calls `visit` with runs of groups, at most `kMaxGroup` inputs, one after the other.
  template <class Visit>
  inline __attribute__((always_inline)) void for_each_run(const char* panel, Visit visit) const {
    for (int64_t g = 0; g < num_groups;) {
      const char* units = panel;
      panel += units_bytes;
      for (const int64_t end = g + groups_per_unit; g < end;) {
        const int64_t count = end - g < run_groups ? end - g : run_groups;
        visit(GroupRun{g, count, panel, units});
        g += count;
        panel += count * group_bytes;
      }
    }
  }

  // Group `i` of a run.
  Group at(const GroupRun& run, int64_t i) const {
    return group_at(run.groups + i * group_bytes, run.units);
  }

  const int64_t num_words, num_groups, groups_per_unit, run_groups, number_bytes, offsets_at;
  const int64_t codes_at, group_bytes, units_bytes, panel_bytes;
};

}  // namespace pagewire
