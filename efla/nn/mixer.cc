#include "efla/nn/mixer.h"

#include "efla/nn/attention_mixer.h"
#include "efla/nn/delta_net_mixer.h"
#include "efla/nn/mamba2_mixer.h"

namespace efla {

std::shared_ptr<Mixer> make_mixer(const ModelConfig& config, int64_t layer,
                                  const at::TensorOptions& options) {
  switch (config.mixer_kind(layer)) {
    case MixerKind::kMamba2:
      return std::make_shared<Mamba2Mixer>(config, options);
    case MixerKind::kAttention:
      return std::make_shared<AttentionMixer>(config, options);
    case MixerKind::kDelta:
      break;
  }
  return std::make_shared<DeltaNetMixer>(config, options);
}

}  // namespace efla
