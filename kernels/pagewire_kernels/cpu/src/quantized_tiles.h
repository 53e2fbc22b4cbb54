// Sums of a group's products for 16 rows at a time, by tiles (tiles.h): for each digit of the inputs
// the same whole numbers as `DigitsDot` sums.
//
// The first tiles have a sum of each digit, for the first outputs of a panel; as many after them for
// the others. Tile 6 has the inputs, and 7 the codes.
#pragma once

#include "linear.h"
#include "quantized_dot.h"
#include "tiles.h"

#if defined(PAGEWIRE_HAS_TILES)

namespace pagewire {

// Of a group, the inputs of a row that are in a tile; a whole number of registers.
inline int64_t tile_depth(int64_t group_size) {
  int64_t depth = kTileBytes;
  while (group_size % depth) depth -= kLanes;
  return depth;
}

// Tiles of a block have about the same number of rows: fewer take less time.
inline int64_t rows_per_tile(int64_t num_rows) {
  return divide_up(num_rows, divide_up(num_rows, kTileRows));
}

template <class Dot>
class GroupTiles {
 public:
  static constexpr int kDigits = Dot::kDigits;
  static constexpr int64_t kRows = kTileRows;
  static constexpr int64_t kSumBytes = kRows * kTileBytes;  // of a digit and a register of outputs
  static constexpr int64_t kSumsBytes = kPanelVectors * kDigits * kSumBytes;

  GroupTiles(int64_t group_size, int64_t num_rows)
      : depth_(tile_depth(group_size)), num_parts_(group_size / depth_) {
    TileShapes shapes;
    for (int t = 0; t < 7; ++t) shapes.rows[t] = static_cast<uint8_t>(num_rows);
    shapes.row_bytes[6] = static_cast<uint16_t>(depth_);
    shapes.rows[7] = static_cast<uint8_t>(depth_ / 4);
    shapes.load();
  }
  GroupTiles(const GroupTiles&) = delete;
  ~GroupTiles() { asm volatile("tilerelease"); }

  // inputs: [group_size / depth][kDigits][kRows][depth]; codes: int8 [group_size / 4][kPanel][4];
  // sums: [kPanelVectors][kDigits][kRows][kLanes]
  void multiply(const char* inputs, const char* codes, char* sums) const {
    multiply_for<0>(inputs, codes, sums);
    multiply_for<1>(inputs, codes + kTileBytes, sums + kDigits * kSumBytes);
  }

  static typename Dot::Sum load(const char* sums, int64_t v, int64_t row) {
    const char* first = sums + v * kDigits * kSumBytes + row * kTileBytes;
    typename Dot::Sum sum;
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) sum.of_digits[d] = load_words(first + d * kSumBytes);
    return sum;
  }

 private:
  template <int kVector>
  void multiply_for(const char* inputs, const char* codes, char* sums) const {
    constexpr int kFirst = kVector * kDigits;
    clear_tile<kFirst>();
    clear_tile<kFirst + 1>();
    if constexpr (kDigits == 3) clear_tile<kFirst + 2>();
    for (int64_t part = 0; part < num_parts_; ++part) {
      load_tile<7>(codes, kStepBytes);
      multiply_digit<kFirst>(inputs);
      multiply_digit<kFirst + 1>(inputs);
      if constexpr (kDigits == 3) multiply_digit<kFirst + 2>(inputs);
      codes += depth_ / 4 * kStepBytes;
    }
    store_tile<kFirst>(sums, kTileBytes);
    store_tile<kFirst + 1>(sums + kSumBytes, kTileBytes);
    if constexpr (kDigits == 3) store_tile<kFirst + 2>(sums + 2 * kSumBytes, kTileBytes);
  }

  template <int kSum>
  void multiply_digit(const char*& inputs) const {
    load_tile<6>(inputs, depth_);
    asm volatile("tdpbssd %%tmm7, %%tmm6, %%tmm%c0" ::"i"(kSum));
    inputs += kRows * depth_;
  }

  const int64_t depth_, num_parts_;
};

}  // namespace pagewire

#endif
