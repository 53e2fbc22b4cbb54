// Products with weights in fewer bits; see quantized.h.
//
// A group's products are summed (quantized_dot.h), then multiplied by its scale. What offsets add is
// the sum of the group's inputs, which all outputs share.
//
// Few rows unpack the codes in registers. For more, a group is unpacked into the first-level cache
// once, and all rows of a block go over it there. Both add the same numbers in the same order.
//
// Scales that are whole numbers are multiplied as such where inputs are, too: either the sums by them,
// or for many rows the codes beforehand, which gives the same whole number. These are added up for
// the groups of a run (`GroupRun`), and then multiplied by the run's units.
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
  static constexpr bool kAreWhole = false;

  GroupNumbers() = default;
  explicit GroupNumbers(const Group& group) : has_offsets(group.offsets.numbers != nullptr) {
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      scales[v] = group.scales.load(v * kLanes);
      offsets[v] = has_offsets ? group.offsets.load(v * kLanes) : zeros();
    }
  }

  // Add a group's products to a register of a row's sums.
  template <class Dot>
  inline __attribute__((always_inline)) void add(
      const typename Dot::Sum& a, const typename Dot::Sum& b, const typename Dot::Inputs& row,
      int64_t v, float* sum) const {
    const Floats scaled = multiply_add(scales[v], Dot::total(a, b, row), load_floats(sum));
    store_floats(sum, has_offsets ? multiply_add(offsets[v], broadcast(row.sum), scaled) : scaled);
  }

  Floats scales[kPanelVectors], offsets[kPanelVectors];
  bool has_offsets;
};

#if defined(PAGEWIRE_HAS_PAIRS)
// The scales that are whole numbers.
struct WholeScales {
  static constexpr bool kAreWhole = true;

  WholeScales() = default;
  explicit WholeScales(const Group& group) {
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      scales[v] = widen_to_words(group.scales.whole() + v * kLanes);
    }
  }

  // Add a group's products to a register of those of its run.
  template <class Dot>
  inline __attribute__((always_inline)) void add(
      const typename Dot::Sum& a, const typename Dot::Sum& b, const typename Dot::Inputs& row,
      int64_t v, float* of_run) const {
    const Floats scaled = to_floats(multiply_words(Dot::whole(a, b), scales[v]));
    store_floats(of_run, multiply_add(scaled, broadcast(row.unit), load_floats(of_run)));
  }

  Words scales[kPanelVectors];
};
#endif

// Add a run's products with `kRows` rows, and what its offsets add, to the rows' sums, [kRows, kPanel].
// turned: of the run's first group
template <class Dot, class Codes, int kRows>
inline __attribute__((always_inline)) void add_run(
    const GroupLayout<Codes>& layout, const GroupRun& run, const typename Dot::Inputs* turned,
    int64_t num_rows, const Floats (&of_run)[kRows][kPanelVectors], float* sums) {
  _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
    float* const to = sums + v * kLanes;
    Floats all[kRows];
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) all[r] = load_floats(to + r * kPanel);
    for (int64_t i = 0; layout.offsets_at != 0 && i < run.count; ++i) {
      const Floats offsets = layout.at(run, i).offsets.load(v * kLanes);
      _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
        all[r] = multiply_add(offsets, broadcast(turned[i * num_rows + r].sum), all[r]);
      }
    }
    const Floats units = run.load_units(v * kLanes);
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
      store_floats(to + r * kPanel, multiply_add(units, of_run[r][v], all[r]));
    }
  }
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

