#include "attention.h"

#include <type_traits>

#include "attention_direct.h"
#include "attention_items.h"
#include "attention_multiply.h"
#include "attention_pack.h"
#include "attention_scratch.h"
#include "attention_softmax.h"
#include "int8_head.h"

namespace {

using namespace pagewire;

// Number: the type of queries and outputs; Cached: that of the cache.
template <class Number, class Cached>
class Attention {
 public:
  explicit Attention(AttentionTask& task)
      : task_(task),
        scratch_(take_scratch<Cached>(task)),
        dim_(padded_dim<Cached>(task)),
        value_dim_(padded_value_dim<Cached>(task)),
        width_(rounded_up(task.value_dim, kLanes)),
        head_units_(dim_ / kPerUnit<Cached>) {}

  // Computes an item, and prefetches the first keys and values of the next one.
  void run(const Item& item, Items& items) {
    load_rows(item);
    walk_keys(item, items);
    store_rows(item);
  }

 private:
  using Dot = typename Units<Cached>::Dot;
  using Packed = typename Units<Cached>::Packed;
  static constexpr int64_t kStepUnits = kStep / kPerUnit<Cached>;
  static constexpr bool kHasScales = sizeof(Cached) == 1;
#if defined(PAGEWIRE_HAS_TILES)
  static constexpr bool kHasTiles = std::is_same_v<Dot, TileDot>;
  static constexpr int64_t kPackedKeys = kHasTiles ? 2 * kTileUnits : 1;
#else
  static constexpr bool kHasTiles = false;
  static constexpr int64_t kPackedKeys = 1;
#endif
  // Rows that multiply values as they are in the cache: interleaving these in registers for each `kRows`
  // takes less time than packing, while transposing keys would take more. Measured on Zen 4.
  static constexpr int64_t kDirectRows = kHasTiles ? kRows : kLanes == 16 ? 4 * kRows : 2 * kRows;

  // What is multiplied as it is in the cache.
  struct Direct {
    bool keys, values;
  };

  void load_rows(const Item& item) {
    const int64_t rows_per_head = item.num_tokens * task_.group;
    const int64_t num_rows = item.num_heads * rows_per_head;
    for (int64_t row = 0; row < num_rows; ++row) {
      const Number* from = query_of(item, row);
      if (dim_ != task_.head_dim) {
        Number* const padded = reinterpret_cast<Number*>(scratch_.padded_keys);
        memset(padded, 0, dim_ * sizeof(Number));
        memcpy(padded, from, task_.head_dim * sizeof(Number));
        from = padded;
      }
      for (int64_t at = 0; at < dim_; at += kChunk<Cached>) {
        store_floats(scratch_.queries + row * head_units_ + at / kPerUnit<Cached>,
                     load_query(from + at));
      }
      scratch_.maxima[row] = kNoMaximum;
    }
    memset(scratch_.outputs, 0, num_rows * value_dim_ * sizeof(float));
    memset(scratch_.totals, 0, num_rows * kLanes * sizeof(float));
  }

  static Floats load_query(const Number* from) {
    if constexpr (kHasScales) return widen(from);
    return load_units(from);
  }

  const Number* query_of(const Item& item, int64_t row) const {
    return reinterpret_cast<const Number*>(task_.query +
                                           token_of(item, row) * task_.query_token_bytes +
                                           head_of(item, row) * task_.query_head_bytes);
  }

  int64_t token_of(const Item& item, int64_t row) const {
    return item.first_row + row / task_.group % item.num_tokens;
  }

  int64_t head_of(const Item& item, int64_t row) const {
    const int64_t kv_head = item.first_head + row / (task_.group * item.num_tokens);
    return kv_head * task_.group + row % task_.group;
  }

  // Computes all rows for all keys that any of them sees.
  void walk_keys(const Item& item, Items& items) {
    const int64_t end = item.end_key;
    find_keys(item, item.first_key(task_.keys_before), offsets_);
    for (int64_t key = item.first_key(task_.keys_before); key < end; key += kStep) {
      const Item* const after = key + kStep < end ? &item : items.upcoming();
      if (after == &item) {
        find_keys(item, key + kStep, offsets_after_);
      } else if (after != nullptr) {
        find_keys(*after, after->first_key(task_.keys_before), offsets_after_);
      }
      // KV heads in one place are one head with the rows of all.
      const int64_t num_together = task_.head_bytes == 0 ? item.num_heads : 1;
      for (int64_t head = 0; head < item.num_heads; head += num_together) {
        Ahead ahead = ahead_of(after, head / num_together, item.num_heads / num_together);
        take_heads(item, key, head, num_together, ahead);
      }
      memcpy(offsets_, offsets_after_, sizeof(offsets_));
    }
  }

