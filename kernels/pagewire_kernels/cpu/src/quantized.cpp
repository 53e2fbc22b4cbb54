// Products with weights in fewer bits; see quantized.h.
//
// A group's products are summed (quantized_dot.h), then multiplied by its scale. What offsets add is
// the sum of the group's inputs, which all outputs share.
//
// Few rows unpack the codes in registers. For more, a group is unpacked into the first-level cache
// once, and all rows of a block go over it there. Both add the same numbers in the same order.
#include "quantized.h"

#include "linear_multiply.h"
#include "quantized_dot.h"
#include "quantized_tiles.h"

namespace pagewire {
namespace {

constexpr int64_t kBlockRows = 192;  // the most rows of an item
#if defined(PAGEWIRE_HAS_TILES)
constexpr int64_t kBlockBytes = 1 << 20;  // of rows, so that they stay in the second-level cache
#else
constexpr int64_t kBlockBytes = 512 << 10;
#endif

template <class Dot>
constexpr int64_t kOperandBytes = sizeof(typename Dot::Operand);

// The most rows that unpack codes in registers. Tiles take as long for one row as for several.
#if defined(PAGEWIRE_HAS_TILES)
template <class Dot>
constexpr int kFewRows = 4;
#else
template <class Dot>
constexpr int kFewRows = Dot::kRegisterRows;
#endif

template <class Dot>
constexpr int64_t kTurnedStep = 4 * Dot::kTurnedBytes;  // of a row

// Of a block's rows, how many are multiplied at a time.
template <class Dot>
int64_t rows_together(int64_t num_rows) {
  return even_part(num_rows, Dot::kRegisterRows);
}

// A block of rows, turned into what `Dot` takes. The rows that are multiplied together have a step's
// inputs side by side: all are read sequentially.
template <class Dot>
struct Block {
  // Of each group `rows_together` after the other, and of these [group_size / 4][rows] steps; or as
  // `turn_for_tiles` has them.
  const char* inputs;
  const typename Dot::Inputs* groups;  // [num_groups][num_rows]
  int64_t num_rows;
#if defined(PAGEWIRE_HAS_TILES)
  GroupTiles<Dot>* tiles = nullptr;  // of the thread
#endif
};

// Codes in registers of bytes.
template <class Dot, class Codes>
struct Packed {
  static constexpr int64_t kInputs = Codes::kInputs;
  static constexpr int64_t kBytes = Codes::kWords * kStepBytes;

  template <int kRegister>
  static typename Dot::Operand operand(const char* words, int v, const ByteTable& table) {
    return Dot::operand(Codes::template bytes<kRegister>(words + v * kLanes * 4, table));
  }
};

// Codes that were unpacked.
template <class Dot>
struct Unpacked {
  static constexpr int64_t kInputs = 8;
  static constexpr int64_t kBytes = 2 * kPanelVectors * kOperandBytes<Dot>;

  template <int kRegister>
  static typename Dot::Operand operand(const char* operands, int v, const ByteTable&) {
    return Dot::load(operands + (kRegister * kPanelVectors + v) * kOperandBytes<Dot>);
  }
};

// The scales and offsets of a group's outputs, read once for all rows of a block.
struct GroupNumbers {
  GroupNumbers() = default;
  explicit GroupNumbers(const Group& group) : has_offsets(group.offsets.numbers != nullptr) {
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      scales[v] = group.scales.load(v * kLanes);
      offsets[v] = has_offsets ? group.offsets.load(v * kLanes) : zeros();
    }
  }

