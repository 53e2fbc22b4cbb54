// Packing a weight, and gathering rows of a packed one; see linear.h.
#include "linear.h"

namespace pagewire {
namespace {

constexpr int64_t kStepsAtOnce = 16;  // a cache line of each row

// Outputs and inputs beyond those of the weight are zeros.
template <class Dot>
void pack_panel(const PackTask& task, int64_t panel) {
  using Input = typename Dot::Input;
  const int64_t num_steps = divide_up(task.in_features, Dot::kInputsPerStep);
  const int64_t num_whole = task.in_features / Dot::kInputsPerStep;
  auto* packed = static_cast<int32_t*>(task.packed) + panel * num_steps * kPanel;
  if (num_whole < num_steps) memset(packed + num_whole * kPanel, 0, kStepBytes);
  for (int64_t first = 0; first < num_steps; first += kStepsAtOnce) {
    const int64_t end = first + kStepsAtOnce < num_whole ? first + kStepsAtOnce : num_whole;
    for (int64_t n = 0; n < kPanel; ++n) {
      const int64_t row = row_of(task, panel, n);
      if (row < 0) {
        for (int64_t i = first; i < end; ++i) packed[i * kPanel + n] = 0;
        continue;
      }
      const Input* from = static_cast<const Input*>(task.weight) + row * task.weight_stride;
      for (int64_t i = first; i < end; ++i) {
        memcpy(packed + i * kPanel + n, from + i * Dot::kInputsPerStep, 4);
      }
      if (end < first + kStepsAtOnce && num_whole < num_steps) {
        memcpy(packed + num_whole * kPanel + n, from + task.in_features - 1, sizeof(Input));
      }
    }
  }
}

template <class Dot>
void pack(PackTask& task) {
  for_each_panel(task, [&](int64_t panel) { pack_panel<Dot>(task, panel); });
}

template <class Dot>
void gather(GatherTask& task) {
  using Input = typename Dot::Input;
  const int64_t num_steps = divide_up(task.in_features, Dot::kInputsPerStep);
  const int64_t num_whole = task.in_features / Dot::kInputsPerStep;
  gather_rows<Input>(task, [&](int64_t row, Input* y) {
    const auto* lane = static_cast<const int32_t*>(task.packed) +
                       row / kPanel * num_steps * kPanel + row % kPanel;
    for (int64_t k = 0; k < num_whole; ++k) memcpy(y + k * Dot::kInputsPerStep, lane + k * kPanel, 4);
    if (num_whole < num_steps) memcpy(y + task.in_features - 1, lane + num_whole * kPanel, sizeof(*y));
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNEL pw_pack_float32(PackTask* task) { pack<Float32Dot>(*task); }
PAGEWIRE_KERNEL pw_pack_bfloat16(PackTask* task) { pack<BFloat16Dot>(*task); }
PAGEWIRE_KERNEL pw_gather_float32(GatherTask* task) { gather<Float32Dot>(*task); }
PAGEWIRE_KERNEL pw_gather_bfloat16(GatherTask* task) { gather<BFloat16Dot>(*task); }
