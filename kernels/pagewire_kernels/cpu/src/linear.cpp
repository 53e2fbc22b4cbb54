// Products with packed weights; see linear.h.
//
// A work item is a panel of outputs for a block of rows. Rows are computed in tiles whose sums fit into
// registers. A few rows are one tile, which is bound by reading the panel from memory. With more rows,
// the panel is in the second-level cache: while one item is computed, the panel of the thread's next
// item is prefetched. A thread takes consecutive panels.
#include "linear_finish.h"
#include "linear_floats.h"
#include "linear_tile.h"
#include "linear_tiles.h"
#include "share.h"

namespace pagewire {
namespace {

#if defined(PAGEWIRE_HAS_TILES)
constexpr int64_t kBlockRows = 384;  // the most rows of an item
constexpr int64_t kBlockBytes = 1 << 20;  // of rows, so that they stay in the second-level cache
#else
constexpr int64_t kBlockRows = 192;
constexpr int64_t kBlockBytes = 512 << 10;
#endif
constexpr int64_t kStretchSteps = 2048;  // of a panel, for the same reason
constexpr int64_t kLinesPerStep = kStepBytes / 64;

// A part of a panel, and the memory that is read after it.
struct Stretch {
  const char* weights;
  int64_t first_input;
  int64_t num_inputs;
  const char* next;
};

// A few rows: one tile, which prefetches a little ahead, or leaves that to the processor.
template <class Dot>
void multiply_once(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                   const Stretch& all, float* sums) {
  if (num_rows <= kStreamedRows) {
    tile_of<Dot, 0>(num_rows)(x, x_stride, all.weights, all.num_inputs, nullptr, sums);
    return;
  }
  const AddTile<Dot> add = tile_of<Dot, kLinesPerStep>(num_rows);
  constexpr int64_t ahead_inputs = kFetchDistance / kStepBytes * Dot::kInputsPerStep;
  const int64_t left = all.num_inputs > ahead_inputs ? all.num_inputs - ahead_inputs : 0;
  const int64_t most = left - left % Dot::kInputsPerStep;
  add(x, x_stride, all.weights, most, all.weights + kFetchDistance, sums);
  const char* rest = all.weights + most / Dot::kInputsPerStep * kStepBytes;
  add(x + most, x_stride, rest, all.num_inputs - most, all.next, sums);
}

// Many rows: the first tiles prefetch the next stretch.
template <class Dot>
void multiply_tiles(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                    const Stretch& part, float* sums) {
  const int64_t num_tiles = divide_up(num_rows, Dot::kMaxRows);
  const int64_t small = num_rows / num_tiles, num_larger = num_rows % num_tiles;
  const int64_t num_fetched = part.num_inputs / Dot::kInputsPerStep * 64;
  int64_t row = 0;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t size = small + (i < num_larger);
    const bool fetches = i < kLinesPerStep;
    const AddTile<Dot> add = fetches ? tile_of<Dot, 1>(size) : tile_of<Dot, 0>(size);
    add(x + row * x_stride + part.first_input, x_stride, part.weights, part.num_inputs,
        part.next + i * num_fetched, sums + row * kPanel);
    row += size;
  }
}

// Computes the rows of a block for one panel.
template <class Dot>
void multiply_panel(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                    const char* panel, const char* next_panel, int64_t num_inputs, float* sums) {
  if (num_rows <= Dot::kMaxRows) {
    multiply_once<Dot>(x, x_stride, num_rows, {panel, 0, num_inputs, next_panel}, sums);
    return;
  }
  constexpr int64_t kSize = kStretchSteps * Dot::kInputsPerStep;
  for (int64_t first = 0; first < num_inputs; first += kSize) {
    const char* weights = panel + first / Dot::kInputsPerStep * kStepBytes;
    const int64_t left = num_inputs - first;
    if (left <= kSize) {
      multiply_tiles<Dot>(x, x_stride, num_rows, {weights, first, left, next_panel}, sums);
    } else {
      const char* next = weights + kStretchSteps * kStepBytes;
      multiply_tiles<Dot>(x, x_stride, num_rows, {weights, first, kSize, next}, sums);
    }
  }
}

template <class Dot>
struct PanelProduct {
  void operator()(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                  const char* panel, const char* next_panel, int64_t num_inputs, float* sums) {
    memset(sums, 0, num_rows * kPanel * sizeof(float));
    multiply_panel<Dot>(x, x_stride, num_rows, panel, next_panel, num_inputs, sums);
  }
};

#if defined(PAGEWIRE_HAS_TILES)
template <>
struct PanelProduct<BFloat16Dot> {
  void operator()(const BFloat16* x, int64_t x_stride, int64_t num_rows, const char* panel,
                  const char* next_panel, int64_t num_inputs, float* sums) {
    sum_panel<TileProduct::kBFloat16>(tiles, reinterpret_cast<const char*>(x), x_stride * 2,
                                      num_rows, num_inputs * 2, panel, next_panel, sums);
  }

