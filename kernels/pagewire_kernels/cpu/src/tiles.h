// Products of tiles by AMX: up to 32 rows by 32 columns, 64 bytes of each row (16 units of 32 bits) at a
// time. In the other matrix, the same unit of all columns is contiguous.
//
// Tiles 0 to 3 hold the sums, [2 of rows][2 of columns], 4 and 5 the rows, 6 and 7 the columns. A sum
// consists of the same additions whatever the other rows are: with bfloat16, a tile adds
//
//     (the sum of the first products of its 16 units) + (the sum of the second ones)
//
// to the sum, each a chain of fused multiply-adds, and treats subnormal numbers as zero.
//
// The instructions are written in assembly, since GCC 12 does not know that its intrinsics for tiles
// read and write memory.
#pragma once

#include "team.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PAGEWIRE_HAS_TILES

namespace pagewire {

constexpr int64_t kTileRows = 16, kTileBytes = 64;
constexpr int64_t kTileUnits = kTileBytes / 4;

// stride: in bytes
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// The shapes of tiles, for `ldtilecfg`.
struct TileShapes {
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }

  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                            kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

enum class TileProduct { kBFloat16, kUnsignedSigned };

// Rows and columns of units, `num_tiles` tiles of each.
struct TileOperands {
  const char* rows;
  int64_t row_bytes;  // from row to row
  const char* columns;
  int64_t unit_bytes;  // from unit to unit
  int64_t num_tiles;
};

// The tile registers of the calling thread, which are released by the destructor.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (num_rows_ != 0) asm volatile("tilerelease");
  }

  static constexpr int64_t kMostRows = 2 * kTileRows;

  // Configures tiles for up to `kMostRows` rows.
  void configure(int64_t num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    first_rows_ = num_rows > kTileRows ? divide_up(num_rows, 2) : num_rows;
    TileShapes shapes;
    const auto first = static_cast<uint8_t>(first_rows_);
    const auto second = static_cast<uint8_t>(num_rows > first_rows_ ? num_rows - first_rows_ : 1);
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = first;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = second;
    shapes.rows[6] = shapes.rows[7] = kTileUnits;
    shapes.load();
  }

  // Adds the products of the configured rows with 32 columns to their sums, or starts these, and
  // prefetches `num_lines` cache lines of `fetched` with each tile. sums: at a stride of `sum_bytes`.
  template <TileProduct kProduct, bool kIsFirst = false>
  void add(const TileOperands& from, char* sums, int64_t sum_bytes, const char* fetched = nullptr,
           int64_t num_lines = 0) const {
    if (num_rows_ > kTileRows) {
      add_rows<kProduct, true, kIsFirst>(from, sums, sum_bytes, fetched, num_lines);
    } else {
      add_rows<kProduct, false, kIsFirst>(from, sums, sum_bytes, fetched, num_lines);
    }
  }

 private:
  template <TileProduct kProduct, bool kHasMore, bool kIsFirst>
  void add_rows(TileOperands from, char* sums, int64_t sum_bytes, const char* fetched,
                int64_t num_lines) const {
    char* second = sums + first_rows_ * sum_bytes;
    const char* more = from.rows + first_rows_ * from.row_bytes;
    if constexpr (kIsFirst) {
      clear_tile<0>();
      clear_tile<1>();
      clear_tile<2>();
      clear_tile<3>();
    } else {
      load_tile<0>(sums, sum_bytes);
      load_tile<1>(sums + kTileBytes, sum_bytes);
      if constexpr (kHasMore) {
        load_tile<2>(second, sum_bytes);
        load_tile<3>(second + kTileBytes, sum_bytes);
      }
    }
    for (int64_t i = 0; i < from.num_tiles; ++i) {
      for (int64_t line = 0; line < num_lines; ++line, fetched += 64) {
        __builtin_prefetch(fetched, 0, 2);
      }
      load_tile<4>(from.rows, from.row_bytes);
      load_tile<6>(from.columns, from.unit_bytes);
      multiply<kProduct, 0, 4, 6>();
      load_tile<7>(from.columns + kTileBytes, from.unit_bytes);
      multiply<kProduct, 1, 4, 7>();
      if constexpr (kHasMore) {
        load_tile<5>(more, from.row_bytes);
        multiply<kProduct, 2, 5, 6>();
        multiply<kProduct, 3, 5, 7>();
        more += kTileBytes;
      }
      from.rows += kTileBytes;
      from.columns += kTileUnits * from.unit_bytes;
    }
    store_tile<0>(sums, sum_bytes);
    store_tile<1>(sums + kTileBytes, sum_bytes);
    if constexpr (kHasMore) {
      store_tile<2>(second, sum_bytes);
      store_tile<3>(second + kTileBytes, sum_bytes);
    }
  }

  template <TileProduct kProduct, int kSums, int kRows, int kColumns>
  static void multiply() {
    if constexpr (kProduct == TileProduct::kBFloat16) {
      asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
    } else {
      asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
    }
  }

  int64_t num_rows_ = 0, first_rows_ = 0;
};

}  // namespace pagewire

#endif
