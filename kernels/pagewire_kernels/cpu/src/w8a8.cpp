// Products of 8-bit activations with 8-bit weights (W8A8).
//
// A row is quantized once, to integers from -128 to 127 with a scale and a zero point, and stored with a
// header. Sums of 8-bit products are exact in 32 bits, in any order, so that results have the same bits
// in any batch and on any processor. They are
//
//   y = (sum of (row - zero) * weight) * (scale of the row * scale of the output) + bias
//
// A weight is packed in panels, like other weights (linear.h), each of
//
//   scales[kPanel]  float32
//   sums[kPanel]    int32: of each output's weights, by which a row's zero is multiplied
//   weights[in_features / 4][kPanel][4]  int8
#include "linear_finish.h"
#include "linear_tile.h"
#include "linear_tiles.h"
#include "share.h"

namespace pagewire {
namespace {

constexpr int64_t kWordInputs = 4;
constexpr int64_t kHeaderBytes = 64;  // of a row, so that its numbers begin on a cache line
#if defined(PAGEWIRE_HAS_TILES)
constexpr int64_t kBlockRows = 384;  // the most rows of an item
constexpr int64_t kBlockBytes = 2 << 20;  // of rows, so that they stay in the second-level cache
#else
constexpr int64_t kBlockRows = 192;
constexpr int64_t kBlockBytes = 512 << 10;
#endif
constexpr int64_t kFetchedBytes = 2048;  // ahead, into the first-level cache
constexpr int64_t kCachedOutputBytes = 4 << 20;  // more outputs are not in the second-level cache

// How the numbers of a row are stored, depending on the instructions.
enum class Layout : int32_t {
  kSigned,    // int8
  kUnsigned,  // uint8, 128 more, for AVX512-VNNI
  kPairs,     // int16 less the zero point; of each four, the second and the third change places
};

struct Header {
  float scale;
  int32_t zero;  // less each stored number is
  Layout layout;
};

struct QuantizeRowsTask : Task {
  const int64_t* num_rows;
  const void* x;  // [*num_rows, size]
  int64_t x_stride;
  void* y;
  int64_t y_stride;  // in bytes
  int64_t size;
  int64_t is_symmetric;
  int64_t has_vnni;
  float scale;  // of all rows; 0: each has its own
  float zero_point;
};

// Sums of a register of outputs, for one word of four inputs at a time.
#if defined(__aarch64__)
constexpr Layout kLayout = Layout::kSigned;

struct PlainDot {
  static constexpr int kMaxRows = 2;
  static constexpr int64_t kBlockUnit = 1;  // blocks have a multiple of it
  static constexpr bool kFetchesOutputs = false;
  static constexpr int64_t kWordBytes = 4;  // of a row's word
  struct Sums {
    int32x4_t parts[4];
  };
  using Weights = Words;
  using Inputs = int8x8_t;
  static Sums nothing() { return {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static Weights weights(Words words) { return words; }
  static Inputs inputs(const char* at) { return vreinterpret_s8_s32(vdup_n_s32(load_step(at))); }
  static void add(Inputs x, Words w, Sums& sums) {
    const int8x16_t low = vreinterpretq_s8_s32(w.low), high = vreinterpretq_s8_s32(w.high);
    sums.parts[0] = vpadalq_s16(sums.parts[0], vmull_s8(x, vget_low_s8(low)));
    sums.parts[1] = vpadalq_s16(sums.parts[1], vmull_s8(x, vget_high_s8(low)));
    sums.parts[2] = vpadalq_s16(sums.parts[2], vmull_s8(x, vget_low_s8(high)));
    sums.parts[3] = vpadalq_s16(sums.parts[3], vmull_s8(x, vget_high_s8(high)));
  }
  static Words total(const Sums& sums) {
    return {vpaddq_s32(sums.parts[0], sums.parts[1]), vpaddq_s32(sums.parts[2], sums.parts[3])};
  }
};

#else
constexpr Layout kLayout = Layout::kPairs;

#if defined(__AVX512F__)
inline Words first_bytes(Words x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
inline Words second_bytes(Words x) { return _mm512_srai_epi16(x, 8); }
inline void add_pairs(Words a, Words b, Words& sums) {
  sums = add_words(sums, _mm512_madd_epi16(a, b));
}
inline Words broadcast_word_at(const char* from) { return broadcast_word(load_step(from)); }
constexpr int kPairRows = 8;
#else
inline Words first_bytes(Words x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline Words second_bytes(Words x) { return _mm256_srai_epi16(x, 8); }
constexpr int kPairRows = 4;
#endif

// The instruction for bytes saturates sums of two products, so bytes are widened to 16 bits.
struct PlainDot {
  static constexpr int kMaxRows = kPairRows;
  static constexpr int64_t kBlockUnit = 1;
  static constexpr bool kFetchesOutputs = false;
  static constexpr int64_t kWordBytes = 8;
  using Sums = Words;
  struct Weights {
    Words first, second;
  };
  using Inputs = Weights;
  static Sums nothing() { return broadcast_word(0); }
  static Weights weights(Words words) { return {first_bytes(words), second_bytes(words)}; }
  static Inputs inputs(const char* at) {
    return {broadcast_word_at(at), broadcast_word_at(at + 4)};
  }
  static void add(const Inputs& x, const Weights& w, Sums& sums) {
    add_pairs(x.first, w.first, sums);
    add_pairs(x.second, w.second, sums);
  }
  static Words total(Sums sums) { return sums; }
};
#endif

#if defined(__AVX512F__)
// In assembly: whether the processor has the instruction is known only at run time, and the library is
// compiled without it.
struct VnniDot {
  static constexpr int kMaxRows = 12;
  static constexpr int64_t kBlockUnit = 1;
  static constexpr bool kFetchesOutputs = false;
  static constexpr int64_t kWordBytes = 4;
  using Sums = Words;
  using Weights = Words;
  using Inputs = Words;
  static Sums nothing() { return broadcast_word(0); }
  static Weights weights(Words words) { return words; }
  static Inputs inputs(const char* at) { return broadcast_word(load_step(at)); }
  static void add(Inputs x, Weights w, Sums& sums) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(w));
  }
  static Words total(Sums sums) { return sums; }
};
#endif

// sums: [kRows, kPanel]
template <class Dot, int kRows>
void add_tile(const char* x, int64_t x_stride, int64_t num_words, const char* weights,
              int32_t* totals) {
  typename Dot::Sums sums[kRows][kPanelVectors];
  _Pragma("GCC unroll 32") for (int i = 0; i < kRows * kPanelVectors; ++i) {
    sums[i / kPanelVectors][i % kPanelVectors] = Dot::nothing();
  }
  TileRows<char, kRows> rows(x, x_stride);
  for (int64_t i = 0; i < num_words; ++i, weights += kStepBytes) {
    __builtin_prefetch(weights + kFetchedBytes, 0, 3);
    __builtin_prefetch(weights + kFetchedBytes + 64, 0, 3);
    const auto low = Dot::weights(load_words(weights));
    const auto high = Dot::weights(load_words(weights + kLanes * 4));
    _Pragma("GCC unroll 16") for (int r = 0; r < kRows; ++r) {
      const auto inputs = Dot::inputs(rows[r]);
      Dot::add(inputs, low, sums[r][0]);
      Dot::add(inputs, high, sums[r][1]);
    }
    rows.advance(Dot::kWordBytes);
  }
  _Pragma("GCC unroll 32") for (int i = 0; i < kRows * kPanelVectors; ++i) {
    const Words total = Dot::total(sums[i / kPanelVectors][i % kPanelVectors]);
    store_floats(reinterpret_cast<float*>(totals) + i * kLanes, as_floats(total));
  }
}

template <class Dot, int kRows = Dot::kMaxRows>
inline auto tile_of(int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return tile_of<Dot, kRows - 1>(num_rows);
  }
  return add_tile<Dot, kRows>;
}

struct Panel {
  Panel(const void* packed, int64_t panel, int64_t in_features)
      : num_words(divide_up(in_features, kWordInputs)),
        scales(reinterpret_cast<const float*>(static_cast<const char*>(packed) +
                                              panel * (num_words * kStepBytes + kPanel * 8))),
        sums(reinterpret_cast<const int32_t*>(scales + kPanel)),
        weights(reinterpret_cast<const char*>(sums + kPanel)) {}

