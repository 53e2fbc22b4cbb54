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

// The natural logarithm of x > 0 that is normal, within 2 ulp, by the polynomial of logf in Cephes.
inline Floats log(Floats x) {
  // x = 2^n * m with m from sqrt(1/2) to sqrt(2)
  const Words bits = add_words(as_words(x), broadcast_word(0x3f800000 - 0x3f3504f3));
  const Floats n = to_floats(add_words(shift_right<23>(bits), broadcast_word(-127)));
  const Words mantissa = add_words(and_words(bits, broadcast_word(0x007fffff)), broadcast_word(0x3f3504f3));
  const Floats m = subtract(as_floats(mantissa), broadcast(1.0f));
  static const float kCoefficients[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
                                        1.4249322787e-1f,  -1.6668057665e-1f, 2.0000714765e-1f,
                                        -2.4999993993e-1f, 3.3333331174e-1f};
  Floats y = broadcast(7.0376836292e-2f);
  for (const float c : kCoefficients) y = multiply_add(y, m, broadcast(c));
  const Floats square = multiply(m, m);
  y = multiply(multiply(y, m), square);
  y = multiply_add(n, broadcast(-2.12194440e-4f), y);
  y = multiply_add(square, broadcast(-0.5f), y);
  return multiply_add(n, broadcast(0.693359375f), add(m, y));
}

// log(1 + e^x); NaN stays NaN.
inline Floats softplus(Floats x) {
  const Floats one = broadcast(1.0f);
  const Floats u = exp(less_of(broadcast(20.0f), x)), sum = add(one, u);
  // The digits of u that the sum has lost.
  const Floats lost = subtract(u, subtract(sum, one));
  const Floats small = add(log(sum), divide(lost, sum));
  return select(not_less_than(x, broadcast(20.0f)), x, small);
}

// (up + offset) * gate * sigmoid(alpha * gate), with both clamped first (gpt-oss), or with up and the
// activation of the gate clamped (Step 3.5); a limit that does not apply is infinite.
struct ClampedSilu {
  float alpha, gate_limit, active_limit, up_limit, offset;
};

// activation(gate) * up
template <class Function>
inline Floats gate(const Function& function, Floats gate, Floats up) {
  return multiply(function(gate), up);
}
inline Floats gate(const ClampedSilu& clamped, Floats gate, Floats up) {
  const Floats limit = broadcast(clamped.up_limit);
  gate = less_of(broadcast(clamped.gate_limit), gate);
  up = greater_of(subtract(zeros(), limit), less_of(limit, up));
  const Floats decay = exp_of_negative(multiply(gate, broadcast(clamped.alpha)));
  const Floats active =
      less_of(broadcast(clamped.active_limit), divide(gate, add(broadcast(1.0f), decay)));
  return multiply(add(up, broadcast(clamped.offset)), active);
}

// As `with_activation`, for what `gate` supports.
template <class Visit>
inline void with_gate(Activation activation, const ClampedSilu& clamped, Visit visit) {
  if (activation == kClampedSilu) return visit(clamped);
  with_activation(activation, visit);
}

}  // namespace pagewire