// Add a group's products to the sums of `kRows` rows from `row` on, of all groups or of whole scales
// those of the run, [kRows, kPanel].
template <class Dot, class Source, int kRows, class Numbers>
inline __attribute__((always_inline)) void add_group(
    const Block<Dot>& block, int64_t row, int64_t g, int64_t num_inputs, const char* codes,
    const Numbers& numbers, const ByteTable& table, float* kept) {
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
      const int64_t at = r * kPanel + v * kLanes;
      numbers.template add<Dot>(sums[r][v][0], sums[r][v][1], turned[r], v, kept + at);
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

template <class Dot, class Codes, class Numbers, int kRows>
void multiply_few(const Block<Dot>& block, const GroupLayout<Codes>& layout, const Quantization& q,
                  const char* panel, const ByteTable& table, float* sums) {
  // A call for each group would cost as much as a tenth of a small group's products.
  layout.for_each_run(panel, [&](const GroupRun& run) __attribute__((always_inline)) {
    Floats of_run[kRows][kPanelVectors] = {};
    float* const kept = Numbers::kAreWhole ? reinterpret_cast<float*>(of_run) : sums;
    for (int64_t i = 0; i < run.count; ++i) {
      const Group group = layout.at(run, i);
      for (const char* at = group.scales.numbers; at < group.codes; at += 64) fetch_ahead<64>(at);
      add_group<Dot, Packed<Dot, Codes>, kRows>(block, 0, run.first + i, q.group_size, group.codes,
                                                Numbers(group), table, kept);
    }
    if constexpr (Numbers::kAreWhole) {
      add_run<Dot, Codes, kRows>(layout, run, block.groups + run.first * block.num_rows,
                                 block.num_rows, of_run, sums);
    }
  });
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

#if defined(PAGEWIRE_HAS_PAIRS)
// Whether scales are whole numbers, and the products of bfloat16 rows with a group's codes times scales
// are exact in 32 bits. Inputs become at most 32639 (`WholeNumbers`).
template <class Codes>
bool has_whole_products(const Quantization& q) {
  const int64_t most = q.zero > Codes::kMost - q.zero ? q.zero : Codes::kMost - q.zero;
  return q.scale_bytes == 1 && most * 128 * q.group_size <= 1 << 16;
}
#endif

#if defined(PAGEWIRE_HAS_PAIRS) && !defined(PAGEWIRE_HAS_TILES)
// A run whose codes are multiplied by their scales: by the first rows, which store these products for
// the others.
template <class Dot, class Codes>
struct ScaledRun {
  const GroupLayout<Codes>& layout;
  GroupRun run;
  int64_t group_size;
  Words zero;
  char* operands;  // [count][group_size / 4][kPanelVectors]
};

template <class Dot, int kRows>
using WholeSums = typename Dot::Sum[kRows][kPanelVectors];

template <class Dot, class Codes, int kRows, bool kIsFirst, int... kRegister>
inline __attribute__((always_inline)) void add_scaled_registers(
    const char* inputs, const char* words, Words zero, const Words (&scales)[kPanelVectors],
    char* operands, WholeSums<Dot, kRows>& sums, std::integer_sequence<int, kRegister...>) {
  const auto add = [&](auto number) __attribute__((always_inline)) {
    constexpr int kAt = decltype(number)::value;
    typename Dot::Operand weights[kPanelVectors];
    _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
      char* const stored = operands + (kAt * kPanelVectors + v) * kOperandBytes<Dot>;
      if constexpr (kIsFirst) {
        const auto codes = Packed<Dot, Codes>::template operand<kAt>(words, v, ByteTable());
        weights[v] = {multiply_halves(subtract_halves(codes.even, zero), scales[v]),
                      multiply_halves(subtract_halves(codes.odd, zero), scales[v])};
        Dot::store(stored, weights[v]);
      } else {
        weights[v] = Dot::load(stored);
      }
    }
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
      const auto step = Dot::load_step(inputs + (kAt * kRows + r) * kTurnedStep<Dot>);
      _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
        Dot::add(step, weights[v], sums[r][v]);
      }
    }
  };
  (add(std::integral_constant<int, kRegister>()), ...);
}

// Add a run's products to the sums of `num_rows` rows from `row` on, [num_rows, kPanel].
template <class Dot, class Codes, bool kIsFirst, int kRows = Dot::kRegisterRows>
void add_scaled_run(const Block<Dot>& block, int64_t row, int64_t num_rows,
                    const ScaledRun<Dot, Codes>& from, float* sums) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return add_scaled_run<Dot, Codes, kIsFirst, kRows - 1>(block, row, num_rows, from, sums);
    }
  }
  const typename Dot::Inputs* turned = block.groups + from.run.first * block.num_rows + row;
  const Words zero = from.zero;
  char* operands = from.operands;
  Floats of_run[kRows][kPanelVectors];
  _Pragma("GCC unroll 16") for (int i = 0; i < kRows * kPanelVectors; ++i) {
    of_run[i / kPanelVectors][i % kPanelVectors] = zeros();
  }
  for (int64_t g = 0; g < from.run.count; ++g) {
    const char* words = nullptr;
    Words scales[kPanelVectors];
    if constexpr (kIsFirst) {
      const Group group = from.layout.at(from.run, g);
      words = group.codes;
      const WholeScales whole_scales(group);
      _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
        const Words words_of_v = whole_scales.scales[v];
        scales[v] = or_words(and_words(words_of_v, broadcast_word(0xffff)), shift_left<16>(words_of_v));
      }
    }
    const char* inputs = block.inputs + ((from.run.first + g) * block.num_rows + row) *
                                            from.group_size * Dot::kTurnedBytes;
    WholeSums<Dot, kRows> whole;
    _Pragma("GCC unroll 16") for (int i = 0; i < kRows * kPanelVectors; ++i) {
      whole[i / kPanelVectors][i % kPanelVectors] = Dot::no_sum();
    }
    for (int64_t i = 0; i < from.group_size; i += Codes::kInputs) {
      constexpr int kRegisters = Codes::kInputs / 4;
      if constexpr (kIsFirst) fetch_ahead<Packed<Dot, Codes>::kBytes>(words);
      add_scaled_registers<Dot, Codes, kRows, kIsFirst>(
          inputs, words, zero, scales, operands, whole,
          std::make_integer_sequence<int, kRegisters>());
      inputs += kRegisters * kRows * kTurnedStep<Dot>;
      if constexpr (kIsFirst) words += Packed<Dot, Codes>::kBytes;
      operands += kRegisters * kPanelVectors * kOperandBytes<Dot>;
    }
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
      const Floats unit = broadcast(turned[g * block.num_rows + r].unit);
      _Pragma("GCC unroll 2") for (int v = 0; v < kPanelVectors; ++v) {
        of_run[r][v] = multiply_add(to_floats(whole[r][v]), unit, of_run[r][v]);
      }
    }
  }
  add_run<Dot, Codes, kRows>(from.layout, from.run, turned, block.num_rows, of_run, sums);
}

