// The products of attention with keys and values as they are in the cache, for tiles of few rows
// (decodes), for which packing would take longer than it saves. Sums consist of the same additions in
// the same order as with packed keys and values; see attention_multiply.h.
#pragma once

#include "attention.h"
#include "attention_ahead.h"
#include "attention_multiply.h"
#include "attention_pack.h"

namespace pagewire {

// scores[row][key] = queries[row] . keys[key], for `num_keys` keys, rounded up to whole registers.
// `keys` are readable for a padded head.
template <class Number, int num_rows>
void score_keys(const float* queries, int64_t head_units, const Number* const* keys,
                int64_t num_keys, float (*scores)[kStep], Ahead& ahead) {
  using Dot = typename Units<Number>::Dot;
  for (int64_t key = 0; key < num_keys; key += kLanes) {
    Floats sum[num_rows];
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row) sum[row] = zeros();
    for (int64_t unit = 0; unit < head_units; unit += kLanes) {
      ahead.fetch();
      ahead.fetch();
      Floats square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = load_units(keys[key + i] + unit * kPerUnit<Number>);
      }
      transpose(square);
      static_assert(PartialSum<Dot>::kUnits >= kLanes);
      PartialSum<Dot> partial[num_rows];
#pragma GCC unroll 8
      for (int row = 0; row < num_rows; ++row) partial[row].begin(sum[row]);
      const auto add_unit = [&](int64_t i, Floats column) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int row = 0; row < num_rows; ++row) {
          int32_t word;
          memcpy(&word, queries + row * head_units + unit + i, sizeof(word));
          partial[row].add(Dot::broadcast(word), Dot::operand(column));
        }
      };
      // The padding of a head adds nothing to the sums.
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) add_unit(i, square[i]);
#pragma GCC unroll 8
      for (int row = 0; row < num_rows; ++row) sum[row] = partial[row].end(sum[row]);
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row) store_floats(scores[row] + key, sum[row]);
  }
}

constexpr float kCodeUnit = 0x1p24f;

// The codes in one byte of each word, times `kCodeUnit`: shifted so that the sign bit is in its place.
template <int kByte>
inline Floats codes_at(Words x) {
  const Words shifted = shift_left<24 - 8 * kByte>(x);
  return to_floats(and_words(shifted, broadcast_word(static_cast<int32_t>(0xff000000u))));
}

// The same for int8 keys. As many are processed at once as the registers hold sums for, so that no sum
// waits for the previous one. With four codes per word, few words are transposed.
template <int num_rows>
void score_codes(const float* queries, int64_t head_dim, const int8_t* const* keys,
                 int64_t num_keys, float (*scores)[kStep], Ahead& ahead) {
  for (int64_t key = 0; key < num_keys; key += kVectors * kLanes) {
    Floats sum[num_rows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[row][j] = zeros();
    }
    const auto add_codes = [&](int64_t at, int j, Floats codes) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int row = 0; row < num_rows; ++row) {
        sum[row][j] = multiply_add(broadcast(queries[row * head_dim + at]), codes, sum[row][j]);
      }
    };
    alignas(64) float columns[kVectors][kLanes][kLanes];
    int64_t at = 0;
    for (; at + 4 * kLanes <= head_dim; at += 4 * kLanes) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        ahead.fetch();
        Floats square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          square[i] = as_floats(load_words(keys[key + j * kLanes + i] + at));
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store_floats(columns[j][i], square[i]);
      }
      for (int i = 0; i < kLanes; ++i) {
        Words words[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) words[j] = load_words(columns[j][i]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) add_codes(at + 4 * i, j, codes_at<0>(words[j]));
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) add_codes(at + 4 * i + 1, j, codes_at<1>(words[j]));
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) add_codes(at + 4 * i + 2, j, codes_at<2>(words[j]));
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) add_codes(at + 4 * i + 3, j, codes_at<3>(words[j]));
      }
    }
    for (; at < head_dim; at += kLanes) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        Floats square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = widen(keys[key + j * kLanes + i] + at);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          add_codes(at + i, j, multiply(square[i], broadcast(kCodeUnit)));
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        store_floats(scores[row] + key + j * kLanes,
                     multiply(sum[row][j], broadcast(1.0f / kCodeUnit)));
      }
    }
  }
}

