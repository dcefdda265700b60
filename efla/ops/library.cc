// The schemas of torch.ops.efla, and the C++ functions of ops.h that call them.
//
// A schema cannot return an optional tensor: an output that was not asked for is a tensor of shape
// [0] there, an undefined tensor in C++ and None in Python.
#include <torch/library.h>
#include <torch/torch.h>

#include "efla/ops/ops.h"
#include "efla/ops/tensors.h"

TORCH_LIBRARY(efla, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "chunk(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_decay=None, *, "
      "str rule=\"exact\", float? scale=None, Tensor? initial_state=None, "
      "bool output_final_state=False, Tensor? cu_seqlens=None, bool qk_l2norm=False, "
      "bool recompute=False) "
      "-> (Tensor o, Tensor final_state)",
      tags);
  m.def(
      "recurrent(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_decay=None, *, "
      "str rule=\"exact\", float? scale=None, Tensor? initial_state=None, "
      "bool output_final_state=False, Tensor? cu_seqlens=None, bool qk_l2norm=False, "
      "bool recompute=False) "
      "-> (Tensor o, Tensor final_state)",
      tags);
  m.def(
      "step_(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor(a!) state, "
      "Tensor? log_decay=None, *, str rule=\"exact\", float? scale=None, "
      "Tensor? state_indices=None, bool qk_l2norm=False) -> Tensor",
      tags);
  m.def(
      "short_conv(Tensor x, Tensor weight, *, bool silu=True, Tensor? initial_state=None, "
      "bool output_final_state=False, Tensor? cu_seqlens=None, Tensor? bias=None) "
      "-> (Tensor y, Tensor final_state)",
      tags);
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, Tensor? gate=None) -> Tensor", tags);
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor", tags);

  m.def(
      "_delta_rule_forward(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_decay, "
      "Tensor? initial_state, Tensor? cu_seqlens, str rule, float? scale, "
      "bool output_final_state, bool qk_l2norm, bool sequential, bool keep_states) "
      "-> (Tensor o, Tensor final_state, Tensor states)",
      tags);
  m.def(
      "_delta_rule_backward(Tensor grad_o, Tensor? grad_final_state, Tensor q, Tensor k, "
      "Tensor v, Tensor beta, Tensor? log_decay, Tensor? initial_state, Tensor? cu_seqlens, "
      "Tensor states, str rule, float? scale, bool qk_l2norm, bool recompute, bool[6] wanted) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "_short_conv_forward(Tensor x, Tensor weight, bool silu, Tensor? initial_state, "
      "bool output_final_state, Tensor? cu_seqlens, Tensor? bias) "
      "-> (Tensor y, Tensor final_state)",
      tags);
  m.def(
      "_short_conv_backward(Tensor grad_y, Tensor? grad_final_state, Tensor x, Tensor weight, "
      "bool silu, Tensor? initial_state, Tensor? cu_seqlens, Tensor? bias, bool[4] wanted) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def("_rms_norm_forward(Tensor x, Tensor? weight, float eps, Tensor? gate) -> Tensor", tags);
  m.def(
      "_rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, float eps, Tensor? gate, "
      "bool[3] wanted) "
      "-> (Tensor, Tensor, Tensor)",
      tags);
  m.def("_swiglu_forward(Tensor gate, Tensor up) -> Tensor", tags);
  m.def(
      "_swiglu_backward(Tensor grad_y, Tensor gate, Tensor up, bool[2] wanted) "
      "-> (Tensor, Tensor)",
      tags);
}

namespace efla::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

using DeltaRuleSignature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                      const Tensor&, const OptionalTensor&,
                                                      c10::string_view, std::optional<double>,
                                                      const OptionalTensor&, bool,
                                                      const OptionalTensor&, bool, bool);

std::tuple<Tensor, Tensor> call_delta_rule(const c10::TypedOperatorHandle<DeltaRuleSignature>& op,
                                           const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& beta, const Options& options) {
  auto [o, final_state] =
      op.call(q, k, v, beta, options.log_decay, options.rule, options.scale, options.initial_state,
              options.output_final_state, options.cu_seqlens, options.qk_l2norm, options.recompute);
  return {std::move(o), or_undefined(final_state, options.output_final_state)};
}

}  // namespace

std::tuple<Tensor, Tensor> chunk(const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& beta, const Options& options) {
  static const auto op = find_operator<DeltaRuleSignature>("efla::chunk");
  return call_delta_rule(op, q, k, v, beta, options);
}

std::tuple<Tensor, Tensor> recurrent(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& beta, const Options& options) {
  static const auto op = find_operator<DeltaRuleSignature>("efla::recurrent");
  return call_delta_rule(op, q, k, v, beta, options);
}

Tensor step_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, Tensor& state,
             const OptionalTensor& log_decay, std::string_view rule, std::optional<double> scale,
             const OptionalTensor& state_indices, bool qk_l2norm) {
  static const auto op = find_operator<Tensor(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, Tensor&, const OptionalTensor&,
      c10::string_view, std::optional<double>, const OptionalTensor&, bool)>("efla::step_");
  return op.call(q, k, v, beta, state, log_decay, rule, scale, state_indices, qk_l2norm);
}

std::tuple<Tensor, Tensor> short_conv(const Tensor& x, const Tensor& weight, bool silu,
                                      const OptionalTensor& initial_state, bool output_final_state,
                                      const OptionalTensor& cu_seqlens,
                                      const OptionalTensor& bias) {
  static const auto op = find_operator<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, bool, const OptionalTensor&, bool, const OptionalTensor&,
      const OptionalTensor&)>("efla::short_conv");
  auto [y, final_state] =
      op.call(x, weight, silu, initial_state, output_final_state, cu_seqlens, bias);
  return {std::move(y), or_undefined(final_state, output_final_state)};
}

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps,
                const OptionalTensor& gate) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const OptionalTensor&, double, const OptionalTensor&)>(
          "efla::rms_norm");
  return op.call(x, weight, eps, gate);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  static const auto op = find_operator<Tensor(const Tensor&, const Tensor&)>("efla::swiglu");
  return op.call(gate, up);
}

}  // namespace efla::ops
