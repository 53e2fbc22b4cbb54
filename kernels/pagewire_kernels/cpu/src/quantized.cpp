// Products with weights in fewer bits; see quantized.h.
//
// A code's value is a small whole number, which bfloat16 holds exactly: the products of a group are
// summed as those of dense weights are, then multiplied by its scale. What offsets add is the sum of
// the group's inputs, which all outputs share: it is computed once for a block of rows.
//
// Few rows unpack the codes in registers. For more, a group is unpacked into the first-level cache
// once, and all rows of a block go over it there. Both add the same numbers in the same order.
#include "quantized.h"

#include "linear_finish.h"
#include "linear_tile.h"
#include "share.h"

namespace pagewire {
namespace {

constexpr int64_t kBlockRows = 192;  // the most rows of an item
constexpr int64_t kBlockBytes = 512 << 10;  // of rows, so that they stay in the second-level cache
constexpr int64_t kMaxGroup = 256;
constexpr int64_t kMaxSums = 16384;  // of a block's inputs, one for each row and group
constexpr int64_t kFetchedBytes = 2048;  // ahead, into the first-level cache; measured on a Xeon
constexpr int kChains = 2;  // sums of alternate steps, since an addition waits for the one before

#if defined(__AVX512F__)
constexpr int kTileRows = 6;
#elif defined(__aarch64__)
constexpr int kTileRows = 2;
#else
constexpr int kTileRows = 3;
#endif

// Codes that were unpacked: steps as `Dot` loads them.
struct Unpacked {
  static constexpr int64_t kSteps = 4;
  using Table = CodeTable;

  Unpacked(const char* steps, const Table&) : steps(steps) {}

  template <class Dot, int kStep>
  typename Dot::Operand operand() const {
    return Dot::load(steps + kStep * kStepBytes);
  }

  const char* steps;
};

// How many steps one word of a source has, and how far the next one is.
template <class Dot, class Source>
constexpr int steps_of() {
  if constexpr (std::is_same_v<Source, Unpacked>) {
    return Unpacked::kSteps;
  } else {
    return Source::kInputsPerWord / Dot::kInputsPerStep;
  }
}
template <class Dot, class Source>
constexpr int64_t bytes_of() {
  return std::is_same_v<Source, Unpacked> ? Unpacked::kSteps * kStepBytes : kStepBytes;
}

template <class Dot, int kRows, class Source, int... kStep>
inline __attribute__((always_inline)) void add_word(
    const TileRows<typename Dot::Input, kRows>& rows, const Source& low, const Source& high,
    Floats (&sums)[kRows][kPanelVectors][kChains], std::integer_sequence<int, kStep...>) {
  const auto add_step = [&](auto step) __attribute__((always_inline)) {
    constexpr int kAt = decltype(step)::value;
    const typename Dot::Operand w[] = {low.template operand<Dot, kAt>(),
                                       high.template operand<Dot, kAt>()};
    _Pragma("GCC unroll 16") for (int r = 0; r < kRows; ++r) {
      const auto inputs = Dot::broadcast(load_step(rows[r] + kAt * Dot::kInputsPerStep));
      _Pragma("GCC unroll 16") for (int v = 0; v < kPanelVectors; ++v) {
        Floats& sum = sums[r][v][kAt % kChains];
        sum = Dot::add(inputs, w[v], sum);
      }
    }
  };
  (add_step(std::integral_constant<int, kStep>()), ...);
}

// Add a group's products to the sums of `kRows` rows, [kRows, kPanel]; the group's codes may be
// unpacked; input_sums: of the group's inputs, one for each row, `sums_stride` apart.
template <class Dot, class Source, int kRows>
void add_group(const typename Dot::Input* x, int64_t x_stride, int64_t num_inputs,
               const Group& group, const CodeTable& table, const float* input_sums,
               int64_t sums_stride, float* kept) {
  constexpr int kSteps = steps_of<Dot, Source>();
  static_assert(kPanelVectors == 2 && kSteps % kChains == 0, "the same order for all sources");
  Floats sums[kRows][kPanelVectors][kChains];
  _Pragma("GCC unroll 32") for (int i = 0; i < kRows * kPanelVectors * kChains; ++i) {
    sums[i / kChains / kPanelVectors][i / kChains % kPanelVectors][i % kChains] = zeros();
  }
  TileRows<typename Dot::Input, kRows> rows(x, x_stride);
  constexpr int64_t kInputs = kSteps * Dot::kInputsPerStep;
  const char* weights = group.codes;
  for (int64_t i = 0; i < num_inputs; i += kInputs) {
    __builtin_prefetch(weights + kFetchedBytes, 0, 3);
    __builtin_prefetch(weights + kFetchedBytes + 64, 0, 3);
    const Source low(weights, table), high(weights + kLanes * 4, table);
    add_word<Dot, kRows>(rows, low, high, sums, std::make_integer_sequence<int, kSteps>());
    rows.advance(kInputs);
    weights += bytes_of<Dot, Source>();
  }
  _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
    const Floats scale = group.scales.load(v * kLanes);
    _Pragma("GCC unroll 16") for (int r = 0; r < kRows; ++r) {
      float* at = kept + r * kPanel + v * kLanes;
      store_floats(at, multiply_add(scale, add(sums[r][v][0], sums[r][v][1]), load_floats(at)));
    }
    if (group.offsets.numbers == nullptr) continue;
    const Floats offset = group.offsets.load(v * kLanes);
    _Pragma("GCC unroll 16") for (int r = 0; r < kRows; ++r) {
      float* at = kept + r * kPanel + v * kLanes;
      const Floats inputs = broadcast(input_sums[r * sums_stride]);
      store_floats(at, multiply_add(offset, inputs, load_floats(at)));
    }
  }
}

template <class Dot, class Source, int kRows = kTileRows>
inline auto group_tile_of(int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return group_tile_of<Dot, Source, kRows - 1>(num_rows);
  }
  return add_group<Dot, Source, kRows>;
}