// The values of the keys of a unit, from column `at` on, in `kVectors` registers.
template <class Number, int num_vectors>
inline void load_values(const Number* const* values, int64_t unit, int64_t at,
                        Floats (&columns)[num_vectors]) {
#pragma GCC unroll 4
  for (int j = 0; j < num_vectors; ++j) columns[j] = load_units(values[unit] + at + j * kLanes);
}

template <int num_vectors>
inline void load_values(const BFloat16* const* values, int64_t unit, int64_t at,
                        Floats (&columns)[num_vectors]) {
#pragma GCC unroll 2
  for (int j = 0; j < num_vectors; j += 2) {
    const int64_t first = at + j * kLanes;
    interleave(values[2 * unit] + first, values[2 * unit + 1] + first, columns[j], columns[j + 1]);
  }
}

// outputs[row] = outputs[row] * factors[row] + weights[row] . values, for `num_vectors` registers
// of columns from `at` on.
template <class Number, int num_rows, int num_vectors>
void add_columns(const float* weights, int64_t num_units, const Number* const* values, int64_t at,
                 const float* factors, float* outputs, int64_t output_stride, Ahead& ahead) {
  using Dot = typename Units<Number>::Dot;
  constexpr int64_t kWeightStride = kStep / kPerUnit<Number>;
  Floats sum[num_rows][num_vectors];
#pragma GCC unroll 8
  for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 8
    for (int j = 0; j < num_vectors; ++j) {
      sum[row][j] = multiply(load_floats(outputs + row * output_stride + at + j * kLanes),
                             broadcast(factors[row]));
    }
  }
  for (int64_t first = 0; first < num_units; first += PartialSum<Dot>::kUnits) {
    PartialSum<Dot> partial[num_rows][num_vectors];
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 8
      for (int j = 0; j < num_vectors; ++j) partial[row][j].begin(sum[row][j]);
    }
    const int64_t end = smaller(num_units, first + PartialSum<Dot>::kUnits);
    for (int64_t unit = first; unit < end; ++unit) {
      if (unit % 2 == 0) ahead.fetch();
      Floats columns[num_vectors];
      load_values(values, unit, at, columns);
#pragma GCC unroll 8
      for (int row = 0; row < num_rows; ++row) {
        int32_t word;
        memcpy(&word, weights + row * kWeightStride + unit, sizeof(word));
        const auto weight = Dot::broadcast(word);
#pragma GCC unroll 8
        for (int j = 0; j < num_vectors; ++j) {
          partial[row][j].add(weight, Dot::operand(columns[j]));
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 8
      for (int j = 0; j < num_vectors; ++j) sum[row][j] = partial[row][j].end(sum[row][j]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 8
    for (int j = 0; j < num_vectors; ++j) {
      store_floats(outputs + row * output_stride + at + j * kLanes, sum[row][j]);
    }
  }
}

// The same for all columns, `padded_dim` of them.
template <class Number, int num_rows>
void add_values(const float* weights, int64_t num_units, const Number* const* values,
                int64_t padded_dim, const float* factors, float* outputs, Ahead& ahead) {
  constexpr int kLeast = kPerUnit<Number>;  // registers that a unit's values fill at least
  // Partial sums take up registers, too.
  constexpr bool kIsWide = sizeof(PartialSum<typename Units<Number>::Dot>) == sizeof(Floats);
  constexpr int kMost = kIsWide || num_rows <= 2 ? kVectors : kLeast;
  int64_t at = 0;
  for (; at + kMost * kLanes <= padded_dim; at += kMost * kLanes) {
    add_columns<Number, num_rows, kMost>(weights, num_units, values, at, factors, outputs,
                                         padded_dim, ahead);
  }
  for (; at < padded_dim; at += kLeast * kLanes) {
    add_columns<Number, num_rows, kLeast>(weights, num_units, values, at, factors, outputs,
                                          padded_dim, ahead);
  }
}

}  // namespace pagewire