  Floats scales[kPanelVectors], offsets[kPanelVectors];
  bool has_offsets;
};

// Add a group's total to a register of a row's sums.
inline void add_scaled(Floats total, Floats scale, bool has_offsets, Floats offset, float row_sum,
                       float* at) {
  const Floats scaled = multiply_add(scale, total, load_floats(at));
  store_floats(at, has_offsets ? multiply_add(offset, broadcast(row_sum), scaled) : scaled);
}

// Sums of alternate registers, since an addition waits for the one before.
template <class Dot, int kRows>
using Sums = typename Dot::Sum[kRows][kPanelVectors][2];

template <class Dot, class Source, int kRows, int kRegister>
inline __attribute__((always_inline)) void add_register(
    const char* inputs, const char* codes, const ByteTable& table, Sums<Dot, kRows>& sums) {
  // One of exact sums is enough where the registers are scarce.
  constexpr int kChain = Dot::kIsExact && kRows > 2 ? 0 : kRegister % 2;
  typename Dot::Operand weights[kPanelVectors];
  _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
    weights[v] = Source::template operand<kRegister>(codes, v, table);
  }
  _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
    const auto step = Dot::load_step(inputs + (kRegister * kRows + r) * kTurnedStep<Dot>);
    _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
      Dot::add(step, weights[v], sums[r][v][kChain]);
    }
  }
}

template <class Dot, class Source, int kRows, int... kRegister>
inline __attribute__((always_inline)) void add_registers(
    const char* inputs, const char* codes, const ByteTable& table, Sums<Dot, kRows>& sums,
    std::integer_sequence<int, kRegister...>) {
  (add_register<Dot, Source, kRows, kRegister>(inputs, codes, table, sums), ...);
}

// Add a group's products to the sums of `kRows` rows from `row` on, [kRows, kPanel].
template <class Dot, class Source, int kRows>
inline __attribute__((always_inline)) void add_group(
    const Block<Dot>& block, int64_t row, int64_t g, int64_t num_inputs, const char* codes,
    const GroupNumbers& numbers, const ByteTable& table, float* kept) {
  asm("" : "+r"(kept));  // or GCC stores the sums a second time, for the group that follows
  const typename Dot::Inputs* turned = block.groups + g * block.num_rows + row;
  Sums<Dot, kRows> sums;
  _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
    _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
      sums[r][v][0] = Dot::first_sum(turned[r]);
      sums[r][v][1] = Dot::no_sum();
    }
  }
  const char* inputs =
      block.inputs + (g * block.num_rows + row) * num_inputs * Dot::kTurnedBytes;
  for (int64_t i = 0; i < num_inputs; i += Source::kInputs) {
    if constexpr (!std::is_same_v<Source, Unpacked<Dot>>) {
      fetch_ahead<Source::kBytes>(codes);
    }
    add_registers<Dot, Source, kRows>(inputs, codes, table, sums,
                                      std::make_integer_sequence<int, Source::kInputs / 4>());
    inputs += Source::kInputs * kRows * Dot::kTurnedBytes;
    codes += Source::kBytes;
  }
  _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
      const typename Dot::Inputs& of_row = turned[r];
      const Floats total = Dot::total(sums[r][v][0], sums[r][v][1], of_row);
      add_scaled(total, numbers.scales[v], numbers.has_offsets, numbers.offsets[v], of_row.sum,
                 kept + r * kPanel + v * kLanes);
    }
  }
}

template <class Dot, class Codes, class Change, int... kRegister>
inline void unpack_words(const char* words, const ByteTable& table, Change change, char* to,
                         std::integer_sequence<int, kRegister...>) {
  const auto store = [&](auto number) {
    constexpr int kAt = decltype(number)::value;
    _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
      Dot::store(to + (kAt * kPanelVectors + v) * kOperandBytes<Dot>,
                 change(Packed<Dot, Codes>::template operand<kAt>(words, v, table)));
    }
  };
  (store(std::integral_constant<int, kRegister>()), ...);
}

template <class Dot, class Codes, class Change>
void unpack_group(const char* words, int64_t num_inputs, const ByteTable& table, Change change,
                  char* to) {
  constexpr int kRegisters = Codes::kInputs / 4;
  for (int64_t i = 0; i < num_inputs; i += Codes::kInputs) {
    fetch_ahead<Packed<Dot, Codes>::kBytes>(words);
    unpack_words<Dot, Codes>(words, table, change, to,
                             std::make_integer_sequence<int, kRegisters>());
    words += Packed<Dot, Codes>::kBytes;
    to += kRegisters * kPanelVectors * kOperandBytes<Dot>;
  }
}

