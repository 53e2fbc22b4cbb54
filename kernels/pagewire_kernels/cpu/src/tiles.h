// Products of tiles by AMX: up to 32 rows go over a panel's 32 outputs, one tile of 64 bytes of each
// input row, which is 16 steps of a panel, at a time.
//
// Tiles 0 to 3 have the sums, [2 of rows][2 of outputs], 4 and 5 the inputs, 6 and 7 the weights. An
// output's sum is made of the same additions whatever the other rows are.
//
// The instructions are written as assembly, since GCC 12 does not know that its intrinsics for tiles
// read and write memory.
#pragma once

#include "linear.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PAGEWIRE_HAS_TILES

#define PAGEWIRE_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(stride) : "memory")
#define PAGEWIRE_TILE_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(stride) : "memory")

namespace pagewire {

constexpr int64_t kTileRows = 16, kTileBytes = 64;
constexpr int64_t kTileSteps = kTileBytes / 4;
constexpr int64_t kTileWeightBytes = kTileSteps * kStepBytes;
constexpr int64_t kTileFetchDistance = 8192;
constexpr int64_t kStretchTiles = 8;  // of a panel, which stay in the first-level cache

enum class TileProduct { kBFloat16, kUnsignedSigned };

// What the calling thread's tiles are shaped for, while it lives.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (num_rows_ != 0) asm volatile("tilerelease");
  }

  // Add the products of rows with a panel to their sums, [num_rows, kPanel] of 32 bits each, and
  // fetch the panel that is read next. x: `row_bytes` from row to row, of which `num_bytes` are read.
  template <TileProduct kProduct>
  void add_panel(const char* x, int64_t row_bytes, int64_t num_rows, int64_t num_bytes,
                 const char* panel, const char* next_panel, void* sums) {
    const int64_t num_tiles = num_bytes / kTileBytes, num_groups = divide_up(num_rows, kMostRows);
    const bool is_read_once = num_groups == 1;
    const int64_t stretch = is_read_once ? num_tiles : kStretchTiles;
    const int64_t num_lines = divide_up(kTileWeightBytes / 64, num_groups);
    for (int64_t tile = 0; tile < num_tiles; tile += stretch) {
      const int64_t left = num_tiles - tile, count = left < stretch ? left : stretch;
      const char* weights = panel + tile * kTileWeightBytes;
      const char* next = count < left ? weights + stretch * kTileWeightBytes : next_panel;
      for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t row = g * num_rows / num_groups, end = (g + 1) * num_rows / num_groups;
        configure(end - row);
        const char* fetched = is_read_once ? weights + kTileFetchDistance : next + g * num_lines * count * 64;
        add<kProduct>(x + row * row_bytes + tile * kTileBytes, row_bytes, weights, count, fetched,
                      num_lines, static_cast<char*>(sums) + row * kSumBytes);
      }
    }
    if (num_bytes % kTileBytes) {
      add_rest<kProduct>(x + num_tiles * kTileBytes, row_bytes, num_rows, num_bytes % kTileBytes,
                         panel + num_tiles * kTileWeightBytes, sums);
    }
  }

 private:
  static constexpr int64_t kSumBytes = kPanel * 4;
  static constexpr int64_t kMostRows = 2 * kTileRows;  // that go over a panel together

  // For up to `kMostRows` rows.
  void configure(int64_t num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    first_rows_ = num_rows > kTileRows ? divide_up(num_rows, 2) : num_rows;
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    static_assert(sizeof(shapes) == 64);
    for (int t = 0; t < 8; ++t) shapes.row_bytes[t] = kTileBytes;
    const auto first = static_cast<uint8_t>(first_rows_);
    const auto second = static_cast<uint8_t>(num_rows > first_rows_ ? num_rows - first_rows_ : 1);
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = first;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = second;
    shapes.rows[6] = shapes.rows[7] = kTileSteps;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }

  // The last inputs, which fill no tile: with zeros after them and their weights.
  template <TileProduct kProduct>
  void add_rest(const char* x, int64_t row_bytes, int64_t num_rows, int64_t num_bytes,
                const char* weights, void* sums) {
    alignas(64) char inputs[kMostRows * kTileBytes] = {}, padded[kTileWeightBytes] = {};
    memcpy(padded, weights, divide_up(num_bytes, 4) * kStepBytes);
    for (int64_t row = 0; row < num_rows; row += kMostRows) {
      const int64_t count = num_rows - row < kMostRows ? num_rows - row : kMostRows;
      for (int64_t r = 0; r < count; ++r) {
        memcpy(inputs + r * kTileBytes, x + (row + r) * row_bytes, num_bytes);
      }
      configure(count);
      add<kProduct>(inputs, kTileBytes, padded, 1, padded, 0,
                    static_cast<char*>(sums) + row * kSumBytes);
    }
  }

  // Of the rows configured for.
  template <TileProduct kProduct>
  void add(const char* x, int64_t row_bytes, const char* weights, int64_t num_tiles,
           const char* fetched, int64_t num_lines, char* sums) const {
    if (num_rows_ > kTileRows) {
      add_rows<kProduct, true>(x, row_bytes, weights, num_tiles, fetched, num_lines, sums);
    } else {
      add_rows<kProduct, false>(x, row_bytes, weights, num_tiles, fetched, num_lines, sums);
    }
  }

  template <TileProduct kProduct, bool kHasMore>
  void add_rows(const char* x, int64_t row_bytes, const char* weights, int64_t num_tiles,
                const char* fetched, int64_t num_lines, char* sums) const {
    char* second = sums + first_rows_ * kSumBytes;
    const char* more = x + first_rows_ * row_bytes;
    PAGEWIRE_TILE_LOAD(0, sums, kSumBytes);
    PAGEWIRE_TILE_LOAD(1, sums + kTileBytes, kSumBytes);
    if constexpr (kHasMore) {
      PAGEWIRE_TILE_LOAD(2, second, kSumBytes);
      PAGEWIRE_TILE_LOAD(3, second + kTileBytes, kSumBytes);
    }
    for (int64_t i = 0; i < num_tiles; ++i) {
      for (int64_t line = 0; line < num_lines; ++line, fetched += 64) {
        __builtin_prefetch(fetched, 0, 2);
      }
      PAGEWIRE_TILE_LOAD(4, x, row_bytes);
      PAGEWIRE_TILE_LOAD(6, weights, kStepBytes);
      multiply<kProduct, 0, 4, 6>();
      PAGEWIRE_TILE_LOAD(7, weights + kTileBytes, kStepBytes);
      multiply<kProduct, 1, 4, 7>();
      if constexpr (kHasMore) {
        PAGEWIRE_TILE_LOAD(5, more, row_bytes);
        multiply<kProduct, 2, 5, 6>();
        multiply<kProduct, 3, 5, 7>();
        more += kTileBytes;
      }
      x += kTileBytes;
      weights += kTileWeightBytes;
    }
    PAGEWIRE_TILE_STORE(0, sums, kSumBytes);
    PAGEWIRE_TILE_STORE(1, sums + kTileBytes, kSumBytes);
    if constexpr (kHasMore) {
      PAGEWIRE_TILE_STORE(2, second, kSumBytes);
      PAGEWIRE_TILE_STORE(3, second + kTileBytes, kSumBytes);
    }
  }

  template <TileProduct kProduct, int kSums, int kInputs, int kWeights>
  static void multiply() {
    if constexpr (kProduct == TileProduct::kBFloat16) {
      asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInputs), "i"(kWeights));
    } else {
      asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInputs), "i"(kWeights));
    }
  }

  int64_t num_rows_ = 0, first_rows_ = 0;
};

}  // namespace pagewire

#endif
