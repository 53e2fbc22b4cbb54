// Products with codes of floats, packed as quantized.h says.
//
// A group is unpacked into the first-level cache, to the steps that a dense weight would have, and the
// sums of its products are multiplied by its scale. Few rows unpack in registers, and add the same
// numbers in the same order.
#pragma once

#include "linear_multiply.h"
#include "linear_tile.h"
#include "linear_tiles.h"
#include "quantized.h"

namespace pagewire {

// Of products with floats, in any encoding.
#if defined(PAGEWIRE_HAS_TILES)
constexpr int64_t kBlockRows = 384;  // the most rows of an item
constexpr int64_t kBlockBytes = 1 << 20;  // of rows, so that they stay in the second-level cache
#else
constexpr int64_t kBlockRows = 192;
constexpr int64_t kBlockBytes = 512 << 10;
#endif

template <class Dot>
int64_t most_rows_of(int64_t in_features) {
  int64_t most = kBlockBytes / (in_features * static_cast<int64_t>(sizeof(typename Dot::Input)));
  if (most > kBlockRows) most = kBlockRows;
  return most < Dot::kMaxRows ? Dot::kMaxRows : most;
}

template <class Dot>
constexpr int64_t kPanelInputBytes = kStepBytes / Dot::kInputsPerStep;  // of an unpacked panel

template <class Codes>
constexpr int64_t kCodeBytes = Codes::kWords * kStepBytes / Codes::kInputs;  // of an input of a panel

// Unpacks a register of codes: four inputs of `kLanes` outputs.
template <class Dot, class Codes>
inline __attribute__((always_inline)) void unpack_register(Words bytes, const Codes& codes,
                                                           char* steps) {
  if constexpr (Dot::kInputsPerStep == 2) {
    Words first, second;
    codes.unpack(bytes, first, second);
    store_words(steps, first);
    store_words(steps + kStepBytes, second);
  } else {
    Floats inputs[4];
    codes.unpack(bytes, inputs);
    for (int i = 0; i < 4; ++i) store_words(steps + i * kStepBytes, as_words(inputs[i]));
  }
}

// Unpacks inputs of a panel; they are `kUnit` times too small. codes: a copy, to be in registers.
template <class Dot, class Codes>
void unpack_floats(const char* words, int64_t num_inputs, Codes codes, char* steps) {
  constexpr int64_t kBytes = Codes::kWords * kStepBytes;
  for (int64_t i = 0; i < num_inputs; i += Codes::kInputs, words += kBytes) {
    fetch_ahead<kBytes>(words);
    _Pragma("GCC unroll 2") for (int64_t v = 0; v < kPanelVectors; ++v) {
      const char* from = words + v * kLanes * 4;
      char* to = steps + v * kLanes * 4;
      unpack_register<Dot>(Codes::template bytes<0>(from, ByteTable()), codes, to);
      unpack_register<Dot>(Codes::template bytes<1>(from, ByteTable()), codes,
                           to + 4 * kPanelInputBytes<Dot>);
    }
    steps += 8 * kPanelInputBytes<Dot>;
  }
}

// Adds the scaled products of `kGroups` groups, one after the other, to the sums of all: both
// [num_rows, kPanel], the products of a group at a stride of `stride`.
template <int kGroups, class Codes>
void add_products(const float* products, int64_t stride, const Scales* scales, int64_t num_rows,
                  float* sums) {
  Floats scale[kGroups][kPanelVectors];
  for (int g = 0; g < kGroups; ++g) {
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      scale[g][v] = multiply(scales[g].load(v * kLanes), broadcast(Codes::kUnit));
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    _Pragma("GCC unroll 2") for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t at = r * kPanel + v * kLanes;
      Floats sum = load_floats(sums + at);
      _Pragma("GCC unroll 4") for (int g = 0; g < kGroups; ++g) {
        sum = multiply_add(scale[g][v], load_floats(products + g * stride + at), sum);
      }
      store_floats(sums + at, sum);
    }
  }
}