// What multiplies a panel; sums: [block.num_rows, kPanel].
template <class Dot, class Codes>
using MultiplyPanel = void (*)(const Block<Dot>& block, const GroupLayout<Codes>& layout,
                               const Quantization& q, const char* panel, const ByteTable& table,
                               float* sums);

template <class Dot, class Codes, int kRows>
void multiply_few(const Block<Dot>& block, const GroupLayout<Codes>& layout, const Quantization& q,
                  const char* panel, const ByteTable& table, float* sums) {
  // A call for each group would cost as much as a tenth of a small group's products.
  const auto add = [&](int64_t g, const Group& group) __attribute__((always_inline)) {
    for (const char* at = group.scales.numbers; at < group.codes; at += 64) fetch_ahead<64>(at);
    add_group<Dot, Packed<Dot, Codes>, kRows>(block, 0, g, q.group_size, group.codes,
                                              GroupNumbers(group), table, sums);
  };
  layout.for_each_group(panel, add);
}

template <class Dot, int kRows>
void add_unpacked(const Block<Dot>& block, int64_t row, int64_t num_rows, int64_t g,
                  int64_t group_size, const char* operands, const GroupNumbers& numbers, float* sums) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return add_unpacked<Dot, kRows - 1>(block, row, num_rows, g, group_size, operands, numbers,
                                          sums);
    }
  }
  add_group<Dot, Unpacked<Dot>, kRows>(block, row, g, group_size, operands, numbers, ByteTable(),
                                       sums + row * kPanel);
}

template <class Dot, class Codes>
void multiply_many(const Block<Dot>& block, const GroupLayout<Codes>& layout, const Quantization& q,
                   const char* panel, const ByteTable& table, float* sums) {
  const int64_t most = rows_together<Dot>(block.num_rows);
  alignas(64) char operands[kMaxGroup / 4 * kPanelVectors * kOperandBytes<Dot>];
  layout.for_each_group(panel, [&](int64_t g, const Group& group) {
    const auto as_is = [](const typename Dot::Operand& codes) { return codes; };
    unpack_group<Dot, Codes>(group.codes, q.group_size, table, as_is, operands);
    const GroupNumbers numbers(group);
    for (int64_t row = 0; row < block.num_rows; row += most) {
      const int64_t left = block.num_rows - row;
      add_unpacked<Dot, Dot::kRegisterRows>(block, row, left < most ? left : most, g, q.group_size,
                                            operands, numbers, sums);
    }
  });
}

#if defined(PAGEWIRE_HAS_TILES)
// Scale a group's sums of some rows and add them to the rows', [num_rows, kPanel].
template <class Dot, bool kHasOffsets>
inline __attribute__((always_inline)) void add_sums(
    const GroupTiles<Dot>& tiles, const char* sums, const GroupNumbers& numbers,
    const typename Dot::Inputs* rows, int64_t num_rows, float* kept) {
  for (int64_t r = 0; r < num_rows; ++r, kept += kPanel) {
    _Pragma("GCC unroll 2") for (int64_t v = 0; v < kPanelVectors; ++v) {
      const Floats total = Dot::total(tiles.load(sums, v, r), rows[r]);
      add_scaled(total, numbers.scales[v], kHasOffsets, numbers.offsets[v], rows[r].sum,
                 kept + v * kLanes);
    }
  }
}