  const int64_t num_words;
  const float* scales;
  const int32_t* sums;
  const char* weights;
};

// A row's results from its sums with a panel. Intermediate ones may wrap around; the final ones fit
// into 32 bits.
class Results {
 public:
  explicit Results(const Panel& panel) : panel_(panel) {}

  void compute(const Header& row, const int32_t* totals, float* y) {
    if (row.zero != zero_) {  // rows mostly have the same
      zero_ = row.zero;
      for (int64_t n = 0; n < kPanel; ++n) {
        zeros_[n] = static_cast<uint32_t>(zero_) * static_cast<uint32_t>(panel_.sums[n]);
      }
    }
    for (int64_t n = 0; n < kPanel; ++n) {
      const int32_t sum = static_cast<int32_t>(static_cast<uint32_t>(totals[n]) - zeros_[n]);
      y[n] = static_cast<float>(sum) * (row.scale * panel_.scales[n]);
    }
  }

 private:
  const Panel& panel_;
  int32_t zero_ = 0;
  alignas(64) uint32_t zeros_[kPanel] = {};  // zero_ times the sums of each output's weights
};

// totals: [num_rows, kPanel]
template <class Dot>
struct PanelProduct {
  void operator()(const char* x, int64_t x_stride, int64_t num_rows, const Panel& panel,
                  const Panel&, int32_t* totals) {
    const int64_t num_tiles = divide_up(num_rows, Dot::kMaxRows);
    for (int64_t t = 0; t < num_tiles; ++t) {  // of about the same size
      const int64_t row = t * num_rows / num_tiles, end = (t + 1) * num_rows / num_tiles;
      const char* first = x + row * x_stride;
      tile_of<Dot>(end - row)(first + kHeaderBytes, x_stride, panel.num_words, panel.weights,
                              totals + row * kPanel);
    }
  }
};

#if defined(PAGEWIRE_HAS_TILES)
struct TileDot {
  static constexpr int kMaxRows = kTileRows;
  static constexpr int64_t kBlockUnit = TileRegisters::kMostRows;  // all tiles are full
  static constexpr bool kFetchesOutputs = true;
};

template <>
struct PanelProduct<TileDot> {
  void operator()(const char* x, int64_t x_stride, int64_t num_rows, const Panel& panel,
                  const Panel& next, int32_t* totals) {
    sum_panel<TileProduct::kUnsignedSigned>(tiles, x + kHeaderBytes, x_stride, num_rows,
                                            panel.num_words * kWordInputs, panel.weights,
                                            next.weights, totals);
  }