// Adds the scaled products of a group's unpacked steps to the sums of up to `kRows` rows,
// [num_rows, kPanel].
template <class Dot, int kRows = Dot::kMaxRows>
void add_scaled_tile(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                     const char* steps, int64_t num_inputs, const Floats (&scale)[kPanelVectors],
                     float* sums) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return add_scaled_tile<Dot, kRows - 1>(x, x_stride, num_rows, steps, num_inputs, scale, sums);
    }
  }
  Floats products[kRows][kPanelVectors];
  _Pragma("GCC unroll 24") for (int i = 0; i < kRows * kPanelVectors; ++i) {
    products[i / kPanelVectors][i % kPanelVectors] = zeros();
  }
  add_steps<Dot, kRows, 0>(x, x_stride, steps, num_inputs, nullptr, products);
  _Pragma("GCC unroll 24") for (int i = 0; i < kRows * kPanelVectors; ++i) {
    const int r = i / kPanelVectors, v = i % kPanelVectors;
    float* sum = sums + i * kLanes;
    store_floats(sum, multiply_add(scale[v], products[r][v], load_floats(sum)));
  }
}

// Adds the products of a register of codes to the sums of `kRows` rows. first: of the codes' inputs.
template <class Dot, int kRegister, class Codes, int kRows>
inline __attribute__((always_inline)) void add_register(
    const TileRows<typename Dot::Input, kRows>& rows, int64_t first, const char* words,
    const Codes& codes, Floats (&sums)[kRows][kPanelVectors]) {
  constexpr int kSteps = 4 / Dot::kInputsPerStep;
  typename Dot::Operand weights[kPanelVectors][kSteps];
  _Pragma("GCC unroll 2") for (int64_t v = 0; v < kPanelVectors; ++v) {
    const Words bytes = Codes::template bytes<kRegister>(words + v * kLanes * 4, ByteTable());
    if constexpr (kSteps == 2) {
      Words pairs[2];
      codes.unpack(bytes, pairs[0], pairs[1]);
      weights[v][0] = Dot::operand(as_floats(pairs[0]));
      weights[v][1] = Dot::operand(as_floats(pairs[1]));
    } else {
      codes.unpack(bytes, weights[v]);
    }
  }
  _Pragma("GCC unroll 4") for (int step = 0; step < kSteps; ++step) {
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
      const auto inputs = Dot::broadcast(load_step(rows[r] + first + Dot::kInputsPerStep * step));
      _Pragma("GCC unroll 2") for (int64_t v = 0; v < kPanelVectors; ++v) {
        sums[r][v] = Dot::add(inputs, weights[v][step], sums[r][v]);
      }
    }
  }
}

// Adds the scaled products of `kGroups` groups of `size` inputs, one after the other, to the sums of
// `kRows` rows, [kRows, kPanel]. An addition to a sum waits for the one before: several groups at a time
// have more sums.
template <class Dot, int kRows, int kGroups, class Codes>
void add_groups(const typename Dot::Input* x, int64_t x_stride, const Group* groups, int64_t size,
                Codes codes, float* sums) {
  constexpr int64_t kBytes = Codes::kWords * kStepBytes;
  Floats products[kGroups][kRows][kPanelVectors];
  const char* words[kGroups];
  _Pragma("GCC unroll 2") for (int g = 0; g < kGroups; ++g) {
    words[g] = groups[g].codes;
    _Pragma("GCC unroll 16") for (int i = 0; i < kRows * kPanelVectors; ++i) {
      products[g][i / kPanelVectors][i % kPanelVectors] = zeros();
    }
  }
  TileRows<typename Dot::Input, kRows> rows(x, x_stride);
  for (int64_t i = 0; i < size; i += Codes::kInputs) {
    _Pragma("GCC unroll 2") for (int g = 0; g < kGroups; ++g) {
      fetch_ahead<kBytes>(words[g]);
      add_register<Dot, 0>(rows, g * size, words[g], codes, products[g]);
      add_register<Dot, 1>(rows, g * size + 4, words[g], codes, products[g]);
      words[g] += kBytes;
    }
    rows.advance(Codes::kInputs);
  }
  _Pragma("GCC unroll 2") for (int g = 0; g < kGroups; ++g) {
    _Pragma("GCC unroll 2") for (int64_t v = 0; v < kPanelVectors; ++v) {
      const Floats scale = multiply(groups[g].scales.load(v * kLanes), broadcast(Codes::kUnit));
      _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
        float* sum = sums + r * kPanel + v * kLanes;
        store_floats(sum, multiply_add(scale, products[g][r][v], load_floats(sum)));
      }
    }
  }
}

// Products with the panels of a weight.
template <class D, class Codes>
class FloatsProduct {
 public:
  using Dot = D;
  using Input = typename Dot::Input;
  static constexpr int64_t kMostRows = kBlockRows;