// Tiles load from memory what was stored there, and the other way round, only once the stores are
// done. So a group's codes are unpacked before the products of the group before, and sums are added
// after the products that follow.
//
// A call between the instructions for tiles would wait for them: everything is inlined.
template <class Dot, class Codes, bool kHasOffsets>
void multiply_with_tiles(const Block<Dot>& block, const GroupLayout<Codes>& layout,
                         const Quantization& q, const char* panel, const ByteTable& table,
                         float* kept) {
  using Tiles = GroupTiles<Dot>;
  const int64_t tile_rows = Tiles::rows_per_tile(block.num_rows);
  Tiles& tiles = *block.tiles;
  tiles.configure(q.group_size, tile_rows);
  const Words zero = broadcast_word(static_cast<int32_t>(q.zero * 0x01010101));
  const auto less_zero = [zero](Words bytes) { return _mm512_sub_epi8(bytes, zero); };
  alignas(64) char codes[2][kMaxGroup * kPanel], sums[2][Tiles::kSumsBytes];
  const char* inputs = block.inputs;
  GroupNumbers numbers[4];  // of group `g` at g % 4: those of three groups are needed at a time
  struct Product {
    int64_t g, row;
  } last{};
  int64_t num_products = 0;
  const auto add_last = [&]() __attribute__((always_inline)) {
    if (num_products == 0) return;
    const int64_t left = block.num_rows - last.row;
    add_sums<Dot, kHasOffsets>(tiles, sums[(num_products - 1) % 2], numbers[last.g % 4],
                               block.groups + last.g * block.num_rows + last.row,
                               left < tile_rows ? left : tile_rows, kept + last.row * kPanel);
  };
  const auto multiply_group = [&](int64_t g) __attribute__((always_inline)) {
    for (int64_t row = 0; row < block.num_rows; row += tile_rows) {
      tiles.multiply(inputs, codes[g % 2], sums[num_products % 2]);
      inputs += Tiles::kDigits * tile_rows * q.group_size;
      add_last();
      last = {g, row};
      ++num_products;
    }
  };
  layout.for_each_group(panel, [&](int64_t g, const Group& group) {
    unpack_group<Dot, Codes>(group.codes, q.group_size, table, less_zero, codes[g % 2]);
    numbers[g % 4] = GroupNumbers(group);
    if (g > 0) multiply_group(g - 1);
  });
  multiply_group(layout.num_groups - 1);
  add_last();
}
#endif

template <class Dot, class Codes, int kRows = kFewRows<Dot>>
MultiplyPanel<Dot, Codes> panel_product_of(int64_t num_rows, [[maybe_unused]] bool has_offsets) {
#if defined(PAGEWIRE_HAS_TILES)
  if (num_rows > kFewRows<Dot>) {
    return has_offsets ? multiply_with_tiles<Dot, Codes, true>
                       : multiply_with_tiles<Dot, Codes, false>;
  }
#else
  if (num_rows > kFewRows<Dot>) return multiply_many<Dot, Codes>;
#endif
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return panel_product_of<Dot, Codes, kRows - 1>(num_rows, has_offsets);
  }
  return multiply_few<Dot, Codes, kRows>;
}

#if defined(PAGEWIRE_HAS_TILES)
// What `GroupTiles` multiply, of each group the rows of a tile after the other.
template <class Dot, class Input>
Block<Dot> turn_for_tiles(const InputRows<Input>& rows, int64_t num_rows, int64_t num_groups,
                          const Quantization& q) {
  constexpr int64_t kDigits = Dot::kDigits;
  const int64_t tile_rows = GroupTiles<Dot>::rows_per_tile(num_rows);
  const int64_t depth = tile_depth(q.group_size), digit_bytes = tile_rows * depth;
  const int64_t tile_bytes = kDigits * tile_rows * q.group_size;
  const int64_t group_bytes = divide_up(num_rows, tile_rows) * tile_bytes;
  const auto size_of_inputs = static_cast<int64_t>(sizeof(typename Dot::Inputs));
  char* inputs = working_memory(num_groups * (group_bytes + num_rows * size_of_inputs));
  auto* groups = reinterpret_cast<typename Dot::Inputs*>(inputs + num_groups * group_bytes);
  const Words by_digit = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t r = 0; r < num_rows; ++r) {
    const Input* x = rows[r];
    for (int64_t g = 0; g < num_groups; ++g) {
      char* to = inputs + g * group_bytes + r / tile_rows * tile_bytes + r % tile_rows * depth;
      int64_t at = 0;
      const auto store = [=](Words of_fours) mutable {
        alignas(64) char digits[64];
        _mm512_store_si512(digits, _mm512_permutexvar_epi32(by_digit, of_fours));
        for (int d = 0; d < kDigits; ++d) memcpy(to + d * digit_bytes + at, digits + d * kLanes, kLanes);
        at += kLanes;
        if (at == depth) at = 0, to += kDigits * digit_bytes;
      };
      groups[g * num_rows + r] = Dot::turn(x + g * q.group_size, q.group_size, q.zero, store);
    }
  }
  return {inputs, groups, num_rows};
}
#endif

