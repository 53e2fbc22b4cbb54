// Products with packed weights; see linear.h.
//
// The rows of a block are computed in tiles whose sums fit into registers. A few rows are one tile, which
// is bound by reading the panel from memory. With more rows, the panel is in the second-level cache.
#include "linear_floats.h"
#include "linear_multiply.h"
#include "linear_tile.h"
#include "linear_tiles.h"

namespace pagewire {
namespace {

constexpr int64_t kStretchSteps = 2048;  // of a panel, for the same reason
constexpr int64_t kLinesPerStep = kStepBytes / 64;

// A part of a panel, and the memory that is read after it.
struct Stretch {
  bool begins() const { return first_input == 0; }

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
    tile_of<Dot, 0>(num_rows)(x, x_stride, all.weights, all.num_inputs, nullptr, sums, true);
    return;
  }
  const AddTile<Dot> add = tile_of<Dot, kLinesPerStep>(num_rows);
  constexpr int64_t ahead_inputs = kFetchDistance / kStepBytes * Dot::kInputsPerStep;
  const int64_t left = all.num_inputs > ahead_inputs ? all.num_inputs - ahead_inputs : 0;
  const int64_t most = left - left % Dot::kInputsPerStep;
  add(x, x_stride, all.weights, most, all.weights + kFetchDistance, sums, true);
  const char* rest = all.weights + most / Dot::kInputsPerStep * kStepBytes;
  add(x + most, x_stride, rest, all.num_inputs - most, all.next, sums, false);
}

// Many rows: the first tiles prefetch the next stretch. In the first stretch, each tile prefetches the
// lines that its outputs are written to, one or two per row, which the processor does not foresee.
template <class Dot>
void multiply_tiles(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                    const Stretch& part, const OutputPlace& outputs, float* sums) {
  const int64_t num_tiles = divide_up(num_rows, Dot::kMaxRows);
  const int64_t small = num_rows / num_tiles, num_larger = num_rows % num_tiles;
  const int64_t num_fetched = part.num_inputs / Dot::kInputsPerStep * 64;
  int64_t row = 0;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t size = small + (i < num_larger);
    if (part.begins()) outputs.fetch(row, size);
    const bool fetches = i < kLinesPerStep;
    const AddTile<Dot> add = fetches ? tile_of<Dot, 1>(size) : tile_of<Dot, 0>(size);
    add(x + row * x_stride + part.first_input, x_stride, part.weights, part.num_inputs,
        part.next + i * num_fetched, sums + row * kPanel, part.begins());
    row += size;
  }
}

// Computes the rows of a block for one panel.
template <class Dot>
void multiply_panel(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                    const char* panel, const Upcoming& upcoming, int64_t num_inputs, float* sums) {
  const OutputPlace& outputs = upcoming.outputs;
  if (num_rows <= Dot::kMaxRows) {
    multiply_once<Dot>(x, x_stride, num_rows, {panel, 0, num_inputs, upcoming.panel}, sums);
    return;
  }
  constexpr int64_t kSize = kStretchSteps * Dot::kInputsPerStep;
  for (int64_t first = 0; first < num_inputs; first += kSize) {
    const char* weights = panel + first / Dot::kInputsPerStep * kStepBytes;
    const int64_t left = num_inputs - first;
    if (left <= kSize) {
      multiply_tiles<Dot>(x, x_stride, num_rows, {weights, first, left, upcoming.panel}, outputs,
                          sums);
    } else {
      const char* next = weights + kStretchSteps * kStepBytes;
      multiply_tiles<Dot>(x, x_stride, num_rows, {weights, first, kSize, next}, outputs, sums);
    }
  }
}

template <class Dot>
struct PanelProduct {
  void operator()(const typename Dot::Input* x, int64_t x_stride, int64_t num_rows,
                  const char* panel, const Upcoming& upcoming, int64_t num_inputs, float* sums) {
    multiply_panel<Dot>(x, x_stride, num_rows, panel, upcoming, num_inputs, sums);
  }
};

