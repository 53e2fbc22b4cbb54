// Activation functions of an MLP, a register at a time.
#pragma once

#include "vectors.h"

namespace pagewire {

enum Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kClampedSilu, kNone };

// e^-x, with -x bounded so that it stays finite.
inline Floats exp_of_negative(Floats x) {
  return exp(subtract(zeros(), greater_of(broadcast(-87.0f), x)));
}

struct Silu {
  Floats operator()(Floats x) const { return divide(x, add(broadcast(1.0f), exp_of_negative(x))); }
};

// The tanh approximation (Hendrycks and Gimpel 2016): (1 + tanh(y)) / 2 is 1 / (1 + e^-2y).
struct GeluTanh {
  Floats operator()(Floats x) const {
    const Floats cube = multiply(multiply(x, x), x);
    const Floats y = multiply_add(cube, broadcast(0.044715f), x);
    const Floats twice = multiply(y, broadcast(1.5957691216057308f));
    return divide(x, add(broadcast(1.0f), exp_of_negative(twice)));
  }
};

// 1 - erf(z) for z >= 0, with a relative error below 2e-7: t e^(-z^2 + p(t)) with t = 1 / (1 + z / 2)
// and a Chebyshev fit p (Press et al. 1992, section 6.2).
inline Floats erfc(Floats z) {
  static const float kCoefficients[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f,
                                        0.27886807f,  -0.18628806f, 0.09678418f, 0.37409196f,
                                        1.00002368f, -1.26551223f};
  const Floats one = broadcast(1.0f);
  const Floats t = divide(one, multiply_add(z, broadcast(0.5f), one));
  Floats p = zeros();
  for (const float c : kCoefficients) p = multiply_add(p, t, broadcast(c));
  return multiply(t, exp(subtract(p, multiply(z, z))));
}

// x * Phi(x), with Phi of the standard normal distribution.
struct Gelu {
  Floats operator()(Floats x) const {
    const Floats size = greater_of(subtract(zeros(), x), x);
    const Floats tail = multiply(broadcast(0.5f), erfc(multiply(size, broadcast(0.7071067811865476f))));
    const Floats positive = subtract(broadcast(1.0f), tail);
    return multiply(x, select(not_less_than(x, zeros()), positive, tail));
  }
};

struct Relu {
  Floats operator()(Floats x) const { return greater_of(zeros(), x); }
};

// The square of ReLU (So et al. 2021).
struct Relu2 {
  Floats operator()(Floats x) const {
    const Floats positive = Relu()(x);
    return multiply(positive, positive);
  }
};

// Calls `visit` with the function object of `activation`.
template <class Visit>
inline void with_activation(Activation activation, Visit visit) {
  switch (activation) {
    case kSilu: return visit(Silu());
    case kGelu: return visit(Gelu());
    case kGeluTanh: return visit(GeluTanh());
    case kRelu: return visit(Relu());
    case kRelu2: return visit(Relu2());
    case kClampedSilu:  // see `with_gate`
    case kNone: return;
  }
}

inline Floats less_of(Floats a, Floats b) {
  return subtract(zeros(), greater_of(subtract(zeros(), a), subtract(zeros(), b)));
}

// (up + offset) * gate * sigmoid(alpha * gate), with both clamped first (gpt-oss).
struct ClampedSilu {
  float alpha, limit, offset;
};

// activation(gate) * up
template <class Function>
inline Floats gate(const Function& function, Floats gate, Floats up) {
  return multiply(function(gate), up);
}
inline Floats gate(const ClampedSilu& clamped, Floats gate, Floats up) {
  const Floats limit = broadcast(clamped.limit);
  gate = less_of(limit, gate);
  up = greater_of(subtract(zeros(), limit), less_of(limit, up));
  const Floats decay = exp_of_negative(multiply(gate, broadcast(clamped.alpha)));
  const Floats active = divide(gate, add(broadcast(1.0f), decay));
  return multiply(add(up, broadcast(clamped.offset)), active);
}

// As `with_activation`, for what `gate` supports.
template <class Visit>
inline void with_gate(Activation activation, const ClampedSilu& clamped, Visit visit) {
  if (activation == kClampedSilu) return visit(clamped);
  with_activation(activation, visit);
}

}  // namespace pagewire