  TileRegisters tiles;
};
#endif

// Products with the panels of a weight that is packed as it is multiplied.
template <class D>
class DenseProduct {
 public:
  using Dot = D;

  explicit DenseProduct(const LinearTask& task)
      : task_(task), panel_bytes_(divide_up(task.in_features, Dot::kInputsPerStep) * kStepBytes) {}

  // sums: [num_rows, kPanel]
  void operator()(const typename Dot::Input* x, int64_t num_rows, int64_t panel, int64_t next_panel,
                  float* sums) {
    const auto* weights = static_cast<const char*>(task_.weight);
    product_(x, task_.x_stride, num_rows, weights + panel * panel_bytes_,
             weights + next_panel * panel_bytes_, task_.in_features, sums);
  }

 private:
  const LinearTask& task_;
  const int64_t panel_bytes_;
  PanelProduct<Dot> product_;
};

// Divides rows into blocks of about equal size.
template <class Dot>
int64_t rows_per_block(int64_t num_rows, int64_t in_features) {
  int64_t most = kBlockBytes / (in_features * sizeof(typename Dot::Input));
  if (most > kBlockRows) most = kBlockRows;
  if (most < Dot::kMaxRows) most = Dot::kMaxRows;
  return even_part(num_rows, most);
}

template <class Product, class Finish>
void multiply(LinearTask& task, Finish finish) {
  using Dot = typename Product::Dot;
  const int64_t num_rows = *task.num_rows;
  if (num_rows == 0) return;
  const int64_t block = rows_per_block<Dot>(num_rows, task.in_features);
  const int64_t num_panels = Finish::num_panels(task);
  const int64_t num_items = divide_up(num_rows, block) * num_panels;
  alignas(64) float sums[kBlockRows * kPanel];
  Product product(task);
  SharedItems items(task, num_items, task.num_threads);
  for (int64_t item = items.take(); item >= 0; item = items.take()) {
    const int64_t row = item / num_panels * block, panel = item % num_panels;
    const int64_t count = num_rows - row < block ? num_rows - row : block;
    const auto* x = static_cast<const typename Dot::Input*>(task.x) + row * task.x_stride;
    product(x, count, panel, items.following(item) % num_panels, sums);
    if (!items.may_write()) return;
    for (int64_t r = 0; r < count; ++r) finish(task, row + r, panel, sums + r * kPanel);
  }
}

template <class Product>
void multiply_gated(LinearTask& task) {
  with_activation(task.activation, [&](auto function) {
    multiply<Product>(task, FinishGated<typename Product::Dot::Input, decltype(function)>());
  });
}

template <class Dot>
using Float4Product = FloatsProduct<Dot, FloatCodes4>;
template <class Dot>
using Float8Product = FloatsProduct<Dot, FloatCodes8>;

}  // namespace
}  // namespace pagewire

using namespace pagewire;

// `bfloat16_float32` is for the LM head: sums of bfloat16 products are not rounded.
#define PAGEWIRE_LINEAR(suffix, Product) \
  PAGEWIRE_KERNEL pw_linear_float32##suffix(LinearTask* task) { \
    multiply<Product<Float32Dot>>(*task, Finish<float, float>()); \
  } \
  PAGEWIRE_KERNEL pw_linear_bfloat16##suffix(LinearTask* task) { \
    multiply<Product<BFloat16Dot>>(*task, Finish<BFloat16, BFloat16>()); \
  } \
  PAGEWIRE_KERNEL pw_linear_bfloat16_float32##suffix(LinearTask* task) { \
    multiply<Product<BFloat16Dot>>(*task, Finish<BFloat16, float>()); \
  } \
  PAGEWIRE_KERNEL pw_gated_linear_float32##suffix(LinearTask* task) { \
    multiply_gated<Product<Float32Dot>>(*task); \
  } \
  PAGEWIRE_KERNEL pw_gated_linear_bfloat16##suffix(LinearTask* task) { \
    multiply_gated<Product<BFloat16Dot>>(*task); \
  }

PAGEWIRE_LINEAR(, DenseProduct)
PAGEWIRE_LINEAR(_float4, Float4Product)
PAGEWIRE_LINEAR(_float8, Float8Product)
