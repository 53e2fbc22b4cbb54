// Norms, rotary embedding and the cache write, in one pass; see layers.h.
#include "int8_head.h"
#include "layers.h"
#include "rows.h"

namespace pagewire {
namespace {

template <class Number>
void load_head(const Number* from, int64_t size, float* head) {
  for (int64_t i = 0; i < size; i += kLanes) {
    store_some(head + i, load_some(from + i, size - i), size - i);
  }
}

template <class Number>
void store_head(const float* head, int64_t size, Number* to) {
  for (int64_t i = 0; i < size; i += kLanes) {
    store_some(to + i, load_some(head + i, size - i), size - i);
  }
}

// RMS norm.
template <class Number>
void norm_head(float* head, int64_t size, const void* weight, bool is_float, float eps) {
  Floats sum = zeros();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats numbers = load_some(head + i, size - i);
    sum = multiply_add(numbers, numbers, sum);
  }
  const float mean = sum_lanes(sum) / static_cast<float>(size);
  const float factor = 1.0f / __builtin_sqrtf(mean + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats scaled = multiply(load_some(head + i, size - i), broadcast(factor));
    const Floats weights = load_weight<Number>(weight, is_float, i, size - i);
    store_some(head + i, multiply(scaled, weights), size - i);
  }
}

// RoPE: rotates the first `half` elements against the next ones.
template <class Number>
void rotate_head(float* head, int64_t half, const Number* cos, const Number* sin) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Floats first = load_some(head + i, left), second = load_some(head + half + i, left);
    const Floats c = load_some(cos + i, left), s = load_some(sin + i, left);
    store_some(head + i, subtract(multiply(first, c), multiply(second, s)), left);
    store_some(head + half + i, add(multiply(second, c), multiply(first, s)), left);
  }
}

// Normalizes `from`, if there is a weight, applies RoPE, and stores the result in `to`.
template <class Number>
void norm_and_rotate(const RotateTask& task, int64_t position, const Number* from,
                   const void* weight, Number* to) {
  alignas(64) float head[kMaxHeadDim];
  load_head(from, task.head_dim, head);
  if (weight != nullptr) {
    norm_head<Number>(head, task.head_dim, weight, task.has_float_norms, task.eps);
  }
  const int64_t at = position * task.table_stride;
  rotate_head(head, task.half, static_cast<const Number*>(task.cos) + at,
            static_cast<const Number*>(task.sin) + at);
  store_head(head, task.head_dim, to);
}

template <class Number, class Cached>
void store_key_and_value(const RotateTask& task, int64_t row, int64_t position, int64_t slot) {
  const Number* key = static_cast<const Number*>(task.key) + row * task.key_stride;
  const auto* value = static_cast<const Number*>(task.value) + row * task.value_stride;
  const int64_t at = slot / task.block_size * task.block_stride +
                     slot % task.block_size * task.slot_stride;
  auto* key_cache = static_cast<Cached*>(task.key_cache) + at;
  auto* value_cache = static_cast<Cached*>(task.value_cache) + at;
  for (int64_t h = 0; h < task.num_kv_heads; ++h) {
    const int64_t head = h * task.cache_head_stride;
    const Number* key_head = key + h * task.key_head_stride;
    const Number* value_head = value + h * task.value_head_stride;
    if constexpr (sizeof(Cached) == 1) {
      alignas(64) Number rotated[kMaxHeadDim];
      norm_and_rotate(task, position, key_head, task.key_norm, rotated);
      store_int8_head(rotated, task.head_dim, key_cache + head);
      store_int8_head(value_head, task.head_dim, value_cache + head);
    } else {
      norm_and_rotate(task, position, key_head, task.key_norm, key_cache + head);
      memcpy(value_cache + head, value_head, task.head_dim * sizeof(Number));
    }
  }
}

template <class Number>
void rotate_query(const RotateTask& task, int64_t row, int64_t position) {
  Number* query = static_cast<Number*>(task.query) + row * task.query_stride;
  for (int64_t h = 0; h < task.num_heads; ++h) {
    Number* head = query + h * task.query_head_stride;
    norm_and_rotate(task, position, head, task.query_norm, head);
  }
}

