// efla convert: a checkpoint under other names, in another dtype or in shards; proved by a forward
// pass of both before it takes its place.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <system_error>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/safetensors.h"
#include "efla/nn/pretrained.h"

namespace efla::cli {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  std::string from, to, format = "efla", dtype, shard_size, verify_ids, logits;
  bool force = false, json = false;
};

const std::map<std::string, CheckpointFormat> kFormats = {
    {"efla", CheckpointFormat::kEfla},
    {"fla", CheckpointFormat::kFla},
    {"state-spaces", CheckpointFormat::kStateSpaces}};

const std::map<std::string, at::ScalarType> kDtypes = {{"float32", at::kFloat},
                                                       {"bfloat16", at::kBFloat16},
                                                       {"float16", at::kHalf},
                                                       {"float64", at::kDouble}};

// Files of a tokenizer and of generation that travel with a model, whoever wrote them.
constexpr const char* kCompanions[] = {"tokenizer.model",
                                       "tokenizer.json",
                                       "tokenizer_config.json",
                                       "special_tokens_map.json",
                                       "generation_config.json",
                                       "vocab.json",
                                       "merges.txt",
                                       "added_tokens.json"};

// "5GB", "500MB", "800kB" or a number of bytes, powers of 1000 as in transformers.
uint64_t parse_size(const std::string& text) {
  if (text.empty()) return 0;
  size_t digits = 0;
  double value = 0;
  try {
    value = std::stod(text, &digits);
  } catch (const std::exception&) {
    digits = 0;
  }
  const std::map<std::string, double> units = {{"", 1},     {"B", 1},    {"kB", 1e3}, {"KB", 1e3},
                                               {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}};
  const auto unit = units.find(text.substr(digits));
  const bool fits =
      digits > 0 && unit != units.end() && value * unit->second >= 1 && value * unit->second < 1e18;
  if (!fits) {
    throw UsageError(fmt::format(
        "--shard-size {} is no size; write bytes or a number with kB, MB or GB, like 5GB", text));
  }
  return static_cast<uint64_t>(value * unit->second);
}

// Token ids [B, T] int64 for the forward pass: those of a file, or random ones.
at::Tensor verification_ids(const std::string& path, const ModelConfig& config) {
  if (path.empty()) {
    constexpr int64_t kRows = 2, kLength = 96;
    at::Generator generator = at::detail::createCPUGenerator(/*seed=*/1);
    return at::randint(config.vocab_size, {kRows, kLength}, generator, at::kLong);
  }
  const SafetensorsFile file = SafetensorsFile::open(path);
  const at::Tensor ids = file.tensor("input_ids");
  const bool integers = ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt;
  if (!integers || ids.dim() != 2 || ids.numel() == 0) {
    throw Error(fmt::format("{}: input_ids must be int64 or int32 [rows, tokens], not {} {}", path,
                            dtype_name(ids.scalar_type()),
                            nlohmann::json(ids.sizes().vec()).dump()));
  }
  const int64_t low = ids.min().item<int64_t>(), high = ids.max().item<int64_t>();
  if (low < 0 || high >= config.vocab_size) {
    throw Error(fmt::format("{}: input_ids holds {}, and the model's tokens are 0 to {}", path,
                            low < 0 ? low : high, config.vocab_size - 1));
  }
  return ids.to(at::kLong);
}

// Every weight through the dtype in which it will be stored.
void round_weights(LanguageModel& model, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const auto dtypes = storage_dtypes(model->config(), dtype);
  for (auto& parameter : model->named_parameters()) {
    at::Tensor& value = parameter.value();
    const at::Tensor finite = value.isfinite();
    value.copy_(value.to(dtypes.at(parameter.key())));
    if (!value.isfinite().equal(finite)) {
      throw Error(fmt::format("{} has a number that {} cannot hold; choose another --dtype",
                              parameter.key(), dtype_name(dtype)));
    }
  }
}

at::Tensor forward(LanguageModel& model, const at::Tensor& ids) {
  const at::NoGradGuard no_grad;
  return model->forward(ids);
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor exact = b.to(at::kDouble);
  const double size = exact.square().mean().sqrt().item<double>();
  const double error = (a.to(at::kDouble) - exact).square().mean().sqrt().item<double>();
  return size > 0 ? error / size : error;
}

void copy_companions(const fs::path& from, const fs::path& to) {
  for (const char* name : kCompanions) {
    if (!path_exists(from / name)) continue;
    std::error_code error;
    fs::copy_file(from / name, to / name, error);
    if (error) {
      throw Error(fmt::format("cannot copy {} into {}: {}", (from / name).string(), to.string(),
                              error.message()));
    }
  }
}

struct Outcome {
  LoadReport report;
  at::ScalarType dtype = at::kFloat;
  double rounding = 0;  // of the logits, by a narrower dtype
  int64_t files = 0, bytes = 0, parameters = 0;
};

// The written folder must compute what the source computes, bit for bit: both run in the same
// arithmetic on the same weights.
void verify(const fs::path& written, const at::Tensor& ids, const at::Tensor& expected) {
  LoadReport report;
  LanguageModel model = load_pretrained(written.string(), expected.scalar_type(), &report);
  const at::Tensor logits = forward(model, ids);
  if (!at::allclose(logits, expected, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true)) {
    throw Error(fmt::format(
        "the converted model gives other logits than its source ({:.1e} relative RMS); nothing was "
        "written, please report this",
        relative_error(logits, expected)));
  }
}

