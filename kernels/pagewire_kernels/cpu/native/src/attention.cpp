#include "attention.h"

#include "attention_multiply.h"
#include "attention_pack.h"
#include "attention_scratch.h"
#include "attention_softmax.h"

namespace {

using namespace pagewire;

// How a batch is cut, from its last tile to its first: a sequence's last tiles have the most keys.
class Tiles {
 public:
  explicit Tiles(const AttentionTask& task) : task_(task), seq_(task.batch->num_seqs) {
    for (int64_t seq = 0; seq < task.batch->num_seqs; ++seq) count_ += tiles_of(seq);
    before_ = count_;
  }

  int64_t count() const { return count_; }

  // The tile's sequence and its number in that. Tiles are asked for in falling order.
  int64_t find(int64_t tile, int64_t& seq) {
    while (before_ > tile) before_ -= tiles_of(--seq_);
    seq = seq_;
    return tile - before_;
  }

 private:
  int64_t tiles_of(int64_t seq) const {
    const int64_t tokens = task_.batch->query_start[seq + 1] - task_.batch->query_start[seq];
    return tokens == 1 ? 1 : (tokens + task_.tile_tokens - 1) / task_.tile_tokens;
  }

  const AttentionTask& task_;
  int64_t count_ = 0;
  int64_t before_;  // tiles of the sequences before `seq_`
  int64_t seq_;
};

constexpr int64_t kItemsPerThread = 4;

// KV heads of an item: all of them, unless that makes too few items for the threads to share.
int64_t heads_of_item(const AttentionTask& task, int64_t num_tiles) {
  int64_t heads = task.num_kv_heads;
  while (heads % 2 == 0 && num_tiles * task.num_kv_heads / heads < kItemsPerThread * task.num_slots) {
    heads /= 2;
  }
  return heads;
}

// A tile's rows with some of the KV heads.
struct Item {
  int64_t seq;
  int64_t first_row;  // of the batch
  int64_t num_tokens;
  int64_t position;  // of the first token
  int64_t first_head;
  int64_t num_heads;
};

template <class Number>
class Attention {
 public:
  explicit Attention(AttentionTask& task)
      : task_(task),
        scratch_(take_scratch<Number>(task)),
        dim_(padded_dim<Number>(task)),
        width_(rounded_up(task.head_dim, kLanes)),
        head_units_(dim_ / kPerUnit<Number>) {}

  void run(const Item& item) {
    load_rows(item);
    walk_keys(item);
    store_rows(item);
  }

 private:
  using Dot = typename Units<Number>::Dot;
  using Packed = typename Units<Number>::Packed;