template <class Dot, class Codes, int... kStep>
void unpack_word(const Codes& low, const Codes& high, char* to,
                 std::integer_sequence<int, kStep...>) {
  const auto store_step = [&](auto step) {
    constexpr int kAt = decltype(step)::value;
    Dot::store(to + kAt * kStepBytes, low.template operand<Dot, kAt>());
    Dot::store(to + kAt * kStepBytes + kLanes * 4, high.template operand<Dot, kAt>());
  };
  (store_step(std::integral_constant<int, kStep>()), ...);
}

template <class Dot, class Codes>
void unpack_group(const char* words, int64_t num_words, const CodeTable& table, char* to) {
  constexpr int kSteps = steps_of<Dot, Codes>();
  for (int64_t i = 0; i < num_words; ++i, words += kStepBytes, to += kSteps * kStepBytes) {
    const Codes low(words, table), high(words + kLanes * 4, table);
    unpack_word<Dot>(low, high, to, std::make_integer_sequence<int, kSteps>());
  }
}

// A block of rows, and the sums of its inputs.
template <class Dot>
struct Block {
  const typename Dot::Input* x;
  int64_t x_stride, num_rows;
  const float* input_sums;  // [num_rows, num_groups]
};

// sums: [num_rows, kPanel]
template <class Dot, class Codes>
void multiply_panel(const Block<Dot>& block, const GroupLayout<Codes>& layout, int64_t group_size,
                    const char* panel, const CodeTable& table, float* sums) {
  memset(sums, 0, block.num_rows * kPanel * sizeof(float));
  const int64_t num_tiles = divide_up(block.num_rows, kTileRows);
  const auto few = group_tile_of<Dot, Codes>(block.num_rows);
  alignas(64) char steps[kMaxGroup / Dot::kInputsPerStep * kStepBytes];
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    Group group = layout.at(panel, g);
    const auto* x = block.x + g * group_size;
    const float* input_sums = block.input_sums + g;
    if (num_tiles == 1) {
      few(x, block.x_stride, group_size, group, table, input_sums, layout.num_groups, sums);
      continue;
    }
    unpack_group<Dot, Codes>(group.codes, layout.num_words, table, steps);
    group.codes = steps;
    for (int64_t row = 0; row < block.num_rows; row += kTileRows) {
      const int64_t left = block.num_rows - row;
      const auto add = group_tile_of<Dot, Unpacked>(left < kTileRows ? left : kTileRows);
      add(x + row * block.x_stride, block.x_stride, group_size, group, table,
          input_sums + row * layout.num_groups, layout.num_groups, sums + row * kPanel);
    }
  }
}