  explicit FloatsProduct(const LinearTask& task)
      : in_features_(task.in_features), group_size_(task.quantization.group_size),
        layout_(task.quantization, task.in_features), codes_(task.quantization.table) {}

  int64_t panel_bytes() const { return layout_.panel_bytes; }
  int64_t most_rows() const { return most_rows_of<Dot>(in_features_); }

  void set_rows(const InputRows<Input>& rows, int64_t count) { rows_.set(rows, count, in_features_); }

  void operator()(const char* weights, const Upcoming&, float* sums) {
    const int64_t num_rows = rows_.num_rows;
    const Input* x = rows_.x;
    if (num_rows <= kFewRows) return multiply_few<kFewRows>(x, num_rows, weights, sums);
    const int64_t size = group_size_, stride = rows_.stride;
    const int64_t num_tiles = divide_up(num_rows, Dot::kMaxRows);
    alignas(64) char steps[kMaxGroup * kPanelInputBytes<Dot>];
    memset(sums, 0, num_rows * kPanel * sizeof(float));
    layout_.for_each_group(weights, [&](int64_t, const Group& group) {
      unpack_floats<Dot>(group.codes, size, codes_, steps);
      Floats scale[kPanelVectors];
      for (int64_t v = 0; v < kPanelVectors; ++v) {
        scale[v] = multiply(group.scales.load(v * kLanes), broadcast(Codes::kUnit));
      }
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t row = t * num_rows / num_tiles, count = (t + 1) * num_rows / num_tiles - row;
        add_scaled_tile<Dot>(x + row * stride, stride, count, steps, size, scale,
                             sums + row * kPanel);
      }
      x += size;
    });
  }

 private:
  // Which unpack in registers.
  static constexpr int kFewRows = kLanes == 16 && Dot::kInputsPerStep == 2 ? 8 : 4;

  template <int kRows>
  void multiply_few(const Input* x, int64_t num_rows, const char* weights, float* sums) {
    if constexpr (kRows > 1) {
      if (num_rows < kRows) return multiply_few<kRows - 1>(x, num_rows, weights, sums);
    }
    constexpr int kGroups = kRows > 2 ? 1 : 2;
    const int64_t size = group_size_;
    Group groups[kGroups];
    memset(sums, 0, kRows * kPanel * sizeof(float));
    layout_.for_each_group(weights, [&](int64_t g, const Group& group) {
      groups[g % kGroups] = group;
      if (g % kGroups == kGroups - 1) {
        add_groups<Dot, kRows, kGroups>(x, rows_.stride, groups, size, codes_, sums);
        x += kGroups * size;
      } else if (g == layout_.num_groups - 1) {
        add_groups<Dot, kRows, 1>(x, rows_.stride, groups, size, codes_, sums);
      }
    });
  }

  const int64_t in_features_, group_size_;
  const GroupLayout<Codes> layout_;
  const Codes codes_;
  BlockRows<Input> rows_;
};

#if defined(PAGEWIRE_HAS_TILES)
// By tiles, which load what was stored, and the other way round, only once the stores are done: so
// products are added after those that follow. Of few rows, groups are also unpacked before the products
// of those before. Of many rows the sums exceed the first-level cache, and the products of several
// groups are added at a time.
template <class Codes>
class FloatsProduct<BFloat16Dot, Codes> {
 public:
  using Dot = BFloat16Dot;
  using Input = BFloat16;
  static constexpr int64_t kMostRows = kBlockRows;

  explicit FloatsProduct(const LinearTask& task)
      : in_features_(task.in_features), group_size_(task.quantization.group_size),
        layout_(task.quantization, task.in_features), codes_(task.quantization.table) {}

  int64_t panel_bytes() const { return layout_.panel_bytes; }
  int64_t most_rows() const { return most_rows_of<Dot>(in_features_); }

  void set_rows(const InputRows<Input>& rows, int64_t count) { rows_.set(rows, count, in_features_); }