  // The data to prefetch while a head is computed: the head's share of the tokens of the next step,
  // each with all heads.
  Ahead ahead_of(const Item* after, int64_t head, int64_t num_heads) const {
    if (after == nullptr) return Ahead(nullptr, nullptr, nullptr, 0, 0);
    const int64_t first = head * kStep / num_heads, end = (head + 1) * kStep / num_heads;
    const int64_t at = after->first_head * task_.head_bytes;
    const int64_t num_bytes = task_.head_bytes == 0
                                  ? task_.head_dim * static_cast<int64_t>(sizeof(Cached))
                                  : after->num_heads * task_.head_bytes;
    return Ahead(task_.key_cache + at, task_.value_cache + at, offsets_after_ + first, end - first,
                 num_bytes);
  }

  // Computes the rows of a head, or of several in one place, for one step.
  void take_heads(const Item& item, int64_t key, int64_t head, int64_t num_heads, Ahead& ahead) {
    const int64_t at = (item.first_head + head) * task_.head_bytes;
    const int64_t rows_per_head = item.num_tokens * task_.group;
    const int64_t first_row = head * rows_per_head, num_rows = num_heads * rows_per_head;
    const int64_t num_keys = smaller(kStep, item.end_key - key);
    const int64_t first = larger(0, item.first_visible_key(task_.keys_before) - key);
    gather(task_.key_cache + at, first, num_keys, scratch_.padded_keys, keys_, key_scales_);
    gather(task_.value_cache + at, first, num_keys, scratch_.padded_values, values_, value_scales_);
    const Direct direct = {num_rows <= kRows, num_rows <= kDirectRows};
    if (!direct.keys) pack_keys(keys_, num_keys, dim_, scratch_.keys, ahead);
    if (!direct.values) {
      // The rest of a tile must not be NaN.
      const int64_t num_packed = rounded_up(num_keys, kPackedKeys);
      pack_values(values_, num_packed, value_dim_, scratch_.values, ahead);
    }
#if defined(PAGEWIRE_HAS_TILES)
    if constexpr (std::is_same_v<Dot, TileDot>) {
      if (!direct.keys) return take_step_in_tiles(item, key, first_row, num_rows);
    }
#endif
    for (int64_t row = 0; row < num_rows; row += kRows) {
      take_step(item, key, first_row + row, smaller(kRows, num_rows - row), direct, ahead);
    }
  }

  // The offsets in the cache of the keys of an item's step at `key`. Before the first visible key and
  // past the item's end, the nearest one's is repeated: blocks before a window may have been released,
  // and their entries in the table be negative.
  void find_keys(const Item& item, int64_t key, int64_t* offsets) const {
    if (task_.block_size == 0) return find_rows(item, key, offsets);
    const int32_t* const table = task_.batch->block_tables + item.seq * task_.batch->table_width;
    const int64_t first = larger(key, item.first_visible_key(task_.keys_before));
    int64_t block = first / task_.block_size, offset = first % task_.block_size;
    for (int64_t i = 0; i < kStep; ++i) {
      offsets[i] = table[block] * task_.block_bytes + offset * task_.token_bytes;
      const int64_t after = key + i + 1;
      if (after > first && after < item.end_key && ++offset == task_.block_size) {
        offset = 0;
        ++block;
      }
    }
  }

  // The same without a cache.
  void find_rows(const Item& item, int64_t key, int64_t* offsets) const {
    const int64_t first_row = task_.batch->query_start[item.seq];
    for (int64_t i = 0; i < kStep; ++i) {
      offsets[i] = (first_row + smaller(key + i, item.end_key - 1)) * task_.token_bytes;
    }
  }

  // The addresses of the step's keys or values, padded, and their scales if they have any. Before
  // `first` and from `num_keys` on they are zeros: slots that were released, or are not written, may
  // hold anything, and 0 * NaN is NaN.
  void gather(const char* cache, int64_t first, int64_t num_keys, char* padded, const Cached** rows,
              float* scales) const {
    const int64_t head_bytes = task_.head_dim * static_cast<int64_t>(sizeof(Cached));
    const int64_t padded_bytes = dim_ * static_cast<int64_t>(sizeof(Cached));
    const auto clear = [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        rows[i] = reinterpret_cast<const Cached*>(scratch_.no_key);
        scales[i] = 0.0f;
      }
    };
    clear(0, first);
    for (int64_t i = first; i < num_keys; ++i) {
      const char* from = cache + offsets_[i];
      if constexpr (kHasScales) scales[i] = load_scale(from, task_.head_dim);
      if (dim_ != task_.head_dim) {
        char* const copy = padded + i * padded_bytes;
        memcpy(copy, from, head_bytes);
        memset(copy + head_bytes, 0, padded_bytes - head_bytes);
        from = copy;
      }
      rows[i] = reinterpret_cast<const Cached*>(from);
    }
    clear(num_keys, kStep);
  }