  void load_rows(const Item& item) {
    const int64_t rows_per_head = item.num_tokens * task_.group;
    const int64_t num_rows = item.num_heads * rows_per_head;
    for (int64_t row = 0; row < num_rows; ++row) {
      const Number* from = query_of(item, row);
      if (dim_ != task_.head_dim) {
        Number* const padded = reinterpret_cast<Number*>(scratch_.padded);
        memset(padded, 0, dim_ * sizeof(Number));
        memcpy(padded, from, task_.head_dim * sizeof(Number));
        from = padded;
      }
      for (int64_t at = 0; at < dim_; at += kChunk<Number>) {
        store_floats(scratch_.queries + row * head_units_ + at / kPerUnit<Number>,
                     load_units(from + at));
      }
      scratch_.maxima[row] = kNoMaximum;
    }
    memset(scratch_.outputs, 0, num_rows * dim_ * sizeof(float));
    memset(scratch_.totals, 0, num_rows * kLanes * sizeof(float));
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

  // Takes all rows over all keys that any of them sees.
  void walk_keys(const Item& item) {
    const int64_t end = item.position + item.num_tokens;
    const int64_t first = task_.window > 0 ? larger(0, item.position - task_.window + 1) : 0;
    const int64_t rows_per_head = item.num_tokens * task_.group;
    for (int64_t key = first / kStep * kStep; key < end; key += kStep) {
      const int64_t num_keys = smaller(kStep, end - key);
      find_keys(item.seq, key, num_keys);
      for (int64_t head = 0; head < item.num_heads; ++head) {
        const int64_t at = (item.first_head + head) * task_.head_bytes;
        pack_keys(gather(task_.key_cache + at, num_keys), num_keys, dim_, scratch_.keys);
        pack_values(gather(task_.value_cache + at, num_keys), num_keys, dim_, scratch_.values);
        const int64_t first_row = head * rows_per_head;
        for (int64_t row = 0; row < rows_per_head; row += kRows) {
          take_step(item, key, first_row + row, smaller(kRows, rows_per_head - row));
        }
      }
    }
  }

  // Where the step's keys lie in the cache.
  void find_keys(int64_t seq, int64_t key, int64_t num_keys) {
    const int32_t* const table = task_.batch->block_tables + seq * task_.batch->table_width;
    int64_t block = key / task_.block_size, offset = key % task_.block_size;
    for (int64_t i = 0; i < num_keys; ++i) {
      offsets_[i] = table[block] * task_.block_bytes + offset * task_.token_bytes;
      if (++offset == task_.block_size) {
        offset = 0;
        ++block;
      }
    }
  }

  // The addresses of the step's keys or values, padded, and zeros for those there are not yet: what
  // stands in the cache may be anything, and 0 * NaN is NaN.
  const Number* const* gather(const char* cache, int64_t num_keys) {
    for (int64_t i = 0; i < num_keys; ++i) {
      const char* from = cache + offsets_[i];
      if (dim_ != task_.head_dim) {
        char* const padded = scratch_.padded + i * dim_ * static_cast<int64_t>(sizeof(Number));
        memcpy(padded, from, task_.head_dim * sizeof(Number));
        memset(padded + task_.head_dim * sizeof(Number), 0,
               (dim_ - task_.head_dim) * sizeof(Number));
        from = padded;
      }
      rows_[i] = reinterpret_cast<const Number*>(from);
    }
    for (int64_t i = num_keys; i < kStep; ++i) {
      rows_[i] = reinterpret_cast<const Number*>(scratch_.no_key);
    }
    return rows_;
  }

  void take_step(const Item& item, int64_t key, int64_t first_row, int64_t num_rows) {
    static_assert(kRows <= 6, "a case for each number of rows");
    switch (num_rows) {
      case 1: return take_step<1>(item, key, first_row);
      case 2: return take_step<2>(item, key, first_row);
      case 3: return take_step<3>(item, key, first_row);
      case 4: return take_step<4>(item, key, first_row);
      case 5: return take_step<kRows < 5 ? kRows : 5>(item, key, first_row);
      default: return take_step<kRows>(item, key, first_row);
    }
  }

  // Takes a few rows over the keys and values that are packed.
  template <int num_rows>
  void take_step(const Item& item, int64_t key, int64_t first_row) {
    const int64_t first_token = token_of(item, first_row) - item.first_row;
    const int64_t last_token = token_of(item, first_row + num_rows - 1) - item.first_row;
    const int64_t end = smaller(kStep, item.position + last_token + 1 - key);
    const int64_t first =
        task_.window > 0 ? item.position + first_token - task_.window + 1 - key : 0;
    if (end <= 0 || first >= kStep) return;

    alignas(64) float scores[kRows][kStep];
    alignas(64) Packed weights[kRows][kStep];
    float factors[kRows];
    multiply_rows<Dot, num_rows, false>(scratch_.queries + first_row * head_units_, head_units_,
                                        rounded_up(task_.head_dim, kPerUnit<Number>) / kPerUnit<Number>,
                                        scratch_.keys, kStep, rounded_up(end, kLanes), scores[0],
                                        kStep, nullptr);
    for (int row = 0; row < num_rows; ++row) {
      const ScoreRule rule = rule_of(item, key, first_row + row);
      factors[row] = weigh(scores[row], rule, scratch_.maxima[first_row + row], weights[row]);
    }
    const float* const units = reinterpret_cast<const float*>(weights);
    constexpr int64_t kUnits = kStep / kPerUnit<Number>;
    for (int row = 0; row < num_rows; ++row) {
      add_weights<Dot>(units + row * kUnits, factors[row],
                       scratch_.totals + (first_row + row) * kLanes);
    }
    multiply_rows<Dot, num_rows, true>(
        units, kUnits, (end + kPerUnit<Number> - 1) / kPerUnit<Number>, scratch_.values, dim_,
        width_, scratch_.outputs + first_row * dim_, dim_, factors);
  }

  ScoreRule rule_of(const Item& item, int64_t key, int64_t row) const {
    const int64_t token = token_of(item, row) - item.first_row;
    const int64_t position = item.position + token - key;
    const float slope =
        task_.alibi_slopes != nullptr ? task_.alibi_slopes[head_of(item, row)] : 0.0f;
    const int64_t first = task_.window > 0 ? position - task_.window + 1 : 0;
    const int64_t end = smaller(kStep, position + 1);
    return {task_.scale, task_.soft_cap, slope, first, end, position};
  }

  // Divides each row by its total, its head's sink included, and writes it out.
  void store_rows(const Item& item) {
    const int64_t num_rows = item.num_heads * item.num_tokens * task_.group;
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t head = head_of(item, row);
      float total = sum_lanes(load_floats(scratch_.totals + row * kLanes));
      if (task_.sinks != nullptr) total += weight_of_sink(head, scratch_.maxima[row]);
      Number* const to = reinterpret_cast<Number*>(
          task_.output + token_of(item, row) * task_.output_token_bytes +
          head * task_.head_dim * static_cast<int64_t>(sizeof(Number)));
      store_head(to, scratch_.outputs + row * dim_, 1.0f / total);
    }
  }