template <class Dot, class Codes>
void multiply_scaled(const Block<Dot>& block, const GroupLayout<Codes>& layout,
                     const Quantization& q, const char* panel, float* sums) {
  const int64_t most = rows_together<Dot>(block.num_rows);
  const Words zero = broadcast_word(static_cast<int32_t>(q.zero * 0x00010001));
  alignas(64) char operands[kMaxGroup / 4 * kPanelVectors * kOperandBytes<Dot>];
  layout.for_each_run(panel, [&](const GroupRun& run) {
    const ScaledRun<Dot, Codes> from = {layout, run, q.group_size, zero, operands};
    add_scaled_run<Dot, Codes, true>(block, 0, most, from, sums);
    for (int64_t row = most; row < block.num_rows; row += most) {
      const int64_t left = block.num_rows - row;
      add_scaled_run<Dot, Codes, false>(block, row, left < most ? left : most, from,
                                        sums + row * kPanel);
    }
  });
}

#endif

#if defined(PAGEWIRE_HAS_TILES)
// Add a group's products to the sums of some rows, of all groups or of whole scales those of the run,
// [num_rows, kPanel].
template <class Dot, class Numbers>
inline __attribute__((always_inline)) void add_sums(
    const GroupTiles<Dot>& tiles, const char* sums, const Numbers& numbers,
    const typename Dot::Inputs* rows, int64_t num_rows, float* kept) {
  for (int64_t r = 0; r < num_rows; ++r, kept += kPanel) {
    _Pragma("GCC unroll 2") for (int64_t v = 0; v < kPanelVectors; ++v) {
      numbers.template add<Dot>(tiles.load(sums, v, r), Dot::no_sum(), rows[r], v, kept + v * kLanes);
    }
  }
}

// As `add_run`, whose products are in memory, and are cleared.
template <class Dot, class Codes>
inline __attribute__((always_inline)) void add_run_in_memory(
    const GroupLayout<Codes>& layout, const GroupRun& run, const typename Dot::Inputs* turned,
    int64_t num_rows, int64_t count, float* of_run, float* sums) {
  for (int64_t v = 0; v < kPanelVectors; ++v) {
    for (int64_t i = 0; layout.offsets_at != 0 && i < run.count; ++i) {
      const Floats offsets = layout.at(run, i).offsets.load(v * kLanes);
      for (int64_t r = 0; r < count; ++r) {
        float* const to = sums + r * kPanel + v * kLanes;
        const Floats row_sum = broadcast(turned[i * num_rows + r].sum);
        store_floats(to, multiply_add(offsets, row_sum, load_floats(to)));
      }
    }
    const Floats units = run.load_units(v * kLanes);
    for (int64_t at = v * kLanes; at < count * kPanel; at += kPanel) {
      store_floats(sums + at, multiply_add(units, load_floats(of_run + at), load_floats(sums + at)));
      store_floats(of_run + at, zeros());
    }
  }
}