template <class Dot, class Input>
Block<Dot> turn_rows(const InputRows<Input>& rows, int64_t num_rows, int64_t num_groups,
                     const Quantization& q) {
#if defined(PAGEWIRE_HAS_TILES)
  if (num_rows > kFewRows<Dot>) return turn_for_tiles<Dot, Input>(rows, num_rows, num_groups, q);
#endif
  const int64_t row_bytes = q.group_size * Dot::kTurnedBytes, num_turned = num_groups * num_rows;
  const auto size_of_inputs = static_cast<int64_t>(sizeof(typename Dot::Inputs));
  char* inputs = working_memory(num_turned * (row_bytes + size_of_inputs));
  auto* groups = reinterpret_cast<typename Dot::Inputs*>(inputs + num_turned * row_bytes);
  const int64_t most = rows_together<Dot>(num_rows);
  alignas(64) char row[kMaxGroup * Dot::kTurnedBytes];
  for (int64_t r = 0; r < num_rows; ++r) {
    const Input* x = rows[r];
    const int64_t first = r / most * most, left = num_rows - first;
    const int64_t together = left < most ? left : most;
    for (int64_t g = 0; g < num_groups; ++g) {
      groups[g * num_rows + r] = Dot::turn(x + g * q.group_size, q.group_size, q.zero, row);
      char* to = inputs + (g * num_rows + first) * row_bytes + (r - first) * kTurnedStep<Dot>;
      for (int64_t at = 0; at < row_bytes; at += kTurnedStep<Dot>) {
        memcpy(to + at * together, row + at, kTurnedStep<Dot>);
      }
    }
  }
  return {inputs, groups, num_rows};
}

// Products with the panels of a weight.
template <class NumberType, class Codes>
class CodesProduct {
 public:
  using Input = NumberType;
  static constexpr int64_t kMostRows = kBlockRows;

  explicit CodesProduct(const LinearTask& task)
      : in_features_(task.in_features), q_(task.quantization), layout_(q_, task.in_features),
        table_(load_table(q_.table)) {}

  int64_t panel_bytes() const { return layout_.panel_bytes; }
  int64_t most_rows() const {
    int64_t most = kBlockBytes / (in_features_ * Dot::kTurnedBytes);
    if (most < Dot::kRegisterRows) most = Dot::kRegisterRows;
    return most > kBlockRows ? kBlockRows : most;
  }

  void set_rows(const InputRows<Input>& rows, int64_t count) {
    block_ = turn_rows<Dot, Input>(rows, count, layout_.num_groups, q_);
#if defined(PAGEWIRE_HAS_TILES)
    block_.tiles = &tiles_;
#endif
  }

  void operator()(const char* panel, const char*, float* sums) {
    memset(sums, 0, block_.num_rows * kPanel * sizeof(float));
    const auto product = panel_product_of<Dot, Codes>(block_.num_rows, q_.has_offsets);
    product(block_, layout_, q_, panel, table_, sums);
  }

 private:
  using Dot = QuantizedDot<Input>;