  float weight_of_sink(int64_t head, float maximum) const {
    constexpr float kGreatestPower = 88.0f;  // more would not be finite
    const float power = task_.sinks[head] - maximum;
    return first_lane(exp(broadcast(power < kGreatestPower ? power : kGreatestPower)));
  }

  void store_head(Number* to, const float* from, float factor) const {
    int64_t at = 0;
    for (; at + kLanes <= task_.head_dim; at += kLanes) {
      store_rounded(to + at, multiply(load_floats(from + at), broadcast(factor)));
    }
    if (at < task_.head_dim) {
      Number rest[kLanes];
      store_rounded(rest, multiply(load_floats(from + at), broadcast(factor)));
      memcpy(to + at, rest, (task_.head_dim - at) * sizeof(Number));
    }
  }

  const AttentionTask& task_;
  const Scratch scratch_;
  const int64_t dim_;    // of a head, padded
  const int64_t width_;  // of an output
  const int64_t head_units_;
  int64_t offsets_[kStep];
  const Number* rows_[kStep];
};

template <class Number>
void attend(AttentionTask& task) {
  Tiles tiles(task);
  Attention<Number> attention(task);
  const int64_t item_heads = heads_of_item(task, tiles.count());
  const int64_t parts = task.num_kv_heads / item_heads;
  for (;;) {
    const int64_t taken = take_item(task);
    if (taken >= tiles.count() * parts) return;
    int64_t seq;
    const int64_t tile = tiles.find(tiles.count() - 1 - taken / parts, seq);
    const int64_t first_row = task.batch->query_start[seq] + tile * task.tile_tokens;
    const int64_t rows_left = task.batch->query_start[seq + 1] - first_row;
    const int64_t num_tokens = smaller(task.tile_tokens, rows_left);
    const int64_t position = task.batch->context_lens[seq] - rows_left;
    const int64_t first_head = taken % parts * item_heads;
    // A decode's heads together, so that a block is read in one go; a prefill's one after the
    // other, so that its rows stay in the cache.
    const int64_t at_once = num_tokens == 1 ? item_heads : 1;
    for (int64_t head = first_head; head < first_head + item_heads; head += at_once) {
      attention.run({seq, first_row, num_tokens, position, head, at_once});
    }
  }
}

}  // namespace

PAGEWIRE_KERNEL pw_attention_float32(AttentionTask* task) { attend<float>(*task); }
PAGEWIRE_KERNEL pw_attention_bfloat16(AttentionTask* task) { attend<BFloat16>(*task); }
PAGEWIRE_KERNEL pw_attention_float16(AttentionTask* task) { attend<Float16>(*task); }

// Finds a task's `slot_bytes`, enough for any type of cache; a call of one thread, not a kernel.
PAGEWIRE_KERNEL pw_attention_slot_bytes(AttentionTask* task) {
  Scratch scratch;
  char* const begin = nullptr;
  const int64_t wide = lay_out<float>(*task, begin, scratch) - begin;
  const int64_t narrow = lay_out<BFloat16>(*task, begin, scratch) - begin;
  task->slot_bytes = larger(wide, narrow);
}