  void take_step(const Item& item, int64_t key, int64_t first_row, int64_t num_rows,
                 Direct direct, Ahead& ahead) {
    static_assert(kRows <= 6, "a case for each number of rows");
    switch (num_rows) {
      case 1: return take_step<1>(item, key, first_row, direct, ahead);
      case 2: return take_step<2>(item, key, first_row, direct, ahead);
      case 3: return take_step<3>(item, key, first_row, direct, ahead);
      case 4: return take_step<4>(item, key, first_row, direct, ahead);
      case 5: return take_step<kRows < 5 ? kRows : 5>(item, key, first_row, direct, ahead);
      default: return take_step<kRows>(item, key, first_row, direct, ahead);
    }
  }

#if defined(PAGEWIRE_HAS_TILES)
  // Computes rows for the step's packed keys and values: all scores first, then all weights, since
  // loads wait for stores of tiles, and tiles for stores of vector registers.
  void take_step_in_tiles(const Item& item, int64_t key, int64_t first_row, int64_t num_rows) {
    alignas(64) float scores[kRowsTogether * kStep];
    alignas(64) BFloat16 weights[kRowsTogether * kStep];
    const int64_t end_row = first_row + num_rows;
    for (int64_t from = first_row; from < end_row; from += kRowsTogether) {
      const int64_t end = smaller(end_row, from + kRowsTogether);
      for_each_tile(item, key, from, end, [&](int64_t row, int64_t count, int64_t num_tiles) {
        score_in_tiles(row, count, num_tiles, scores + (row - from) * kStep);
      });
      for_each_tile(item, key, from, end, [&](int64_t row, int64_t count, int64_t) {
        const int64_t at = (row - from) * kStep;
        weigh_rows(item, key, row, count, scores + at, weights + at);
      });
      for_each_tile(item, key, from, end, [&](int64_t row, int64_t count, int64_t num_tiles) {
        add_in_tiles(row, count, num_tiles, weights + (row - from) * kStep);
      });
    }
  }

  static constexpr int64_t kRowsTogether = 64;

  // Calls `visit` with the index and number of some rows, and the number of tiles of keys they see.
  template <class Visit>
  void for_each_tile(const Item& item, int64_t key, int64_t row, int64_t end, Visit visit) const {
    for (; row < end; row += TileRegisters::kMostRows) {
      const int64_t count = smaller(TileRegisters::kMostRows, end - row);
      const KeyRange seen = keys_seen(item, key, row, count);
      if (!seen.is_empty()) visit(row, count, divide_up(seen.end, kPackedKeys));
    }
  }

  void score_in_tiles(int64_t row, int64_t num_rows, int64_t num_tiles, float* scores) {
    tiles_.configure(num_rows);
    const auto* queries = reinterpret_cast<const char*>(scratch_.queries + row * head_units_);
    for (int64_t key = 0; key < num_tiles * kPackedKeys; key += kPackedKeys) {
      const auto* keys = reinterpret_cast<const char*>(scratch_.keys + key);
      tiles_.add<TileProduct::kBFloat16, true>(
          {queries, head_units_ * 4, keys, kStep * 4, head_units_ / kTileUnits},
          reinterpret_cast<char*>(scores + key), kStep * 4);
    }
  }

  // Turns the scores of rows into weights: first all maxima and then all weights, each of which would
  // otherwise wait for the maximum of its own row.
  void weigh_rows(const Item& item, int64_t key, int64_t row, int64_t num_rows, float* scores,
                  BFloat16* weights) {
    const int64_t end = row + num_rows;
    for (; row < end; row += kLanes, scores += kLanes * kStep, weights += kLanes * kStep) {
      const int64_t count = smaller(kLanes, end - row);
      Floats greatest[kLanes];
      for (int64_t r = 0; r < count; ++r) {
        greatest[r] = adjust_scores(scores + r * kStep, rule_of(item, key, row + r));
      }
      for (int64_t r = count; r < kLanes; ++r) greatest[r] = zeros();
      alignas(64) float maxima[kLanes], factors[kLanes];
      store_floats(factors, raise_maxima(greatest, scratch_.maxima + row, count, maxima));
      for (int64_t r = 0; r < count; ++r) {
        weigh_scores(scores + r * kStep, broadcast(maxima[r]), weights + r * kStep);
        add_weights<Dot>(reinterpret_cast<const float*>(weights + r * kStep), factors[r],
                         scratch_.totals + (row + r) * kLanes);
        if (factors[r] != 1.0f) scale_outputs(row + r, factors[r]);
      }
    }
  }

