#include "efla/train/recipe_fields.h"

namespace efla {

std::vector<RecipeField> recipe_fields(Recipe& recipe) {
  DataRecipe& data = recipe.data;
  OptimizerRecipe& optimizer = recipe.optimizer;
  ScheduleRecipe& schedule = recipe.schedule;
  TrainRecipe& train = recipe.train;
  constexpr double kMany = 1e15;  // steps and tokens; exact in a double
  constexpr bool kFree = true;    // may change on resume
  return {
      {"data.train", &data.train},
      {"data.valid", &data.valid},
      {"data.tokenizer", &data.tokenizer},
      {"data.length", &data.length, 2, 1 << 24},
      {"data.batch", &data.batch, 1, 1 << 16},
      {"data.verify", &data.verify, 0, 0, {}, kFree},
      {"optimizer.learning_rate", &optimizer.learning_rate, 0, 10},
      {"optimizer.beta1", &optimizer.beta1, 0, 0.999999},
      {"optimizer.beta2", &optimizer.beta2, 0, 0.999999},
      {"optimizer.eps", &optimizer.eps, 0, 1},
      {"optimizer.weight_decay", &optimizer.weight_decay, 0, 10},
      {"schedule.warmup_steps", &schedule.warmup_steps, 0, kMany},
      {"schedule.start", &schedule.start, 0, 1},
      {"schedule.floor", &schedule.floor, 0, 1},
      {"train.out", &train.out, 0, 0, {}, kFree},
      {"train.steps", &train.steps, 0, kMany},
      {"train.tokens", &train.tokens, 0, kMany},
      {"train.grad_accumulation", &train.grad_accumulation, 1, 1 << 20},
      {"train.clip", &train.clip, 0, 1e9},
      {"train.eval_interval", &train.eval_interval, 0, kMany, {}, kFree},
      {"train.eval_tokens", &train.eval_tokens, 0, kMany, {}, kFree},
      {"train.checkpoint_interval", &train.checkpoint_interval, 0, kMany, {}, kFree},
      {"train.keep", &train.keep, 1, 1e6, {}, kFree},
      {"train.seed", &train.seed, 0, kMany},
      {"train.threads", &train.threads, 0, 4096, {}, kFree},
      {"train.dtype", &train.dtype, 0, 0, {"float32", "float64"}},
      {"train.max_bad_steps", &train.max_bad_steps, 1, kMany, {}, kFree},
      {"train.log_interval", &train.log_interval, 0, 1e9, {}, kFree},
      {"train.time_limit", &train.time_limit, 0, 1e9, {}, kFree},
  };
}

}  // namespace efla