  TileRegisters tiles;
};
#endif

// Prefetches the cache lines that an item's outputs are written to, while their sums are computed.
template <class Finish>
void fetch_outputs(const LinearTask& task, int64_t first_row, int64_t num_rows, int64_t panel) {
#if defined(__x86_64__)
  const char* y = static_cast<const char*>(task.y) + panel * Finish::kColumns * Finish::kBytes;
  for (int64_t row = first_row; row < first_row + num_rows; ++row) {
    asm volatile("prefetchw %0" ::"m"(y[row * task.y_stride * Finish::kBytes]));
  }
#endif
}

template <class Dot, class Finish>
void multiply(LinearTask& task, Finish finish) {
  const int64_t num_rows = *task.num_rows;
  int64_t most = kBlockBytes / task.x_stride;
  if (most < Dot::kMaxRows) most = Dot::kMaxRows;
  if (most > kBlockRows) most = kBlockRows;
  int64_t block = even_part(num_rows, most);
  block = divide_up(block, Dot::kBlockUnit) * Dot::kBlockUnit;
  const int64_t num_panels = Finish::num_panels(task);
  alignas(64) int32_t totals[kBlockRows * kPanel];
  alignas(64) float y[kPanel];
  const bool fetches = num_rows * task.y_stride * Finish::kBytes > kCachedOutputBytes;
  PanelProduct<Dot> product;
  SharedItems items(task, divide_up(num_rows, block) * num_panels, task.num_threads);
  for (int64_t item = items.take(); item >= 0; item = items.take()) {
    const int64_t row = item / num_panels * block, index = item % num_panels;
    const int64_t count = num_rows - row < block ? num_rows - row : block;
    const char* x = static_cast<const char*>(task.x) + row * task.x_stride;
    const Panel panel(task.weight, index, task.in_features);
    const Panel next(task.weight, items.following(item) % num_panels, task.in_features);
    if (Dot::kFetchesOutputs && fetches) fetch_outputs<Finish>(task, row, count, index);
    product(x, task.x_stride, count, panel, next, totals);
    if (!items.may_write()) return;
    Results results(panel);
    for (int64_t r = 0; r < count; ++r) {
      Header header;
      memcpy(&header, x + r * task.x_stride, sizeof(header));
      results.compute(header, totals + r * kPanel, y);
      add_adapters<Finish>(task, row + r, 1, index, index, y);
      finish(task, row + r, index, y);
    }
  }
}

template <class Finish>
void multiply_as_stored(LinearTask& task, Finish finish) {
  if (*task.num_rows == 0) return;
#if defined(__AVX512F__)
  Header first;
  memcpy(&first, task.x, sizeof(first));
  if (first.layout == Layout::kUnsigned) {
#if defined(PAGEWIRE_HAS_TILES)
    if (*task.num_rows > VnniDot::kMaxRows) return multiply<TileDot>(task, finish);
#endif
    return multiply<VnniDot>(task, finish);
  }
#endif
  multiply<PlainDot>(task, finish);
}

template <class Number>
void multiply_gated(LinearTask& task) {
  with_activation(task.activation, [&](auto function) {
    multiply_as_stored(task, FinishGated<Number, decltype(function)>());
  });
}

// Of the numbers added, lane by lane, and 0.
struct Extremes {
  void add(Floats x) {
    most = greater_of(most, x);
    least = greater_of(least, subtract(zeros(), x));
    faults = multiply_add(x, zeros(), faults);
  }
  Floats most = zeros(), least = zeros();  // `least` is the negative of it
  Floats faults = zeros();  // NaN if a number is not finite, which the others lose
};

// The scale and the zero point of a row. If a number is not finite, the scale is NaN, and so are all
// results of the row.
template <class Number>
void measure(const QuantizeRowsTask& task, const Number* x, float& scale, float& zero) {
  Extremes even, odd;  // two, since each addition waits for the one before
  int64_t i = 0;
  for (; i + 2 * kLanes <= task.size; i += 2 * kLanes) {
    even.add(widen(x + i));
    odd.add(widen(x + i + kLanes));
  }
  for (; i < task.size; i += kLanes) even.add(load_some(x + i, task.size - i));
  const Floats most = greater_of(even.most, odd.most), least = greater_of(even.least, odd.least);
  const float high = greatest_lane(most), low = -greatest_lane(least);
  scale = task.scale, zero = task.zero_point;
  if (scale == 0.0f) {
    zero = 0.0f;
    scale = task.is_symmetric ? (high > -low ? high : -low) / 127.5f : (high - low) / 255.0f;
    if (!task.is_symmetric) zero = scale == 0.0f ? -128.0f : __builtin_rintf(-128.0f - low / scale);
    if (scale == 0.0f) scale = __FLT_EPSILON__;
  }
  scale += sum_lanes(add(even.faults, odd.faults));
}

// Divides by a row's scale. A product with its inverse, corrected twice by the remainder that it leaves,
// is rounded as the quotient is (Markstein 1990), and takes less than a third of its time. Some divisors
// are exceptions, and so are quotients that overflow, as those of a static scale may.
class Divisor {
 public:
  Divisor(float scale, bool is_static)
      : scale_(broadcast(scale)), negative_(broadcast(-scale)), inverse_(broadcast(1.0f / scale)) {
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    const bool is_ordinary = scale > 0x1p-100f && scale < 0x1p100f && (~bits & 0x7fffff) != 0;
    is_inverted_ = is_ordinary && !is_static;
  }

