// How the products of attention are summed: unit by unit, or in the order of tiles (tiles.h).
#pragma once

#include "dot.h"
#include "tiles.h"

namespace pagewire {

// A sum while up to `kUnits` units are added to it.
template <class Dot>
struct PartialSum {
  static constexpr int64_t kUnits = 1 << 20;
  void begin(Floats sum) { value = sum; }
  void add(const typename Dot::Operand& row, const typename Dot::Operand& column) {
    value = Dot::add(row, column, value);
  }
  Floats end(Floats) const { return value; }

  Floats value;
};

#if defined(PAGEWIRE_HAS_TILES)

// Tiles multiply many rows by packed keys and values. For a few rows, whose keys and values are not
// packed, vector registers compute the same sums.
struct TileDot {
  static constexpr int64_t kInputsPerStep = 2;

  struct Operand {
    Floats first, second;
  };
  static Operand load(const void* pairs) { return split(load_words(pairs)); }
  static Operand operand(Floats pairs) { return split(as_words(pairs)); }
  static Operand broadcast(int32_t pair) { return split(broadcast_word(pair)); }
  static Operand split(Words pairs) { return {first_of_pairs(pairs), second_of_pairs(pairs)}; }
  static Floats add(const Operand& row, const Operand& column, Floats sum) {
    sum = multiply_add(row.first, column.first, sum);
    return multiply_add(row.second, column.second, sum);
  }
};

template <>
struct PartialSum<TileDot> {
  static constexpr int64_t kUnits = kTileUnits;
  void begin(Floats) { first = second = zeros(); }
  void add(const TileDot::Operand& row, const TileDot::Operand& column) {
    first = multiply_add(row.first, column.first, first);
    second = multiply_add(row.second, column.second, second);
  }
  Floats end(Floats sum) const { return pagewire::add(sum, pagewire::add(first, second)); }

  Floats first, second;
};

// During its lifetime, vector instructions treat subnormal numbers as zero, as tiles do.
class NoSubnormals {
 public:
  NoSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kZeroResults | kZeroOperands); }
  ~NoSubnormals() { _mm_setcsr(before_); }
  NoSubnormals(const NoSubnormals&) = delete;

 private:
  static constexpr unsigned kZeroResults = 0x8000, kZeroOperands = 0x0040;
  const unsigned before_;
};

#endif

}  // namespace pagewire