  void operator()(const char* panel, const Upcoming&, float* sums) {
    const int64_t size = group_size_, num_rows = rows_.num_rows;
    const int64_t num_tiles = divide_up(num_rows, TileRegisters::kMostRows);
    const bool has_many_rows = num_tiles > kFewTiles;
    int64_t most = has_many_rows ? kMaxGroup / size : 1;
    if (most > kMostGroups) most = kMostGroups;
    alignas(64) char steps[2][kMaxGroup * kPanelInputBytes<Dot>];
    Groups groups[4]{};  // of three it is needed at a time, some at `number` % 4
    int64_t number = 0;
    Products last{};
    memset(sums, 0, num_rows * kPanel * sizeof(float));
    const auto multiply_groups = [&](const Groups& some, const char* weights) {
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t row = t * num_rows / num_tiles, end = (t + 1) * num_rows / num_tiles;
        const Products products = {&some, row, end - row, products_[last.sums == products_[0]]};
        multiply(rows_.x + some.first * size, products, weights, t, num_tiles);
        add(last, sums);
        last = products;
      }
    };
    layout_.for_each_group(panel, [&](int64_t g, const Group& group) {
      Groups& some = groups[number % 4];
      if (g % most == 0) some = {g, 0, {}, group.codes + 2 * most * layout_.group_bytes};
      char* const to = steps[has_many_rows ? 0 : number % 2];
      unpack_floats<Dot>(group.codes, size, codes_, to + some.count * size * kPanelInputBytes<Dot>);
      some.scales[some.count++] = group.scales;
      if (some.count < most && g + 1 < layout_.num_groups) return;
      if (has_many_rows) {
        multiply_groups(some, to);
      } else if (number > 0) {
        multiply_groups(groups[(number - 1) % 4], steps[(number - 1) % 2]);
      }
      ++number;
    });
    if (!has_many_rows) multiply_groups(groups[(number - 1) % 4], steps[(number - 1) % 2]);
    add(last, sums);
  }

 private:
  static constexpr int64_t kFewTiles = 4;  // measured on a Xeon, as is the next one
  static constexpr int64_t kMostGroups = 2;
  static constexpr int64_t kMostSums = TileRegisters::kMostRows * kPanel;

  struct Groups {
    int64_t first, count;
    Scales scales[kMostGroups];
    const char* fetched;  // while they are multiplied
  };

  // Those of groups with some rows.
  struct Products {
    const Groups* groups;
    int64_t row, num_rows;
    float* sums;  // [count, kMostSums]
  };

  void multiply(const BFloat16* x, const Products& to, const char* weights, int64_t t,
                int64_t num_tiles) {
    constexpr int64_t kTileInputs = kTileBytes / 2, kLines = kTileInputs * kCodeBytes<Codes> / 64;
    const int64_t size = group_size_, row_bytes = rows_.stride * 2;
    const int64_t whole = size / kTileInputs, last_bytes = size % kTileInputs * 2;
    // For the rows of one tile, unpacking prefetches.
    const int64_t num_lines = num_tiles == 1 ? 0 : divide_up(kLines, num_tiles);
    const char* fetched = to.groups->fetched + t * num_lines * whole * to.groups->count * 64;
    const char* from = reinterpret_cast<const char*>(x) + to.row * row_bytes;
    tiles_.configure(to.num_rows);
    for (int64_t g = 0; g < to.groups->count; ++g) {
      char* sums = reinterpret_cast<char*>(to.sums + g * kMostSums);
      tiles_.template add<TileProduct::kBFloat16, true>(
          {from, row_bytes, weights, kStepBytes, whole}, sums, kSumBytes, fetched, num_lines);
      if (last_bytes) {
        add_last_inputs<TileProduct::kBFloat16>(tiles_, from + whole * kTileBytes, row_bytes,
                                                to.num_rows, last_bytes,
                                                weights + whole * kPanelTileBytes, sums);
      }
      from += size * 2;
      weights += size * kPanelInputBytes<Dot>;
      fetched += num_lines * whole * 64;
    }
  }

  static void add(const Products& products, float* sums) {
    if (products.groups == nullptr) return;
    float* const to = sums + products.row * kPanel;
    if (products.groups->count == 1) {
      add_products<1, Codes>(products.sums, 0, products.groups->scales, products.num_rows, to);
    } else {
      add_products<2, Codes>(products.sums, kMostSums, products.groups->scales, products.num_rows,
                             to);
    }
  }

  const int64_t in_features_, group_size_;
  const GroupLayout<Codes> layout_;
  const Codes codes_;
  BlockRows<Input> rows_;
  alignas(64) float products_[2][kMostGroups * kMostSums];
  TileRegisters tiles_;
};
#endif

}  // namespace pagewire