// Tiles load from memory what was stored there, and the other way round, only once the stores are
// done. So a group's codes are unpacked before the products of the group before, and sums are added
// after the products that follow.
//
// A call between the instructions for tiles would wait for them: everything is inlined.
template <class Dot, class Codes, class Numbers>
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
  struct {
    Numbers numbers;
    GroupRun run;
  } groups[4];  // group `g` at g % 4: three are needed at a time
  alignas(64) float of_run[Numbers::kAreWhole ? kBlockRows * kPanel : 1];
  if constexpr (Numbers::kAreWhole) memset(of_run, 0, block.num_rows * kPanel * sizeof(float));
  struct Product {
    int64_t g, row;
  } last{};
  int64_t num_products = 0;
  const auto add_last = [&]() __attribute__((always_inline)) {
    if (num_products == 0) return;
    const int64_t left = block.num_rows - last.row, count = left < tile_rows ? left : tile_rows;
    const typename Dot::Inputs* rows = block.groups + last.row;
    float* const sums_of_rows = kept + last.row * kPanel;
    float* const run_of_rows = Numbers::kAreWhole ? of_run + last.row * kPanel : sums_of_rows;
    const auto [numbers, run] = groups[last.g % 4];
    add_sums<Dot>(tiles, sums[(num_products - 1) % 2], numbers, rows + last.g * block.num_rows, count,
                  run_of_rows);
    if constexpr (Numbers::kAreWhole) {
      if (last.g + 1 < run.first + run.count) return;
      add_run_in_memory<Dot>(layout, run, rows + run.first * block.num_rows, block.num_rows, count,
                             run_of_rows, sums_of_rows);
    }
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
  layout.for_each_run(panel, [&](const GroupRun& run) {
    for (int64_t g = run.first; g < run.first + run.count; ++g) {
      const Group group = layout.at(run, g - run.first);
      unpack_group<Dot, Codes>(group.codes, q.group_size, table, less_zero, codes[g % 2]);
      groups[g % 4] = {Numbers(group), run};
      if (g > 0) multiply_group(g - 1);
    }
  });
  multiply_group(layout.num_groups - 1);
  add_last();
}
#endif

template <class Dot, class Codes, class Numbers, int kRows = kFewRows<Dot>>
MultiplyPanel<Dot, Codes> panel_product_of(int64_t num_rows) {
#if defined(PAGEWIRE_HAS_TILES)
  if (num_rows > kFewRows<Dot>) return multiply_with_tiles<Dot, Codes, Numbers>;
#else
  if (num_rows > kFewRows<Dot>) return multiply_many<Dot, Codes>;
#endif
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return panel_product_of<Dot, Codes, Numbers, kRows - 1>(num_rows);
  }
  return multiply_few<Dot, Codes, Numbers, kRows>;
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
#if defined(PAGEWIRE_HAS_PAIRS) && !defined(PAGEWIRE_HAS_TILES)
    if (is_whole_ && count > kFewRows<Dot>) {
      scaled_ = turn_rows<PairsDot, Input>(rows, count, layout_.num_groups, q_);
      block_.num_rows = count;
      return;
    }
#endif
    block_ = turn_rows<Dot, Input>(rows, count, layout_.num_groups, q_);
#if defined(PAGEWIRE_HAS_TILES)
    block_.tiles = &tiles_;
#endif
  }

  void operator()(const char* panel, const Upcoming&, float* sums) {
    const int64_t num_rows = block_.num_rows;
    memset(sums, 0, num_rows * kPanel * sizeof(float));
    auto product = panel_product_of<Dot, Codes, GroupNumbers>(num_rows);
#if defined(PAGEWIRE_HAS_PAIRS)
    if constexpr (kMayBeWhole) {
#if !defined(PAGEWIRE_HAS_TILES)
      if (is_whole_ && num_rows > kFewRows<Dot>) {
        return multiply_scaled<PairsDot>(scaled_, layout_, q_, panel, sums);
      }
#endif
      if (is_whole_) product = panel_product_of<Dot, Codes, WholeScales>(num_rows);
    }
#endif
    product(block_, layout_, q_, panel, table_, sums);
  }

 private:
  using Dot = QuantizedDot<Input>;
  static constexpr bool kMayBeWhole = std::is_same_v<Input, BFloat16> && Codes::kMost < 64;

  const int64_t in_features_;
  const Quantization& q_;
  const GroupLayout<Codes> layout_;
  const ByteTable table_;
#if defined(PAGEWIRE_HAS_PAIRS)
  const bool is_whole_ = kMayBeWhole && has_whole_products<Codes>(q_);
#endif
  Block<Dot> block_{};
#if defined(PAGEWIRE_HAS_TILES)
  GroupTiles<Dot> tiles_;
#elif defined(PAGEWIRE_HAS_PAIRS)
  Block<PairsDot> scaled_{};
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
  for_each_panel(task, [&](int64_t panel) { pack_panel<Codes>(task, panel); });
}

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
  gather_rows<Number>(task, [&](int64_t row, Number* y) {
    const int64_t n = row % kPanel;
    const char* panel = static_cast<const char*>(task.packed) + row / kPanel * layout.panel_bytes;
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
  });
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
