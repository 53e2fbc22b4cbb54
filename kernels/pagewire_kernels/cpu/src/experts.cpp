// The choice of experts, and the sum of their results; see experts.h.
#include "experts.h"

#include "rows.h"

namespace pagewire {
namespace {

constexpr float kLowest = -__builtin_inff();

// Numbers of one row, padded to whole registers.
struct alignas(64) Padded {
  float numbers[kMaxExperts];

  // Calls `visit` with the address of each register of `count` numbers.
  template <class Visit>
  void for_each_register(int64_t count, Visit visit) {
    for (int64_t i = 0; i < count; i += kLanes) visit(numbers + i);
  }
  void pad(int64_t count, float with) {
    for (int64_t i = count; i % kLanes; ++i) numbers[i] = with;
  }
  float greatest(int64_t count) {
    Floats most = broadcast(kLowest);
    for_each_register(count, [&](float* at) { most = greater_of(load_floats(at), most); });
    return greatest_lane(most);
  }
};

// exp(x) / (sum of all). x: padded with the lowest number, which adds nothing.
void softmax(Padded& x, int64_t count) {
  const Floats most = broadcast(x.greatest(count));
  Floats sum = zeros();
  x.for_each_register(count, [&](float* at) {
    const Floats power = exp(subtract(load_floats(at), most));
    sum = add(sum, power);
    store_floats(at, power);
  });
  const Floats total = broadcast(sum_lanes(sum));
  x.for_each_register(count, [&](float* at) { store_floats(at, divide(load_floats(at), total)); });
}

void sigmoid(Padded& x, int64_t count) {
  const Floats one = broadcast(1.0f);
  x.for_each_register(count, [&](float* at) {
    store_floats(at, divide(one, add(one, exp_of_negative(load_floats(at)))));
  });
}

// The first place of the largest number; of those that are the lowest, the first that is not chosen.
int64_t next_best(Padded& x, int64_t count, const bool* is_chosen) {
  const float most = x.greatest(count);
  int64_t i = 0;
  while (is_chosen[i] || x.numbers[i] != most) ++i;
  return i;
}

// A group's score: the sum of its one or two best. Not a number, as infinity and what was none before
// have as their sum, is the lowest.
float score_of(const float* x, int64_t count, int64_t num_best) {
  float first = kLowest, second = kLowest;
  for (int64_t i = 0; i < count; ++i) {
    if (x[i] > first) {
      second = first;
      first = x[i];
    } else if (x[i] > second) {
      second = x[i];
    }
  }
  const float score = num_best == 1 || count == 1 ? first : first + second;
  return score > kLowest ? score : kLowest;
}

// Lowers the scores of all groups but the best.
void keep_best_groups(const RouteTask& task, Padded& x) {
  const int64_t size = task.num_experts / task.num_groups;
  Padded scores;
  bool is_kept[kMaxExperts] = {};
  for (int64_t g = 0; g < task.num_groups; ++g) {
    scores.numbers[g] = score_of(x.numbers + g * size, size, task.num_best);
  }
  scores.pad(task.num_groups, kLowest);
  for (int64_t i = 0; i < task.num_chosen_groups; ++i) {
    const int64_t g = next_best(scores, task.num_groups, is_kept);
    is_kept[g] = true;
    scores.numbers[g] = kLowest;
  }
  for (int64_t e = 0; e < task.num_experts; ++e) {
    if (!is_kept[e / size]) x.numbers[e] = kLowest;
  }
}

// Chooses the experts of a row, in their order. Not a number is the lowest score.
void choose(const RouteTask& task, const Padded& scores, int32_t* chosen) {
  Padded x;
  bool is_chosen[kMaxExperts] = {};
  for (int64_t e = 0; e < task.num_experts; ++e) {
    const float score = scores.numbers[e] + (task.bias == nullptr ? 0.0f : task.bias[e]);
    x.numbers[e] = score > kLowest ? score : kLowest;
  }
  x.pad(task.num_experts, kLowest);
  if (task.num_chosen_groups < task.num_groups) keep_best_groups(task, x);
  for (int64_t i = 0; i < task.num_chosen; ++i) {
    const int64_t expert = next_best(x, task.num_experts, is_chosen);
    is_chosen[expert] = true;
    x.numbers[expert] = kLowest;
  }
  for (int64_t e = 0; e < task.num_experts; ++e) {
    if (is_chosen[e]) *chosen++ = static_cast<int32_t>(e);
  }
}

// The softmax of an expert among those with lower logits that are near; of equal ones, the first
// expert's counts as the highest.
float sparse_mixer(const RouteTask& task, const float* logits, int64_t expert) {
  const float own = logits[expert];
  Padded among;
  for (int64_t e = 0; e < task.num_experts; ++e) {
    const float other = logits[e], size = __builtin_fabsf(other);
    const bool is_higher = other > own || (other == own && e < expert);
    const bool is_far = (own - other) / (size > own ? size : own) > task.nearness;
    among.numbers[e] = is_higher || is_far ? kLowest : other;
  }
  among.pad(task.num_experts, kLowest);
  softmax(among, task.num_experts);
  return among.numbers[expert];
}

void route(const RouteTask& task, int64_t row) {
  const float* logits = task.logits + row * task.logits_stride;
  int32_t* chosen = task.plan->slots + row * task.num_chosen;
  float* weights = task.plan->weights + row * task.num_chosen;
  Padded scores, of_chosen;
  memcpy(scores.numbers, logits, task.num_experts * sizeof(float));
  scores.pad(task.num_experts, kLowest);
  if (task.scoring == kSoftmax) softmax(scores, task.num_experts);
  if (task.scoring == kSigmoid) sigmoid(scores, task.num_experts);
  choose(task, scores, chosen);
  for (int64_t i = 0; i < task.num_chosen; ++i) of_chosen.numbers[i] = scores.numbers[chosen[i]];
  if (task.scoring == kSoftmaxOfChosen) {
    of_chosen.pad(task.num_chosen, kLowest);
    softmax(of_chosen, task.num_chosen);
  }
  if (task.scoring == kSigmoidOfChosen) {
    of_chosen.pad(task.num_chosen, kLowest);
    sigmoid(of_chosen, task.num_chosen);
  }
  if (task.scoring == kSparseMixer) {
    for (int64_t i = 0; i < task.num_chosen; ++i) {
      of_chosen.numbers[i] = sparse_mixer(task, logits, chosen[i]);
    }
  }
  float sum = task.epsilon;
  for (int64_t i = 0; i < task.num_chosen; ++i) sum += of_chosen.numbers[i];
  if (sum < task.min_sum) sum = task.min_sum;
  for (int64_t i = 0; i < task.num_chosen; ++i) {
    const float weight = of_chosen.numbers[i];
    weights[i] = (task.normalizes ? weight / sum : weight) * task.scale;
    if (task.factors != nullptr) weights[i] *= task.factors[chosen[i]];
  }
}

// Sorts pairs of rows and experts, of which `slots` has the experts, and stores their slots there.
void sort_by_expert(const RouteTask& task, int64_t num_rows) {
  ExpertPlan& plan = *task.plan;
  const int64_t num_pairs = num_rows * task.num_chosen;
  const int64_t num_experts = task.num_experts - task.num_zero_experts;
  int32_t next[kMaxExperts] = {};  // numbers of slots, then the next free one of each expert
  for (int64_t i = 0; i < num_pairs; ++i) ++next[plan.slots[i]];
  int32_t first = 0;
  int64_t num_active = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int32_t count = next[e];
    if (count == 0) continue;
    plan.active[num_active] = static_cast<int32_t>(e);
    plan.starts[num_active++] = first;
    next[e] = first;
    first += count;
  }
  plan.starts[num_active] = first;
  plan.num_active = num_active;
  for (int64_t i = 0, row = 0; row < num_rows; ++row) {
    for (int64_t j = 0; j < task.num_chosen; ++j, ++i) {
      if (plan.slots[i] >= num_experts) {
        plan.slots[i] = -1;
        continue;
      }
      const int32_t slot = next[plan.slots[i]]++;
      plan.rows[slot] = static_cast<int32_t>(row);
      plan.slots[i] = slot;
    }
  }
}

// The thread that is the last to choose experts sorts the pairs.
void route_all(RouteTask& task) {
  const int64_t num_rows = *task.num_rows, step = rows_per_item(task.num_experts * 16);
  if (num_rows == 0) {
    if (take_item(task) == 0) sort_by_expert(task, 0);
    return;
  }
  for (;;) {
    const int64_t first = take_item(task) * step;
    if (first >= num_rows) return;
    const int64_t count = num_rows - first < step ? num_rows - first : step;
    for (int64_t row = first; row < first + count; ++row) route(task, row);
    if (__atomic_add_fetch(&task.num_done, count, __ATOMIC_ACQ_REL) == num_rows) {
      task.num_done = 0;
      sort_by_expert(task, num_rows);
    }
  }
}

template <class Number>
void scatter(ScatterTask& task) {
  for_each_row(task, *task.num_rows, task.size * task.num_chosen, [&](int64_t row) {
    const Number* x = static_cast<const Number*>(task.x) + row * task.x_stride;
    for (int64_t j = row * task.num_chosen; j < (row + 1) * task.num_chosen; ++j) {
      const Floats weight = broadcast(task.plan->weights[j]);
      Number* y = static_cast<Number*>(task.y) + task.plan->slots[j] * task.y_stride;
      for (int64_t i = 0; i < task.size; i += kLanes) {
        store_some(y + i, multiply(load_some(x + i, task.size - i), weight), task.size - i);
      }
    }
  });
}

constexpr int64_t kColumnsPerItem = 512;

// A work item is a range of columns of one row.
template <class Number>
void combine(CombineTask& task) {
  const int64_t parts = divide_up(task.size, kColumnsPerItem), num_items = *task.num_rows * parts;
  for (int64_t item = take_item(task); item < num_items; item = take_item(task)) {
    const int64_t row = item / parts, first = item % parts * kColumnsPerItem;
    const int64_t end = first + kColumnsPerItem < task.size ? first + kColumnsPerItem : task.size;
    const int32_t* slots = task.plan->slots + row * task.num_chosen;
    const float* weights = task.plan->weights + row * task.num_chosen;
    int64_t num_products = task.num_chosen;
    float of_zero = 0.0f;  // the weight of zero experts, which are the last ones
    while (num_products > 0 && slots[num_products - 1] < 0) of_zero += weights[--num_products];
    const Number* zero = nullptr;
    if (task.zero != nullptr) zero = static_cast<const Number*>(task.zero) + row * task.zero_stride;
    const Number* shared = nullptr;
    float gate = 1.0f;
    if (task.shared != nullptr) {
      shared = static_cast<const Number*>(task.shared) + row * task.shared_stride;
    }
    if (task.gate != nullptr) {
      const Floats logit = broadcast(task.gate[row * task.gate_stride]), one = broadcast(1.0f);
      gate = first_lane(divide(one, add(one, exp_of_negative(logit))));
    }
    Number* y = static_cast<Number*>(task.y) + row * task.y_stride;
    for (int64_t i = first; i < end; i += kLanes) {
      Floats sum = zeros();
      for (int64_t j = 0; j < num_products; ++j) {
        const Floats x = load_some(task.x + slots[j] * task.x_stride + i, end - i);
        sum = multiply_add(broadcast(task.is_weighted ? weights[j] : 1.0f), x, sum);
      }
      if (zero != nullptr) {
        sum = multiply_add(broadcast(of_zero), load_some(zero + i, end - i), sum);
      }
      if (shared != nullptr) {
        sum = multiply_add(broadcast(gate), load_some(shared + i, end - i), sum);
      }
      store_some(y + i, sum, end - i);
    }
  }
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_KERNEL pw_route(RouteTask* task) { route_all(*task); }
PAGEWIRE_KERNELS(scatter, ScatterTask, scatter)
PAGEWIRE_KERNELS(combine, CombineTask, combine)