  void add_in_tiles(int64_t row, int64_t num_rows, int64_t num_tiles, const BFloat16* weights) {
    tiles_.configure(num_rows);
    for (int64_t at = 0; at < value_dim_; at += kChunk<Cached>) {
      const auto* values = reinterpret_cast<const char*>(scratch_.values + at);
      tiles_.add<TileProduct::kBFloat16>(
          {reinterpret_cast<const char*>(weights), kStep * 2, values, value_dim_ * 4, num_tiles},
          reinterpret_cast<char*>(scratch_.outputs + row * value_dim_ + at), value_dim_ * 4);
    }
  }

  void scale_outputs(int64_t row, float factor) {
    float* const outputs = scratch_.outputs + row * value_dim_;
    for (int64_t at = 0; at < value_dim_; at += kLanes) {
      store_floats(outputs + at, multiply(load_floats(outputs + at), broadcast(factor)));
    }
  }
#endif

  // The keys of a step that at least one of some rows sees.
  struct KeyRange {
    bool is_empty() const { return end <= 0 || first >= kStep; }
    int64_t first, end;
  };
  KeyRange keys_seen(const Item& item, int64_t key, int64_t first_row, int64_t num_rows) const {
    const int64_t first_token = token_of(item, first_row) - item.first_row;
    const int64_t last_token = token_of(item, first_row + num_rows - 1) - item.first_row;
    return {item.position + first_token - task_.keys_before - key,
            smaller(kStep, end_of(item, last_token) - key)};
  }

  // After the last key that a token sees.
  int64_t end_of(const Item& item, int64_t token) const {
    return smaller(item.end_key, item.position + token + 1 + task_.keys_after);
  }

  // Computes a few rows for the step's keys and values, packed or as they are in the cache.
  template <int num_rows>
  void take_step(const Item& item, int64_t key, int64_t first_row, Direct direct, Ahead& ahead) {
    const KeyRange seen = keys_seen(item, key, first_row, num_rows);
    if (seen.is_empty()) return;

    alignas(64) float scores[kRows][kStep];
    alignas(64) Packed weights[kRows][kStep];
    float factors[kRows];
    score<num_rows>(first_row, seen.end, direct.keys, scores, ahead);
    for (int row = 0; row < num_rows; ++row) {
      const ScoreRule rule = rule_of(item, key, first_row + row);
      factors[row] = weigh(scores[row], rule, scratch_.maxima[first_row + row], weights[row]);
    }
    const float* const units = reinterpret_cast<const float*>(weights);
    for (int row = 0; row < num_rows; ++row) {
      add_weights<Dot>(units + row * kStepUnits, factors[row],
                       scratch_.totals + (first_row + row) * kLanes);
      if constexpr (kHasScales) scale_weights(weights[row], value_scales_);
    }
    add<num_rows>(first_row, seen.end, direct.values, units, factors, ahead);
  }

  // Scores of some rows for the step's keys before `end`.
  template <int num_rows>
  void score(int64_t first_row, int64_t end, bool is_direct, float (*scores)[kStep], Ahead& ahead) {
    const float* const queries = scratch_.queries + first_row * head_units_;
    const int64_t num_keys = rounded_up(end, kLanes);
    if (is_direct) {
      if constexpr (kHasScales) {
        score_codes<num_rows>(queries, head_units_, keys_, num_keys, scores, ahead);
      } else {
        score_keys<Cached, num_rows>(queries, head_units_, keys_, num_keys, scores, ahead);
      }
    } else {
      const int64_t num_units = divide_up(task_.head_dim, kPerUnit<Cached>);
      multiply_rows<Dot, num_rows, false>(queries, head_units_, num_units, scratch_.keys, kStep,
                                          num_keys, scores[0], kStep, nullptr, ahead);
    }
  }

  // Adds the values of the step's keys before `end` to the outputs of some rows.
  template <int num_rows>
  void add(int64_t first_row, int64_t end, bool is_direct, const float* weights,
           const float* factors, Ahead& ahead) {
    const int64_t num_units = divide_up(end, kPerUnit<Cached>);
    float* const outputs = scratch_.outputs + first_row * value_dim_;
    if (is_direct) {
      add_values<Cached, num_rows>(weights, num_units, values_, value_dim_, factors, outputs, ahead);
    } else {
      multiply_rows<Dot, num_rows, true>(weights, kStepUnits, num_units, scratch_.values, value_dim_,
                                         width_, outputs, value_dim_, factors, ahead);
    }
  }

