// Packing the keys and values of a step and head into the layout of the products.
#pragma once

#include "attention.h"
#include "attention_ahead.h"

namespace pagewire {

// Keys: [units of the head][kStep] words, so that lanes are keys. Only `num_keys` of them, rounded
// up to whole registers, are written. `rows` are readable for the padded head.
template <class Number>
void pack_keys(const Number* const* rows, int64_t num_keys, int64_t padded_dim, float* packed,
               Ahead& ahead) {
  for (int64_t key = 0; key < num_keys; key += kLanes) {
    for (int64_t at = 0; at < padded_dim; at += kChunk<Number>) {
      ahead.fetch();
      ahead.fetch();
      Floats square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load_units(rows[key + i] + at);
      transpose(square);
      float* const to = packed + at / kPerUnit<Number> * kStep + key;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store_floats(to + i * kStep, square[i]);
    }
  }
}

// Values: [units of keys][padded values] words, so that lanes are elements of the head. Only the
// units that hold `num_keys` keys are written.
template <class Number>
void pack_values(const Number* const* rows, int64_t num_keys, int64_t padded_dim, float* packed,
                 Ahead& ahead) {
  for (int64_t key = 0; key < num_keys; ++key) {
    if (key % 2 == 0) ahead.fetch();
    for (int64_t at = 0; at < padded_dim; at += kLanes) {
      store_floats(packed + key * padded_dim + at, load_units(rows[key] + at));
    }
  }
}

// The numbers of two rows, a register of each, alternating.
inline void interleave(const BFloat16* first, const BFloat16* second, Floats& low, Floats& high) {
  interleave(load_words(first), load_words(second), low, high);
}

template <>
inline void pack_values(const BFloat16* const* rows, int64_t num_keys, int64_t padded_dim,
                        float* packed, Ahead& ahead) {
  for (int64_t key = 0; key < num_keys; key += 2) {
    if (key % 4 == 0) ahead.fetch();
    for (int64_t at = 0; at < padded_dim; at += kChunk<BFloat16>) {
      Floats low, high;
      interleave(rows[key] + at, rows[key + 1] + at, low, high);
      float* const to = packed + key / 2 * padded_dim + at;
      store_floats(to, low);
      store_floats(to + kLanes, high);
    }
  }
}

}  // namespace pagewire
