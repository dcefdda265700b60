"""The language model under transformers: embeddings, blocks of mixer and SwiGLU MLP, norm, head.

Parameters carry fla's key names, so folders of ``efla train``, of fla (delta_net, gated_deltanet) and
of ``save_pretrained`` are one format.
"""

import inspect
from dataclasses import make_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from ..nn import (
    EFLA,
    Cache,
    GatedEFLA,
    RMSNorm,
    ShortConvolution,
    SoftmaxAttention,
    SwiGLU,
)
from ..nn.delta import DeltaLayer
from ..nn.padding import pack_rows
from .configuration import EflaConfig, GatedEflaConfig

# What generate() calls the cache: "cache" in newer releases, "past_key_values" before.
_CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Arguments of other models that mean nothing to these, or that only the loss takes.
_WITHOUT_MEANING = {"position_ids", "cache_position", "token_type_ids", "output_attentions"}
_OF_THE_LOSS = {"num_items_in_batch", "ignore_index", "shift_labels"}


def _refuse_unknown(model: nn.Module, kwargs: dict[str, Any], known: set[str]) -> None:
    for name in kwargs:
        if name not in known:
            raise TypeError(f"{type(model).__name__} got an unexpected keyword argument {name!r}")


# What the models return; the cache under the name that this release of transformers looks for.
EflaOutput: Any = make_dataclass(
    "EflaOutput",
    [
        ("loss", Tensor | None, None),
        ("logits", Tensor | None, None),
        ("last_hidden_state", Tensor | None, None),
        (_CACHE, Cache | None, None),
        ("hidden_states", tuple[Tensor, ...] | None, None),
    ],
    bases=(ModelOutput,),
    namespace={"__module__": __name__},
)


def _make_mixer(config: EflaConfig, layer_idx: int) -> DeltaLayer | SoftmaxAttention:
    if config.attn is not None and layer_idx in config.attn["layers"]:
        return SoftmaxAttention.from_fields(config.hidden_size, config.attn, layer_idx)
    fields: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            "hidden_size",
            "num_heads",
            "expand_v",
            "use_beta",
            "use_gate",
            "use_output_norm",
            "use_short_conv",
            "conv_size",
            "allow_neg_eigval",
            "qk_activation",
            "qk_norm",
            "q_norm",
            "rule",
            "beta_activation",
            "norm_eps",
        )
    }
    fields["layer_idx"] = layer_idx
    if config.gated:
        return GatedEFLA(head_dim=config.head_dim, num_v_heads=config.num_v_heads, **fields)
    return EFLA(expand_k=config.expand_k, **fields)


class EflaBlock(GradientCheckpointingLayer):
    """``x += attn(attn_norm(x)); x += mlp(mlp_norm(x))``."""

    def __init__(self, config: EflaConfig, layer_idx: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = _make_mixer(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size)

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None, past: Cache | None, use_cache: bool
    ) -> Tensor:
        x = (
            x
            + self.attn(
                self.attn_norm(x), past_key_values=past, use_cache=use_cache, cu_seqlens=cu_seqlens
            )[0]
        )
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class EflaPreTrainedModel(PreTrainedModel):
    """What the two models share."""

    config_class: type[EflaConfig] = EflaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EflaBlock"]
    _is_stateful = True  # a recurrent state cannot be cut back, as assisted decoding wants

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, 0.0, std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, ShortConvolution):
            init.normal_(module.weight, 0.0, self.config.conv_initializer_range or std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, DeltaLayer):
            for parameter, value in module.initial_values():
                init.copy_(parameter, value)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes its own


class EflaModel(EflaPreTrainedModel):
    """Everything below the head."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            EflaBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self.embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """input_ids ``[B, T]`` or inputs_embeds ``[B, T, hidden]`` -> last_hidden_state.

        attention_mask ``[B, T]`` is 0 at padding, wherever it stands; with a cache it may have the
        columns of earlier tokens too. cu_seqlens ``[N + 1]`` packs N sequences into B = 1. The cache
        goes by either name.
        """
        _refuse_unknown(self, kwargs, _WITHOUT_MEANING)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        past = past_key_values if cache is None else cache
        if past is not None and not isinstance(past, Cache):
            raise TypeError(f"the cache must be an efla.nn.Cache, not {type(past).__name__}")
        if use_cache is None:
            use_cache = past is not None or (self.config.use_cache and not self.training)
        if self.gradient_checkpointing and self.training:
            past, use_cache = None, False  # a block that runs twice would advance it twice
        if use_cache and past is None:
            past = Cache()

        length = x.shape[1]
        x, cu_seqlens, rows = pack_rows(x, attention_mask, cu_seqlens)
        states = []
        for layer in self.layers:
            if output_hidden_states:
                states.append(x)
            x = layer(x, cu_seqlens, past, use_cache)
        x = self.norm(x)
        if output_hidden_states:
            states.append(x)
        if rows is not None:
            x, states = rows.unpack(x), [rows.unpack(state) for state in states]
            if past is not None and use_cache:
                for state in past.layers:  # they counted the packed positions
                    state.tokens += length - rows.positions.numel()
        output = EflaOutput(
            last_hidden_state=x,
            hidden_states=tuple(states) if output_hidden_states else None,
            **{_CACHE: past if use_cache else None},
        )
        return output if return_dict is not False else output.to_tuple()


class EflaForCausalLM(EflaPreTrainedModel, GenerationMixin):
    """The language model. Reads the folders that ``efla train`` writes.

    labels are token ids, shifted here; -100 is ignored.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: EflaConfig) -> None:
        super().__init__(config)
        self.model = EflaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        past, ids = kwargs.get(_CACHE), inputs.get("input_ids")
        if past is not None and ids is not None and ids.shape[1] == 1:
            inputs.pop("attention_mask", None)  # new tokens count in every row
        inputs.pop("position_ids", None)
        return inputs

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits ``[B, T, vocab]`` (the last logits_to_keep positions of them, if not 0), and the loss
        if labels ``[B, T]`` are given. The other arguments are those of :class:`EflaModel`."""
        _refuse_unknown(self, kwargs, _WITHOUT_MEANING | _OF_THE_LOSS)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            cache=cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
        )
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, int):
            hidden = hidden[:, -logits_to_keep:] if logits_to_keep > 0 else hidden
        else:
            hidden = hidden[:, logits_to_keep]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            given = {name: kwargs[name] for name in _OF_THE_LOSS if name in kwargs}
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **given
            )
        output = EflaOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{_CACHE: outputs.get(_CACHE)},
        )
        return output if return_dict is not False else output.to_tuple()


class GatedEflaModel(EflaModel):
    """The same under the configuration of gated models, as the Auto classes want it."""

    config_class = GatedEflaConfig


class GatedEflaForCausalLM(EflaForCausalLM):
    """:class:`EflaForCausalLM` under the configuration of gated models."""

    config_class = GatedEflaConfig
