#include "efla/experiments/flow_study.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "efla/io/atomic_file.h"
#include "efla/io/plot.h"
#include "efla/io/random.h"

namespace efla {
namespace {

struct Method {
  const char* name;
  std::optional<Rule> rule;  // none: the fine integration
};

constexpr size_t kFine = 4;  // the place of the fine integration among the methods

constexpr double kStiff = 5.0;  // beyond the stability of Euler and RK-2 (2) and of RK-4 (2.785)

const std::vector<Method>& methods() {
  static const std::vector<Method> list = {{"Euler", Rule::kEuler},
                                           {"RK-2", Rule::kRk2},
                                           {"RK-4", Rule::kRk4},
                                           {"exact", Rule::kExact},
                                           {"fine", std::nullopt}};
  return list;
}

// Box-Muller over SplitMix64: the same numbers on every machine's standard library.
std::vector<double> normals(SplitMix64& random, int64_t count) {
  const auto uniform = [&] { return (static_cast<double>(random.next() >> 11) + 0.5) * 0x1p-53; };
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) {
    value = std::sqrt(-2 * std::log(uniform())) * std::cos(2 * M_PI * uniform());
  }
  return values;
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// A sequence whose token t has |k|^2 = x(t) in a random direction and normal values.
FlowSequence draw_sequence(SplitMix64& random, int64_t dim, int64_t tokens,
                           const std::function<double(int64_t)>& x) {
  FlowSequence sequence{dim, {}, normals(random, tokens * dim)};
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<double> key = normals(random, dim);
    const double scale = std::sqrt(x(t)) / norm(key);
    for (const double value : key) sequence.keys.push_back(scale * value);
  }
  return sequence;
}

FlowSequence joined(const FlowSequence& first, const FlowSequence& second) {
  FlowSequence both = first;
  both.keys.insert(both.keys.end(), second.keys.begin(), second.keys.end());
  both.values.insert(both.values.end(), second.values.begin(), second.values.end());
  return both;
}

// The state after the whole sequence from zero; `each` sees it after every token.
std::vector<double> run_sequence(
    const FlowSequence& sequence, const Method& method,
    const std::function<void(const std::vector<double>&)>& each = nullptr) {
  std::vector<double> state(static_cast<size_t>(sequence.dim * sequence.dim), 0.0);
  for (int64_t t = 0; t < sequence.tokens(); ++t) {
    if (method.rule) {
      step_token(state, sequence, t, *method.rule);
    } else {
      integrate_token(state, sequence, t);
    }
    if (each) each(state);
  }
  return state;
}

// S^T k of one token.
std::vector<double> recalled(const std::vector<double>& state, const FlowSequence& s, int64_t t) {
  std::vector<double> result(static_cast<size_t>(s.dim), 0.0);
  for (int64_t i = 0; i < s.dim; ++i) {
    const double key = s.keys[static_cast<size_t>(t * s.dim + i)];
    for (int64_t j = 0; j < s.dim; ++j) {
      result[static_cast<size_t>(j)] += key * state[static_cast<size_t>(i * s.dim + j)];
    }
  }
  return result;
}

// Mean of |S^T k - v|^2 / |v|^2 over the first `pairs` tokens.
double recall_loss(const std::vector<double>& state, const FlowSequence& s, int64_t pairs) {
  double sum = 0;
  for (int64_t t = 0; t < pairs; ++t) {
    const std::vector<double> got = recalled(state, s, t);
    double error = 0, size = 0;
    for (int64_t j = 0; j < s.dim; ++j) {
      const double v = s.values[static_cast<size_t>(t * s.dim + j)];
      error += (got[static_cast<size_t>(j)] - v) * (got[static_cast<size_t>(j)] - v);
      size += v * v;
    }
    sum += error / size;
  }
  return sum / static_cast<double>(pairs);
}

// Overflows count as infinite, NaN (infinity minus infinity) too.
double median(std::vector<double> values) {
  for (double& value : values) {
    if (std::isnan(value)) value = std::numeric_limits<double>::infinity();
  }
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// 0.01 to 100, six points a decade.
std::vector<double> grid() {
  std::vector<double> xs;
  for (int i = 0; i <= 24; ++i) xs.push_back(std::pow(10.0, -2 + i / 6.0));
  return xs;
}

void error_part(const FlowStudyOptions& o, std::vector<FlowPoint>& points) {
  for (const double x : grid()) {
    std::vector<std::vector<double>> errors(kFine);
    for (int64_t s = 0; s < o.sequences; ++s) {
      SplitMix64 random(o.seed + static_cast<uint64_t>(s));
      const FlowSequence sequence =
          draw_sequence(random, o.dim, o.tokens, [&](int64_t) { return x; });
      const std::vector<double> fine = run_sequence(sequence, methods()[kFine]);
      for (size_t m = 0; m < kFine; ++m) {
        std::vector<double> state = run_sequence(sequence, methods()[m]);
        for (size_t i = 0; i < state.size(); ++i) state[i] -= fine[i];
        errors[m].push_back(norm(state) / norm(fine));
      }
    }
    for (size_t m = 0; m < kFine; ++m) {
      points.push_back({"error", methods()[m].name, x, median(errors[m])});
    }
  }
}

void norm_part(const FlowStudyOptions& o, std::vector<FlowPoint>& points) {
  for (const Method& method : methods()) {
    std::vector<std::vector<double>> norms(static_cast<size_t>(o.tokens));  // by token
    for (int64_t s = 0; s < o.sequences; ++s) {
      SplitMix64 random(o.seed + static_cast<uint64_t>(s));
      const FlowSequence sequence = draw_sequence(
          random, o.dim, o.tokens, [](int64_t t) { return t % 2 == 0 ? 0.25 : kStiff; });
      size_t token = 0;
      run_sequence(sequence, method, [&](const std::vector<double>& state) {
        norms[token++].push_back(norm(state));
      });
    }
    for (size_t t = 0; t < norms.size(); ++t) {
      points.push_back({"norm", method.name, static_cast<double>(t + 1), median(norms[t])});
    }
  }
}

void recall_part(const FlowStudyOptions& o, std::vector<FlowPoint>& points) {
  for (const double x : grid()) {
    for (const Method& method : methods()) {
      std::vector<double> losses;
      for (int64_t s = 0; s < o.sequences; ++s) {
        SplitMix64 random(o.seed + static_cast<uint64_t>(s));
        const auto one = [](int64_t) { return 1.0; };
        const FlowSequence stored = draw_sequence(random, o.dim, o.pairs, one);
        const FlowSequence noise =
            draw_sequence(random, o.dim, o.noise, [&](int64_t) { return x; });
        losses.push_back(recall_loss(run_sequence(joined(stored, noise), method), stored, o.pairs));
      }
      points.push_back({"recall", method.name, x, median(losses)});
    }
  }
}

std::string csv(const std::vector<FlowPoint>& points) {
  std::string text = "part,method,x,value\n";
  for (const FlowPoint& p : points) {
    text += fmt::format("{},{},{:.6g},{:.9g}\n", p.part, p.method, p.x, p.value);
  }
  return text;
}

// Curves of one part. A diverged method leaves the picture at the top, where the axis ends.
Plot plot_of(const std::vector<FlowPoint>& points, const std::string& part, Plot plot) {
  for (const Method& method : methods()) {
    Curve curve{method.name, {}};
    curve.dotted = !method.rule;
    for (const FlowPoint& p : points) {
      if (p.part == part && p.method == method.name) curve.points.emplace_back(p.x, p.value);
    }
    if (curve.points.empty())
      curve.points.emplace_back(NAN, NAN);  // keeps its colour for the others
    plot.curves.push_back(std::move(curve));
  }
  return plot;
}

}  // namespace

void integrate_token(std::vector<double>& state, const FlowSequence& s, int64_t token) {
  // dS/ds is always along k, so S(s) = S(0) + k c(s)^T with dc/ds = (v - S(0)^T k) - |k|^2 c. The
  // equation and the classical method are linear, so c is the first bracket times what one scalar
  // equation gives: the steps are those of the method on S.
  constexpr double kLargestStep = 0.01;  // in units of 1 / |k|^2; the method's error is about 1e-10
  const double* k = s.keys.data() + token * s.dim;
  double lambda = 0;
  for (int64_t i = 0; i < s.dim; ++i) lambda += k[i] * k[i];
  const auto steps = static_cast<int64_t>(std::ceil(std::max(1.0, lambda / kLargestStep)));
  const double h = 1.0 / static_cast<double>(steps);
  double c = 0;
  for (int64_t i = 0; i < steps; ++i) {
    const double k1 = 1 - lambda * c;
    const double k2 = 1 - lambda * (c + h / 2 * k1);
    const double k3 = 1 - lambda * (c + h / 2 * k2);
    const double k4 = 1 - lambda * (c + h * k3);
    c += h / 6 * (k1 + 2 * k2 + 2 * k3 + k4);
  }
  const std::vector<double> at_start = recalled(state, s, token);
  for (int64_t i = 0; i < s.dim; ++i) {
    for (int64_t j = 0; j < s.dim; ++j) {
      const double v = s.values[static_cast<size_t>(token * s.dim + j)];
      state[static_cast<size_t>(i * s.dim + j)] +=
          k[i] * c * (v - at_start[static_cast<size_t>(j)]);
    }
  }
}

void step_token(std::vector<double>& state, const FlowSequence& s, int64_t token, Rule rule) {
  const double* k = s.keys.data() + token * s.dim;
  double lambda = 0;
  for (int64_t i = 0; i < s.dim; ++i) lambda += k[i] * k[i];
  const auto step = step_coefficients(rule, 1.0, lambda, /*has_decay=*/false, 0.0);
  const std::vector<double> old = recalled(state, s, token);
  for (int64_t i = 0; i < s.dim; ++i) {
    for (int64_t j = 0; j < s.dim; ++j) {
      const double v = s.values[static_cast<size_t>(token * s.dim + j)];
      state[static_cast<size_t>(i * s.dim + j)] +=
          k[i] * (step.write * v - step.erase * old[static_cast<size_t>(j)]);
    }
  }
}

std::vector<FlowPoint> run_flow_study(const FlowStudyOptions& options) {
  std::vector<FlowPoint> points;
  error_part(options, points);
  norm_part(options, points);
  recall_part(options, points);
  return points;
}

bool write_flow_study(const std::filesystem::path& folder, const std::vector<FlowPoint>& points) {
  make_folder(folder);
  write_file_atomically(folder / "flow.csv", csv(points));
  Plot error{"Error after the sequence, growing keys", "beta |k|^2", "|S - S_fine| / |S_fine|", {}};
  error.log_x = error.log_y = true;
  error.y_low = 1e-12;
  error.y_high = 1e6;
  Plot norms{"Norm of the state, stiff sequence", "token", "|S|", {}};
  norms.log_y = true;
  Plot recall{"Loss of recall after noise", "beta |k|^2 of the noise", "|S^T k - v|^2 / |v|^2", {}};
  recall.log_x = recall.log_y = true;
  recall.y_low = 0.1;
  recall.y_high = 1e4;
  return draw_plots(folder / "flow.png",
                    {plot_of(points, "error", error), plot_of(points, "norm", norms),
                     plot_of(points, "recall", recall)});
}

std::string flow_table(const std::vector<FlowPoint>& points) {
  const auto value = [&](const std::string& part, const std::string& method, double x) {
    for (const FlowPoint& p : points) {
      if (p.part == part && p.method == method && std::abs(p.x - x) < 1e-6 * x) {
        return fmt::format("{:.2g}", p.value);
      }
    }
    return std::string("-");
  };
  double last = 0;
  for (const FlowPoint& p : points) {
    if (p.part == "norm") last = std::max(last, p.x);
  }
  std::string text = fmt::format(
      "| method | error at x = 0.1 | 1 | 10 | norm after {} tokens | recall loss, noise of x = 0.1 "
      "| "
      "1 | 10 |\n|---|---|---|---|---|---|---|---|\n",
      last);
  for (const Method& m : methods()) {
    text += fmt::format(
        "| {} | {} | {} | {} | {} | {} | {} | {} |\n", m.name, value("error", m.name, 0.1),
        value("error", m.name, 1), value("error", m.name, 10), value("norm", m.name, last),
        value("recall", m.name, 0.1), value("recall", m.name, 1), value("recall", m.name, 10));
  }
  return text;
}

}  // namespace efla