  const int64_t in_features_;
  const Quantization& q_;
  const GroupLayout<Codes> layout_;
  const ByteTable table_;
  Block<Dot> block_{};
#if defined(PAGEWIRE_HAS_TILES)
  GroupTiles<Dot> tiles_;
#endif
};

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
    uint8_t words[4 * Codes::kWords];
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      const Group group = layout.at(packed, g);
      store(group.scales, n, task.scales, task.units, row, g);
      store(group.offsets, n, task.offsets, task.offset_units, row, g);
      char* to = const_cast<char*>(group.codes);
      for (int64_t i = 0; i < q.group_size; i += Codes::kInputs, codes += Codes::kInputs) {
        memset(words, 0, sizeof(words));
        for (int k = 0; k < Codes::kInputs; ++k) Codes::put(words, k, codes[k]);
        for (int64_t w = 0; w < Codes::kWords; ++w, to += kStepBytes) {
          for (int half = 0; half < 2; ++half) {
            memcpy(to + place_of<Codes>(n, half), words + 4 * w + 2 * half, 2);
          }
        }
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

// What the code of input `i` means.
template <class Codes>
float value_of(const uint8_t* words, int i, const Quantization& q) {
  const int code = Codes::code(words, i, q.table);
  if constexpr (kIsFloat<Codes>) return Codes::value(code, q.table);
  return static_cast<float>(code - q.zero);
}

template <class Codes, class Number>
void gather(GatherTask& task) {
  const Quantization& q = task.quantization;
  const GroupLayout<Codes> layout(q, task.in_features);
  uint8_t words[4 * Codes::kWords];
  for (int64_t i = take_item(task); i < task.batch->num_rows; i = take_item(task)) {
    const int64_t id = task.batch->token_ids[i];
    Number* y = static_cast<Number*>(task.y) + i * task.y_stride;
    if (id < 0 || id >= task.out_features) {
      memset(y, 0, task.in_features * sizeof(Number));
      continue;
    }
    const int64_t at = packed_row(task, id), n = at % kPanel;
    const char* panel = static_cast<const char*>(task.packed) + at / kPanel * layout.panel_bytes;
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      const Group group = layout.at(panel, g);
      const float scale = load_one(group.scales, n), offset = load_one(group.offsets, n);
      const char* from = group.codes;
      for (int64_t i = 0; i < q.group_size; i += Codes::kInputs) {
        for (int64_t w = 0; w < Codes::kWords; ++w, from += kStepBytes) {
          for (int half = 0; half < 2; ++half) {
            memcpy(words + 4 * w + 2 * half, from + place_of<Codes>(n, half), 2);
          }
        }
        for (int k = 0; k < Codes::kInputs; ++k) {
          store_rounded_number(y++, value_of<Codes>(words, k, q) * scale + offset);
        }
      }
    }
  }
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

#define PAGEWIRE_PACKED(codes, Codes) \
  PAGEWIRE_KERNEL pw_pack_##codes(QuantizedPackTask* task) { pack<Codes>(*task); } \
  PAGEWIRE_KERNEL pw_gather_float32_##codes(GatherTask* task) { gather<Codes, float>(*task); } \
  PAGEWIRE_KERNEL pw_gather_bfloat16_##codes(GatherTask* task) { gather<Codes, BFloat16>(*task); }

template <class Input>
using Int4Product = CodesProduct<Input, Codes4>;
template <class Input>
using Table4Product = CodesProduct<Input, TableCodes4>;
template <class Input>
using Int5Product = CodesProduct<Input, Codes5>;
template <class Input>
using Int6Product = CodesProduct<Input, Codes6>;
template <class Input>
using Int8Product = CodesProduct<Input, Codes8>;

PAGEWIRE_LINEAR(_int4, Int4Product)
PAGEWIRE_LINEAR(_table4, Table4Product)
PAGEWIRE_LINEAR(_int5, Int5Product)
PAGEWIRE_LINEAR(_int6, Int6Product)
PAGEWIRE_LINEAR(_int8, Int8Product)
PAGEWIRE_PACKED(int4, Codes4)
PAGEWIRE_PACKED(table4, TableCodes4)
PAGEWIRE_PACKED(int5, Codes5)
PAGEWIRE_PACKED(int6, Codes6)
PAGEWIRE_PACKED(int8, Codes8)

// Their products are those of linear_floats.h.
PAGEWIRE_PACKED(float4, FloatCodes4)
PAGEWIRE_PACKED(float8, FloatCodes8)