template <class Number>
void rotate(RotateTask& task) {
  const Batch& batch = *task.batch;
  const int64_t row_size = (task.num_heads + task.num_kv_heads) * task.head_dim;
  for_each_row(task, batch.num_rows, row_size, [&](int64_t row) {
    rotate_query<Number>(task, row, batch.positions[row]);
    Number* key = static_cast<Number*>(task.key) + row * task.key_stride;
    for (int64_t h = 0; h < task.num_kv_heads; ++h) {
      Number* head = key + h * task.key_head_stride;
      norm_and_rotate(task, batch.positions[row], head, task.key_norm, head);
    }
  });
}

template <class Number, class Cached = Number>
void rotate_and_write(RotateTask& task) {
  const Batch& batch = *task.batch;
  const int64_t row_size = (task.num_heads + 2 * task.num_kv_heads) * task.head_dim;
  for_each_row(task, batch.num_rows, row_size, [&](int64_t row) {
    const int64_t position = batch.positions[row], slot = batch.slot_mapping[row];
    rotate_query<Number>(task, row, position);
    if (slot >= 0) store_key_and_value<Number, Cached>(task, row, position, slot);
  });
}

template <class Number>
void rotate_end(const LatentTask& task, int64_t position, float* end) {
  const int64_t at = position * task.table_stride;
  rotate_head(end, task.half, static_cast<const Number*>(task.cos) + at,
              static_cast<const Number*>(task.sin) + at);
}

template <class Number, class Cached = Number>
void write_latents(LatentTask& task) {
  const Batch& batch = *task.batch;
  const int64_t ends = 2 * task.half, size = task.rank + ends;
  for_each_row(task, batch.num_rows, task.num_heads * ends + size, [&](int64_t row) {
    alignas(64) float numbers[kMaxHeadDim];
    const int64_t position = batch.positions[row], slot = batch.slot_mapping[row];
    const Number* query = static_cast<const Number*>(task.query) + row * task.query_stride;
    Number* rotated = static_cast<Number*>(task.rotated) + row * task.rotated_stride;
    for (int64_t h = 0; h < task.num_heads; ++h) {
      load_head(query + h * task.query_head_stride, ends, numbers);
      rotate_end<Number>(task, position, numbers);
      store_head(numbers, ends, rotated + h * task.rotated_head_stride);
    }
    if (slot < 0) return;
    load_head(static_cast<const Number*>(task.latents) + row * task.latents_stride, size, numbers);
    norm_head<Number>(numbers, task.rank, task.norm, task.has_float_norm, task.eps);
    rotate_end<Number>(task, position, numbers + task.rank);
    auto* to = static_cast<Cached*>(task.cache) + slot / task.block_size * task.block_stride +
               slot % task.block_size * task.slot_stride;
    if constexpr (sizeof(Cached) == 1) {
      alignas(64) Number rounded[kMaxHeadDim];
      store_head(numbers, size, rounded);
      store_int8_head(rounded, size, to);
    } else {
      store_head(numbers, size, to);
    }
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNELS(write_latents, LatentTask, write_latents)
PAGEWIRE_KERNEL pw_write_latents_int8_float32(LatentTask* task) {
  write_latents<float, char>(*task);
}
PAGEWIRE_KERNEL pw_write_latents_int8_bfloat16(LatentTask* task) {
  write_latents<BFloat16, char>(*task);
}

PAGEWIRE_KERNELS(rotate, RotateTask, rotate)
PAGEWIRE_KERNELS(rotate_and_write, RotateTask, rotate_and_write)
PAGEWIRE_KERNEL pw_rotate_and_write_int8_float32(RotateTask* task) {
  rotate_and_write<float, char>(*task);
}
PAGEWIRE_KERNEL pw_rotate_and_write_int8_bfloat16(RotateTask* task) {
  rotate_and_write<BFloat16, char>(*task);
}