  Floats divide_into(Floats x) const {
    if (!is_inverted_) return divide(x, scale_);
    Floats quotient = pagewire::multiply(x, inverse_);
    quotient = multiply_add(multiply_add(quotient, negative_, x), inverse_, quotient);
    return multiply_add(multiply_add(quotient, negative_, x), inverse_, quotient);
  }

 private:
  const Floats scale_, negative_, inverse_;
  bool is_inverted_;
};

// Rounds to nearest, ties to even.
template <class Number>
void quantize_row(const QuantizeRowsTask& task, int64_t row) {
  const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
  char* y = static_cast<char*>(task.y) + row * task.y_stride;
  float scale, zero;
  measure(task, x, scale, zero);
  const Layout layout = task.has_vnni ? Layout::kUnsigned : kLayout;
  const int32_t shift = layout == Layout::kUnsigned ? 128 : 0;
  const int32_t stored_zero = layout == Layout::kPairs ? 0 : static_cast<int32_t>(zero) + shift;
  const Header header = {scale, stored_zero, layout};
  memcpy(y, &header, sizeof(header));
  y += kHeaderBytes;
  const Floats most = broadcast(127.0f);
  const Divisor divisor(scale, task.scale != 0.0f);
  for (int64_t i = 0; i < task.size; i += kLanes) {
    const Floats numbers = load_some(x + i, task.size - i);
    Floats codes = add(divisor.divide_into(numbers), broadcast(zero));
    codes = greater_of(codes, broadcast(-128.0f));
#if defined(__AVX512F__)
    if (layout == Layout::kUnsigned) {
      const Words words = _mm512_cvtps_epi32(_mm512_min_ps(codes, most));
      const __m128i bytes = _mm512_cvtepi32_epi8(add_words(words, broadcast_word(shift)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), bytes);
      continue;
    }
#endif
    codes = round_to_whole(codes);
    codes = select(not_less_than(codes, most), most, codes);
    alignas(64) float lanes[kLanes];
    if (layout == Layout::kPairs) {
      constexpr int kPlaces[] = {0, 2, 1, 3};
      alignas(64) int16_t pairs[kLanes];
      store_floats(lanes, subtract(codes, broadcast(zero)));
      for (int64_t k = 0; k < kLanes; ++k) {
        pairs[k] = static_cast<int16_t>(lanes[k / 4 * 4 + kPlaces[k % 4]]);
      }
      memcpy(y + i * 2, pairs, sizeof(pairs));
    } else {
      alignas(64) int8_t bytes[kLanes];
      store_floats(lanes, codes);
      for (int64_t k = 0; k < kLanes; ++k) bytes[k] = static_cast<int8_t>(lanes[k]);
      memcpy(y + i, bytes, sizeof(bytes));
    }
  }
}

template <class Number>
void quantize_rows(QuantizeRowsTask& task) {
  for_each_row(task, *task.num_rows, task.size, [&](int64_t row) { quantize_row<Number>(task, row); });
}

// Outputs beyond those of the weight are zeros.
void pack_panel(const QuantizedPackTask& task, int64_t index) {
  const Panel panel(task.packed, index, task.in_features);
  memset(const_cast<float*>(panel.scales), 0, panel.num_words * kStepBytes + kPanel * 8);
  for (int64_t n = 0; n < kPanel; ++n) {
    const int64_t row = row_of(task, index, n);
    if (row < 0) continue;
    const uint8_t* codes = task.codes + row * task.in_features;
    int32_t sum = 0;
    for (int64_t i = 0; i < task.in_features; ++i) {
      sum += static_cast<int8_t>(codes[i]);
      const int64_t at = i / kWordInputs * kStepBytes + n * kWordInputs + i % kWordInputs;
      const_cast<char*>(panel.weights)[at] = static_cast<char>(codes[i]);
    }
    const_cast<float*>(panel.scales)[n] = task.scales[row];
    const_cast<int32_t*>(panel.sums)[n] = sum;
  }
}

template <class Number>
void gather(GatherTask& task) {
  gather_rows<Number>(task, [&](int64_t row, Number* y) {
    const int64_t n = row % kPanel;
    const Panel panel(task.packed, row / kPanel, task.in_features);
    for (int64_t k = 0; k < task.in_features; ++k) {
      const int64_t at = k / kWordInputs * kStepBytes + n * kWordInputs + k % kWordInputs;
      store_rounded_number(y + k, static_cast<int8_t>(panel.weights[at]) * panel.scales[n]);
    }
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_STRUCT_SIZE(QuantizeRowsTask)
PAGEWIRE_KERNELS(quantize_rows, QuantizeRowsTask, quantize_rows)
PAGEWIRE_KERNEL pw_linear_float32_w8a8(LinearTask* task) {
  multiply_as_stored(*task, Finish<float, float>());
}
PAGEWIRE_KERNEL pw_linear_bfloat16_w8a8(LinearTask* task) {
  multiply_as_stored(*task, Finish<BFloat16, BFloat16>());
}
PAGEWIRE_KERNEL pw_linear_bfloat16_float32_w8a8(LinearTask* task) {
  multiply_as_stored(*task, Finish<BFloat16, float>());
}
PAGEWIRE_KERNEL pw_activated_linear_float32_w8a8(LinearTask* task) {
  multiply_as_stored(*task, FinishActivated<float>());
}
PAGEWIRE_KERNEL pw_activated_linear_bfloat16_w8a8(LinearTask* task) {
  multiply_as_stored(*task, FinishActivated<BFloat16>());
}
PAGEWIRE_KERNEL pw_gated_linear_float32_w8a8(LinearTask* task) { multiply_gated<float>(*task); }
PAGEWIRE_KERNEL pw_gated_linear_bfloat16_w8a8(LinearTask* task) {
  multiply_gated<BFloat16>(*task);
}
PAGEWIRE_KERNEL pw_gather_float32_w8a8(GatherTask* task) { gather<float>(*task); }
PAGEWIRE_KERNEL pw_gather_bfloat16_w8a8(GatherTask* task) { gather<BFloat16>(*task); }
PAGEWIRE_KERNEL pw_pack_w8a8(QuantizedPackTask* task) {
  for_each_panel(*task, [&](int64_t panel) { pack_panel(*task, panel); });
}
