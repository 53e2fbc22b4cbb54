// Products of rows with a panel (linear.h) by tiles, if the processor has them.
#pragma once

#include "linear_tile.h"
#include "tiles.h"

#if defined(PAGEWIRE_HAS_TILES)

namespace pagewire {

constexpr int64_t kPanelTileBytes = kTileUnits * kStepBytes;
constexpr int64_t kStretchTiles = 8;  // of a panel, which stay in the first-level cache
constexpr int64_t kSumBytes = kPanel * 4;

// The last inputs, which do not fill a tile: they and their weights are padded with zeros.
template <TileProduct kProduct>
void add_last_inputs(TileRegisters& tiles, const char* x, int64_t row_bytes, int64_t num_rows,
                     int64_t num_bytes, const char* weights, char* sums) {
  alignas(64) char inputs[TileRegisters::kMostRows * kTileBytes] = {};
  alignas(64) char padded[kPanelTileBytes] = {};
  memcpy(padded, weights, divide_up(num_bytes, 4) * kStepBytes);
  for (int64_t row = 0; row < num_rows; row += TileRegisters::kMostRows) {
    const int64_t left = num_rows - row;
    const int64_t count = left < TileRegisters::kMostRows ? left : TileRegisters::kMostRows;
    for (int64_t r = 0; r < count; ++r) {
      memcpy(inputs + r * kTileBytes, x + (row + r) * row_bytes, num_bytes);
    }
    tiles.configure(count);
    tiles.add<kProduct>({inputs, kTileBytes, padded, kStepBytes, 1}, sums + row * kSumBytes, kSumBytes);
  }
}

// Sums the products of rows with a panel, [num_rows, kPanel] of 32 bits each, and prefetches the next
// panel. x: rows at a stride of `row_bytes`, with `num_bytes` of inputs each.
template <TileProduct kProduct>
void sum_panel(TileRegisters& tiles, const char* x, int64_t row_bytes, int64_t num_rows,
               int64_t num_bytes, const char* panel, const char* next_panel, void* all_sums) {
  char* const sums = static_cast<char*>(all_sums);
  const int64_t num_tiles = num_bytes / kTileBytes;
  const int64_t num_groups = divide_up(num_rows, TileRegisters::kMostRows);
  const bool is_read_once = num_groups == 1;
  const int64_t stretch = is_read_once ? num_tiles : kStretchTiles;
  const int64_t num_lines = divide_up(kPanelTileBytes / 64, num_groups);
  for (int64_t tile = 0; tile < num_tiles; tile += stretch) {
    const int64_t left = num_tiles - tile, count = left < stretch ? left : stretch;
    const char* weights = panel + tile * kPanelTileBytes;
    const char* next = count < left ? weights + stretch * kPanelTileBytes : next_panel;
    for (int64_t g = 0; g < num_groups; ++g) {
      const int64_t row = g * num_rows / num_groups, end = (g + 1) * num_rows / num_groups;
      const char* fetched =
          is_read_once ? weights + kFetchDistance : next + g * num_lines * count * 64;
      tiles.configure(end - row);
      const TileOperands from = {x + row * row_bytes + tile * kTileBytes, row_bytes, weights,
                                 kStepBytes, count};
      char* const to = sums + row * kSumBytes;
      if (tile == 0) {
        tiles.add<kProduct, true>(from, to, kSumBytes, fetched, num_lines);
      } else {
        tiles.add<kProduct>(from, to, kSumBytes, fetched, num_lines);
      }
    }
  }
  if (num_tiles == 0) memset(sums, 0, num_rows * kSumBytes);
  if (num_bytes % kTileBytes) {
    add_last_inputs<kProduct>(tiles, x + num_tiles * kTileBytes, row_bytes, num_rows,
                              num_bytes % kTileBytes, panel + num_tiles * kPanelTileBytes, sums);
  }
}

}  // namespace pagewire

#endif