template <class Input>
void sum_inputs(const Input* x, int64_t x_stride, int64_t num_rows, int64_t num_groups,
                int64_t group_size, float* sums) {
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t g = 0; g < num_groups; ++g) {
      const Input* from = x + r * x_stride + g * group_size;
      Floats sum = zeros();
      for (int64_t i = 0; i < group_size; i += kLanes) sum = add(sum, widen(from + i));
      sums[r * num_groups + g] = sum_lanes(sum);
    }
  }
}

// Blocks are of about the same size.
template <class Dot>
int64_t rows_per_block(const LinearTask& task, int64_t num_groups) {
  int64_t most = kBlockBytes / (task.in_features * sizeof(typename Dot::Input));
  if (most < kTileRows) most = kTileRows;
  if (most > kBlockRows) most = kBlockRows;
  if (most > kMaxSums / num_groups) most = kMaxSums / num_groups;
  return divide_up(*task.num_rows, divide_up(*task.num_rows, most));
}

template <class Dot, class Codes, class Finish>
void multiply(LinearTask& task, Finish finish) {
  using Input = typename Dot::Input;
  const int64_t num_rows = *task.num_rows;
  if (num_rows == 0) return;
  const Quantization& q = task.quantization;
  const GroupLayout<Codes> layout(q, task.in_features);
  const int64_t block = rows_per_block<Dot>(task, layout.num_groups);
  const int64_t num_panels = Finish::num_panels(task);
  const int64_t num_items = divide_up(num_rows, block) * num_panels;
  const CodeTable table = load_table(q.table);
  alignas(64) float sums[kBlockRows * kPanel], input_sums[kMaxSums];
  int64_t summed_row = -1;
  SharedItems items(task, num_items, task.num_threads);
  for (int64_t item = items.take(); item >= 0; item = items.take()) {
    const int64_t row = item / num_panels * block, panel = item % num_panels;
    const int64_t count = num_rows - row < block ? num_rows - row : block;
    const auto* x = static_cast<const Input*>(task.x) + row * task.x_stride;
    if (q.has_offsets && row != summed_row) {
      sum_inputs(x, task.x_stride, count, layout.num_groups, q.group_size, input_sums);
      summed_row = row;
    }
    const Block<Dot> rows = {x, task.x_stride, count, input_sums};
    const char* weights = static_cast<const char*>(task.weight) + panel * layout.panel_bytes;
    multiply_panel<Dot, Codes>(rows, layout, q.group_size, weights, table, sums);
    if (!items.may_write()) return;
    for (int64_t r = 0; r < count; ++r) finish(task, row + r, panel, sums + r * kPanel);
  }
}

template <class Dot, class Codes>
void multiply_gated(LinearTask& task) {
  with_activation(task.activation, [&](auto function) {
    multiply<Dot, Codes>(task, FinishGated<typename Dot::Input, decltype(function)>());
  });
}

// A number into the place of output `n`.
inline void store_number(char* numbers, int64_t n, float number, int64_t bytes) {
  char* to = numbers + n * bytes;
  if (bytes == 4) {
    memcpy(to, &number, 4);
  } else if (bytes == 2) {
    alignas(64) Float16 rounded[kLanes];
    store_rounded(rounded, broadcast(number));
    memcpy(to, rounded, 2);
  } else {
    *to = static_cast<char>(static_cast<int8_t>(number));
  }
}

// Outputs that the weight does not have are zeros: their scales are.
template <class Codes>
void pack_panel(const QuantizedPackTask& task, int64_t panel) {
  const Quantization& q = task.quantization;
  const GroupLayout<Codes> layout(q, task.in_features);
  const int64_t num_units = q.unit_groups ? layout.num_groups / q.unit_groups : 0;
  char* packed = static_cast<char*>(task.packed) + panel * layout.panel_bytes;
  memset(packed, 0, layout.panel_bytes);
  const auto store = [&](const Scales& scales, int64_t n, const float* numbers, const float* units,
                         int64_t row, int64_t g) {
    if (scales.numbers == nullptr) return;
    const float number = numbers[row * layout.num_groups + g];
    store_number(const_cast<char*>(scales.numbers), n, number, q.scale_bytes);
    if (num_units == 0) return;
    const float unit = units[row * num_units + g / q.unit_groups];
    store_number(const_cast<char*>(scales.units), n, unit, 2);
  };
  for (int64_t n = 0; n < kPanel; ++n) {
    const int64_t row = row_of(task, panel, n);
    if (row < 0) continue;
    const uint8_t* codes = task.codes + row * task.in_features;
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      const Group group = layout.at(packed, g);
      store(group.scales, n, task.scales, task.units, row, g);
      store(group.offsets, n, task.offsets, task.offset_units, row, g);
      for (int64_t w = 0; w < layout.num_words; ++w) {
        uint32_t word = 0;
        for (int64_t i = 0; i < Codes::kInputsPerWord; ++i) {
          word |= static_cast<uint32_t>(*codes++) << bit_of(i, Codes::kBits);
        }
        memcpy(const_cast<char*>(group.codes) + w * kStepBytes + n * 4, &word, 4);
      }
    }
  }
}