Outcome convert(const Arguments& arguments, const std::string& source) {
  SaveOptions options;
  options.format = kFormats.at(arguments.format);
  options.max_shard_bytes = parse_size(arguments.shard_size);
  Outcome outcome;
  const at::ScalarType stored = checkpoint_dtype(source);
  outcome.dtype = arguments.dtype.empty() ? stored : kDtypes.at(arguments.dtype);
  options.dtype = outcome.dtype;
  const bool wide = stored == at::kDouble || outcome.dtype == at::kDouble;
  const at::ScalarType arithmetic = wide ? at::kDouble : at::kFloat;
  std::optional<LanguageModel> model = load_pretrained(source, arithmetic, &outcome.report);
  const at::Tensor ids = verification_ids(arguments.verify_ids, (*model)->config());
  const at::Tensor exact = forward(*model, ids);
  round_weights(*model, outcome.dtype);
  const at::Tensor logits = forward(*model, ids);
  outcome.rounding = relative_error(logits, exact);
  outcome.parameters = (*model)->config().parameter_count().total();
  write_folder_atomically(arguments.to, [&](const fs::path& folder) {
    save_pretrained(*model, folder.string(), options);
    copy_companions(source, folder);
    model.reset();  // one model at a time in memory
    verify(folder, ids, logits);
    for (const fs::path& path : folder_entries(folder)) {
      ++outcome.files;
      outcome.bytes += static_cast<int64_t>(fs::file_size(path));
    }
    // Here, so that a path that cannot be written leaves no folder either.
    if (!arguments.logits.empty()) {
      save_safetensors(arguments.logits, {{"input_ids", ids}, {"logits", logits}});
    }
  });
  return outcome;
}

// What must not be lost: other files than a model's, and the source itself.
void check_target(const Arguments& arguments, const std::string& source) {
  refuse_overwrite(arguments.to, arguments.force);
  if (!arguments.logits.empty()) refuse_overwrite(arguments.logits, arguments.force);
  const fs::path to = arguments.to;
  if (!path_exists(to)) return;
  if (!is_folder(to)) throw UsageError(fmt::format("{} is a file; give a folder", arguments.to));
  if (!folder_entries(to).empty() && !path_exists(to / "config.json")) {
    throw UsageError(fmt::format(
        "{} holds no model, so --force does not replace it; give another folder", arguments.to));
  }
  const std::string inside = fs::canonical(source).string() + "/";
  if (inside.starts_with(fs::canonical(to).string() + "/")) {
    throw UsageError(fmt::format(
        "{} would be replaced by what is made from it; give another folder", arguments.to));
  }
}

void run(const Arguments& arguments) {
  const std::string source = find_model(arguments.from);
  check_target(arguments, source);
  const Outcome outcome = convert(arguments, source);
  if (arguments.json) {
    print_json_line({{"from", source},
                     {"from_format", outcome.report.format},
                     {"to", arguments.to},
                     {"to_format", arguments.format},
                     {"dtype", dtype_name(outcome.dtype)},
                     {"parameters", outcome.parameters},
                     {"files", outcome.files},
                     {"bytes", outcome.bytes},
                     {"same_logits", true},
                     {"rounding", outcome.rounding},
                     {"ignored", outcome.report.ignored},
                     {"notes", outcome.report.notes}});
    return;
  }
  for (const std::string& note : outcome.report.notes) print_text(fmt::format("note: {}\n", note));
  for (const std::string& name : outcome.report.ignored) {
    print_text(fmt::format("ignored: {}\n", name));
  }
  print_text(fmt::format("{} ({}) -> {} ({}): {} parameters in {}, {} files, {}\n", source,
                         outcome.report.format, arguments.to, arguments.format,
                         with_commas(outcome.parameters), dtype_name(outcome.dtype), outcome.files,
                         human_bytes(outcome.bytes)));
  print_text("verified: the written model gives the same logits, bit for bit\n");
  if (outcome.rounding > 0) {
    print_text(fmt::format("rounding to {} moved the logits by {:.1e} (relative RMS)\n",
                           dtype_name(outcome.dtype), outcome.rounding));
  }
}

}  // namespace

void add_convert(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("convert", "Write a model in another form, and prove it");
  command->description(
      "Write a model in another form. FROM may be a model of this program, a run, a checkpoint of "
      "flash-linear-attention (delta_net, gated_deltanet, mamba2, transformer) or of state-spaces "
      "(Mamba-2). The result takes its place only after a forward pass of both gave the same "
      "logits.\n\n"
      "efla          today's names; config.json keeps what only this program reads\n"
      "fla           for flash-linear-attention and transformers\n"
      "state-spaces  for mamba_ssm (Mamba-2 only)");
  command->add_option("FROM", arguments->from, "Model, checkpoint or run folder")->required();
  command->add_option("TO", arguments->to, "Folder to write")->required();
  command->add_option("--to", arguments->format, "efla, fla or state-spaces")
      ->check(CLI::IsMember({"efla", "fla", "state-spaces"}))
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--dtype", arguments->dtype,
                   "float32, bfloat16, float16 or float64 (default: as it is)")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16", "float64"}))
      ->type_name("NAME");
  command
      ->add_option("--shard-size", arguments->shard_size,
                   "Split the weights into files of at most this size, like 5GB (default: one "
                   "file)")
      ->type_name("SIZE");
  command
      ->add_option("--verify-ids", arguments->verify_ids,
                   "Run the forward pass on input_ids [rows, tokens] of this .safetensors file "
                   "(default: random ones)")
      ->type_name("FILE");
  command
      ->add_option("--logits", arguments->logits,
                   "Write input_ids and the logits of that pass to this .safetensors file")
      ->type_name("FILE");
  command->add_flag("--force", arguments->force, "Replace what exists");
  command->add_flag("--json", arguments->json, "Print one JSON line");
  command->footer("Example:\n  efla convert runs/austen austen-fla --to fla --dtype bfloat16");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace efla::cli
