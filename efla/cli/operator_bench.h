// What `efla bench op` measures: the delta-rule operators on the CPU beside torch's own matrix
// product and copy, or on a GPU beside the time that moving their tensors takes. Every row is
// checked against the double-precision reference before it is timed.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "efla/flow/reference.h"

namespace efla::cli {

struct OperatorBenchOptions {
  int rounds = 9;
  std::string only;             // name of an operation, NAME* for all that begin with NAME
  std::string csv;              // also write the rows to this file
  bool default_malloc = false;  // CPU: results may fault fresh pages in
};

/// Prints the table on standard output. Throw UsageError where `only` names nothing, and Error
/// where a row is wrong or the CSV file cannot be written.
void bench_operators_on_cpu(const OperatorBenchOptions& options);
void bench_operators_on_cuda(const OperatorBenchOptions& options);

// --- What both share ---------------------------------------------------------------------------

struct BenchCase {
  int64_t batch, tokens, heads, dim;
};

/// Random inputs of rule exact: keys of norm about 1, beta in (0, 1) float32.
struct BenchInputs {
  at::Tensor q, k, v, beta;
  BenchInputs(const BenchCase& c, at::ScalarType dtype, at::Device device = at::kCPU);
};

std::string shape_text(const BenchCase& c);

/// Whether `only` asks for the operation of this name (everything if it is empty).
bool is_wanted(const std::string& only, const std::string& name);

/// Throws UsageError, naming the operations that there are, if `only` asks for none of them.
void check_only(const std::string& only, const std::vector<std::string>& names);

/// Elements in order, in double precision.
std::vector<double> values(const at::Tensor& t);

/// Largest difference over the largest magnitude.
double relative_error(const std::vector<double>& actual, const std::vector<double>& expected);

/// Throws Error if the error is above the limit (or NaN).
void require(double error, double limit, const std::string& what);

/// The first tokens and heads of the last sequence: a prefix depends on nothing after it.
at::Tensor slice(const at::Tensor& x, int64_t tokens, int64_t heads);

/// The reference's problem on that slice.
ReferenceProblem reference_problem(const BenchInputs& in, int64_t tokens, int64_t heads);

/// Largest error of a forward's o on the slice; of the gradients [q, k, v, beta] of <o, grad>,
/// where `grad` is zero outside the slice.
double forward_error(const BenchInputs& in, const at::Tensor& o);
double backward_error(const BenchInputs& in, const at::Tensor& grad,
                      const std::vector<at::Tensor>& gradients);

/// Zero but for random numbers in the slice, shaped like v.
at::Tensor gradient_in_slice(const BenchInputs& in);

}  // namespace efla::cli