#if defined(PAGEWIRE_HAS_TILES)
template <>
struct PanelProduct<BFloat16Dot> {
  void operator()(const BFloat16* x, int64_t x_stride, int64_t num_rows, const char* panel,
                  const Upcoming& upcoming, int64_t num_inputs, float* sums) {
    sum_panel<TileProduct::kBFloat16>(tiles, reinterpret_cast<const char*>(x), x_stride * 2,
                                      num_rows, num_inputs * 2, panel, upcoming.panel, sums);
  }

  TileRegisters tiles;
};
#endif

// Products with the panels of a weight that is packed as it is multiplied.
template <class NumberType>
class DenseProduct {
 public:
  using Input = NumberType;
  using Dot = DotOf<Input>;
  static constexpr int64_t kMostRows = kBlockRows;

  explicit DenseProduct(const LinearTask& task)
      : in_features_(task.in_features),
        panel_bytes_(divide_up(task.in_features, Dot::kInputsPerStep) * kStepBytes) {}

  int64_t panel_bytes() const { return panel_bytes_; }
  int64_t most_rows() const { return most_rows_of<Dot>(in_features_); }

  void set_rows(const InputRows<Input>& rows, int64_t count) { rows_.set(rows, count, in_features_); }

  void operator()(const char* panel, const Upcoming& upcoming, float* sums) {
    product_(rows_.x, rows_.stride, rows_.num_rows, panel, upcoming, in_features_, sums);
  }

 private:
  const int64_t in_features_, panel_bytes_;
  BlockRows<Input> rows_;
  PanelProduct<Dot> product_;
};

template <class Input>
using Float4Product = FloatsProduct<DotOf<Input>, FloatCodes4>;
template <class Input>
using Float8Product = FloatsProduct<DotOf<Input>, FloatCodes8>;

// The loop of `multiply` for heads, of which each has its weight, and its part of the rows of x and y.
template <class Number>
void multiply_heads(HeadsTask& task) {
  using Product = DenseProduct<Number>;
  const int64_t num_rows = *task.num_rows;
  if (num_rows == 0) return;
  alignas(64) float sums[Product::kMostRows * kPanel];
  Product product(task);
  const Finish<Number, Number> finish;
  const int64_t block_rows = even_part(num_rows, product.most_rows());
  const int64_t num_panels = finish.num_panels(task), num_blocks = divide_up(num_rows, block_rows);
  const auto* weights = static_cast<const char*>(task.weight);
  const auto panel_at = [&](int64_t item) {
    const int64_t head = item / (num_panels * num_blocks);
    return weights + head * task.head_bytes + item % num_panels * product.panel_bytes();
  };
  LinearTask of_head = task;
  int64_t current = -1, head = 0, row = 0, count = 0;  // of the block of a head
  SharedItems items(task, task.num_heads * num_blocks * num_panels, task.num_threads);
  for (int64_t item = items.take(); item >= 0; item = items.take()) {
    if (item / num_panels != current) {
      current = item / num_panels;
      head = current / num_blocks;
      row = current % num_blocks * block_rows;
      count = num_rows - row < block_rows ? num_rows - row : block_rows;
      const auto* x = static_cast<const Number*>(task.x) + head * task.x_head_stride;
      product.set_rows({x + row * task.x_stride, task.x_stride, nullptr}, count);
      of_head.y = static_cast<Number*>(task.y) + head * task.y_head_stride;
      of_head.deltas.inner = static_cast<const Number*>(task.deltas.inner) +
                             head * (task.deltas.inner_stride / task.num_heads);
    }
    const int64_t panel = item % num_panels, next = items.following(item);
    const OutputPlace outputs = place_of<Finish<Number, Number>>(of_head, row, panel);
    product(panel_at(item), {panel_at(next), outputs}, sums);
    add_adapters<Finish<Number, Number>>(of_head, row, count, panel, next % num_panels, sums, head,
                                         task.num_heads);
    if (!items.may_write()) return;
    for (int64_t r = 0; r < count; ++r) {
      finish(of_head, row + r, panel, sums + r * kPanel);
    }
  }
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNELS(linear_heads, HeadsTask, multiply_heads)

PAGEWIRE_LINEAR(, DenseProduct)
PAGEWIRE_LINEAR(_float4, Float4Product)
PAGEWIRE_LINEAR(_float8, Float8Product)