template <class Codes>
void pack(QuantizedPackTask& task) {
  const int64_t num_panels = divide_up(task.out_features / task.num_parts, kPanel / task.num_parts);
  for (int64_t i = take_item(task); i < num_panels; i = take_item(task)) {
    pack_panel<Codes>(task, i);
  }
}

inline void store_rounded_number(float* to, float x) { *to = x; }
inline void store_rounded_number(BFloat16* to, float x) { *to = round_to_bfloat16(x); }

// The number of one output.
inline float load_one(const Scales& scales, int64_t n) {
  if (scales.numbers == nullptr) return 0.0f;
  alignas(64) float numbers[kLanes];
  store_floats(numbers, scales.load(n / kLanes * kLanes));
  return numbers[n % kLanes];
}

template <class Codes, class Number>
void gather(GatherTask& task) {
  const Quantization& q = task.quantization;
  const GroupLayout<Codes> layout(q, task.in_features);
  constexpr uint32_t kMask = (1u << Codes::kBits) - 1;
  for (int64_t i = take_item(task); i < task.batch->num_rows; i = take_item(task)) {
    const int64_t id = task.batch->token_ids[i], n = id % kPanel;
    Number* y = static_cast<Number*>(task.y) + i * task.y_stride;
    if (id < 0 || id >= task.out_features) {
      memset(y, 0, task.in_features * sizeof(Number));
      continue;
    }
    const char* panel = static_cast<const char*>(task.packed) + id / kPanel * layout.panel_bytes;
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      const Group group = layout.at(panel, g);
      const float scale = load_one(group.scales, n), offset = load_one(group.offsets, n);
      for (int64_t w = 0; w < layout.num_words; ++w) {
        uint32_t word;
        memcpy(&word, group.codes + w * kStepBytes + n * 4, 4);
        for (int64_t k = 0; k < Codes::kInputsPerWord; ++k) {
          const float value = Codes::value(word >> bit_of(k, Codes::kBits) & kMask, q.table);
          store_rounded_number(y++, value * scale + offset);
        }
      }
    }
  }
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

#define PAGEWIRE_QUANTIZED(codes, Codes) \
  PAGEWIRE_KERNEL pw_linear_float32_##codes(LinearTask* task) { \
    multiply<Float32Dot, Codes>(*task, Finish<float, float>()); \
  } \
  PAGEWIRE_KERNEL pw_linear_bfloat16_##codes(LinearTask* task) { \
    multiply<BFloat16Dot, Codes>(*task, Finish<BFloat16, BFloat16>()); \
  } \
  PAGEWIRE_KERNEL pw_linear_bfloat16_float32_##codes(LinearTask* task) { \
    multiply<BFloat16Dot, Codes>(*task, Finish<BFloat16, float>()); \
  } \
  PAGEWIRE_KERNEL pw_gated_linear_float32_##codes(LinearTask* task) { \
    multiply_gated<Float32Dot, Codes>(*task); \
  } \
  PAGEWIRE_KERNEL pw_gated_linear_bfloat16_##codes(LinearTask* task) { \
    multiply_gated<BFloat16Dot, Codes>(*task); \
  } \
  PAGEWIRE_KERNEL pw_pack_##codes(QuantizedPackTask* task) { pack<Codes>(*task); } \
  PAGEWIRE_KERNEL pw_gather_float32_##codes(GatherTask* task) { gather<Codes, float>(*task); } \
  PAGEWIRE_KERNEL pw_gather_bfloat16_##codes(GatherTask* task) { gather<Codes, BFloat16>(*task); }

PAGEWIRE_QUANTIZED(int4, Codes4)
PAGEWIRE_QUANTIZED(int8, Codes8)
