// Sums of a group's products for some rows at a time, by tiles (tiles.h): for each digit of the inputs
// the same whole numbers as `DigitsDot` sums.
//
// The rows of a tile are the first digits of all rows of inputs, then their second ones and so on.
// Tiles 0 and 1 have the sums for the two registers of a panel's outputs, 2 the inputs, 3 and 4 the
// codes.
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

template <class Dot>
class GroupTiles {
 public:
  static constexpr int64_t kDigits = Dot::kDigits, kMostRows = kTileRows / kDigits;
  static constexpr int64_t kSumBytes = kTileRows * kTileBytes;  // of a register of outputs
  static constexpr int64_t kSumsBytes = kPanelVectors * kSumBytes;

  // Tiles of a block have about the same number of rows: fewer take less time.
  static int64_t rows_per_tile(int64_t num_rows) {
    return even_part(num_rows, kMostRows);
  }

  GroupTiles() = default;
  GroupTiles(const GroupTiles&) = delete;
  ~GroupTiles() {
    if (num_rows_ != 0) asm volatile("tilerelease");
  }

  // For up to `kMostRows` rows.
  void configure(int64_t group_size, int64_t num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    depth_ = tile_depth(group_size);
    num_parts_ = group_size / depth_;
    TileShapes shapes;
    for (int t = 0; t < 8; ++t) shapes.rows[t] = static_cast<uint8_t>(kDigits * num_rows);
    shapes.row_bytes[2] = static_cast<uint16_t>(depth_);
    shapes.rows[3] = shapes.rows[4] = static_cast<uint8_t>(depth_ / 4);
    shapes.load();
  }

  // inputs: [group_size / depth][kDigits][num_rows][depth]; codes: int8 [group_size / 4][kPanel][4];
  // sums: [kPanelVectors][kDigits][num_rows][kLanes]
  void multiply(const char* inputs, const char* codes, char* sums) const {
    const int64_t depth = depth_, num_parts = num_parts_;
    clear_tile<0>();
    clear_tile<1>();
    for (int64_t part = 0; part < num_parts; ++part) {
      load_tile<2>(inputs, depth);
      load_tile<3>(codes, kStepBytes);
      asm volatile("tdpbssd %tmm3, %tmm2, %tmm0");
      load_tile<4>(codes + kTileBytes, kStepBytes);
      asm volatile("tdpbssd %tmm4, %tmm2, %tmm1");
      inputs += kDigits * num_rows_ * depth;
      codes += depth / 4 * kStepBytes;
    }
    store_tile<0>(sums, kTileBytes);
    store_tile<1>(sums + kSumBytes, kTileBytes);
  }

  typename Dot::Sum load(const char* sums, int64_t v, int64_t row) const {
    typename Dot::Sum sum;
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) {
      sum.of_digits[d] = load_words(sums + v * kSumBytes + (d * num_rows_ + row) * kTileBytes);
    }
    return sum;
  }

 private:
  int64_t num_rows_ = 0, depth_ = 0, num_parts_ = 0;
};

}  // namespace pagewire

#endif