  ScoreRule rule_of(const Item& item, int64_t key, int64_t row) const {
    const int64_t token = token_of(item, row) - item.first_row;
    const int64_t position = item.position + token - key;
    const float slope =
        task_.alibi_slopes != nullptr ? task_.alibi_slopes[head_of(item, row)] : 0.0f;
    const int64_t end = smaller(kStep, end_of(item, token) - key);
    const float* const key_scales = kHasScales ? key_scales_ : nullptr;
    ScoreRule rule = {task_.scale, task_.soft_cap, slope, position - task_.keys_before, end,
                      position, key_scales, nullptr, 0};
    if (task_.bias != nullptr) {
      const int64_t at = task_.bias_width / 2 - position;
      rule.bias = task_.bias + head_of(item, row) * task_.bias_width + at;
      rule.bias_left = task_.bias_width - at;
    }
    return rule;
  }

  // Divides each row by its total, which includes the sink of its head, and stores it.
  void store_rows(const Item& item) {
    const int64_t num_rows = item.num_heads * item.num_tokens * task_.group;
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t head = head_of(item, row);
      float total = sum_lanes(load_floats(scratch_.totals + row * kLanes));
      if (task_.sinks != nullptr) total += weight_of_sink(head, scratch_.maxima[row]);
      Number* const to = reinterpret_cast<Number*>(
          task_.output + token_of(item, row) * task_.output_token_bytes +
          head * task_.head_dim * static_cast<int64_t>(sizeof(Number)));
      store_head(to, scratch_.outputs + row * value_dim_, 1.0f / total);
    }
  }

  float weight_of_sink(int64_t head, float maximum) const {
    constexpr float kGreatestPower = 88.0f;  // more would not be finite
    const float power = task_.sinks[head] - maximum;
    return first_lane(exp(broadcast(power < kGreatestPower ? power : kGreatestPower)));
  }

  void store_head(Number* to, const float* from, float factor) const {
    int64_t at = 0;
    for (; at + kLanes <= task_.value_dim; at += kLanes) {
      store_rounded(to + at, multiply(load_floats(from + at), broadcast(factor)));
    }
    if (at < task_.value_dim) {
      Number rest[kLanes];
      store_rounded(rest, multiply(load_floats(from + at), broadcast(factor)));
      memcpy(to + at, rest, (task_.value_dim - at) * sizeof(Number));
    }
  }

  const AttentionTask& task_;
  const Scratch scratch_;
  const int64_t dim_;    // of a head, padded
  const int64_t value_dim_;  // of its part that outputs have, padded
  const int64_t width_;  // of an output
  const int64_t head_units_;
  int64_t offsets_[kStep];  // of the step's keys in either cache
  int64_t offsets_after_[kStep];
  const Cached* keys_[kStep];
  const Cached* values_[kStep];
  alignas(64) float key_scales_[kStep];  // of a cache that has them
  alignas(64) float value_scales_[kStep];
#if defined(PAGEWIRE_HAS_TILES)
  TileRegisters tiles_;
#endif
};

template <class Number, class Cached = Number>
void attend(AttentionTask& task) {
  Items items(task);
#if defined(PAGEWIRE_HAS_TILES)
  const NoSubnormals guard;
#endif
  Attention<Number, Cached> attention(task);
  while (const Item* const upcoming = items.upcoming()) {
    const Item item = *upcoming;
    items.pass();
    attention.run(item, items);
  }
}

}  // namespace

PAGEWIRE_KERNELS(attention, AttentionTask, attend)
PAGEWIRE_KERNEL pw_attention_int8_float32(AttentionTask* task) { attend<float, int8_t>(*task); }
PAGEWIRE_KERNEL pw_attention_int8_bfloat16(AttentionTask* task) { attend<BFloat16, int8_t>(*task); }

// Computes a task's `slot_bytes`, which suffice for any type of cache. To be called by one thread; this
// is not a kernel.
PAGEWIRE_KERNEL pw_attention_slot_bytes(AttentionTask* task) {
  Scratch scratch;
  char* const begin = nullptr;
  const int64_t wide = lay_out<float>(*task, begin, scratch) - begin;
  const int64_t narrow = lay_out<BFloat16>(*task, begin, scratch) - begin;
  task->slot_bytes = larger(wide, narrow);
}
