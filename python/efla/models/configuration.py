"""Configurations: the fields of a model folder's config.json (docs/models.md), names and defaults."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

# Fields of fla's configs that choose among its kernels, or that nothing here reads.
_NO_EFFECT = (
    "attn_mode",
    "fuse_norm",
    "fuse_swiglu",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
)


class EflaConfig(PreTrainedConfig):
    """A model of EFLA layers: fla's DeltaNet fields and rule, beta_activation, qk_norm, q_norm.

    ``EflaConfig.from_pretrained`` and ``from_dict`` return the class that the dictionary's model_type
    names: efla, gated_efla, delta_net or gated_deltanet. hidden_ratio and intermediate_size set the
    MLP's inner size, ``int(hidden_size * hidden_ratio * 2 / 3)`` rounded up to a multiple of 256 by
    default; conv_initializer_range (0: initializer_range) the first values of the convolutions.
    """

    model_type = "efla"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}

    gated: ClassVar[bool] = False

    def __init__(
        self,
        hidden_size: int = 2048,
        num_hidden_layers: int = 24,
        num_heads: int = 16,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        head_dim: int = 256,
        num_v_heads: int | None = None,
        rule: str = "exact",
        beta_activation: str = "sigmoid",
        qk_norm: str = "none",
        q_norm: str | None = None,
        qk_activation: str = "silu",
        use_beta: bool = True,
        use_gate: bool = False,
        use_output_norm: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        attn: dict[str, Any] | None = None,
        hidden_ratio: float | None = 4,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        conv_initializer_range: float = 0.0,
        max_position_embeddings: int = 2048,
        vocab_size: int = 32000,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        pad_token_id: int | None = None,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_heads = num_heads
        self.expand_v = expand_v
        self.use_gate = use_gate
        if self.gated:
            self.head_dim, self.num_v_heads = head_dim, num_v_heads
        else:
            self.expand_k = expand_k
        self.rule = rule
        self.beta_activation = beta_activation
        self.qk_norm = qk_norm
        self.q_norm = q_norm
        self.qk_activation = qk_activation
        self.use_beta = use_beta
        self.use_output_norm = use_output_norm
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.allow_neg_eigval = allow_neg_eigval
        self.attn = attn
        self.hidden_ratio = 4 if hidden_ratio is None else hidden_ratio
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range
        self.conv_initializer_range = conv_initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.vocab_size = vocab_size
        self.use_cache = use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._check_attn()
        self._refuse_what_is_missing(kwargs)
        super().__init__(**{key: value for key, value in kwargs.items() if key not in _NO_EFFECT})

    def _refuse_what_is_missing(self, kwargs: dict[str, Any]) -> None:
        """Fields of fla whose other values would change the mathematics."""
        kwargs.setdefault("hidden_act", self.hidden_act)
        for key, allowed in (
            ("hidden_act", ("swish", "silu")),
            ("output_gate_activation", ("swish", "silu")),
            ("use_l2warp", (False,)),
            ("attnres_block_size", (None,)),
            ("conv_bias", (False,)),
        ):
            value = kwargs.pop(key, allowed[0])
            if value not in allowed:
                raise ValueError(f"config: {key} must be {allowed[0]!r} here, not {value!r}")

    def _check_attn(self) -> None:
        layers = (self.attn or {}).get("layers", [])
        if any(not 0 <= layer < self.num_hidden_layers for layer in layers):
            raise ValueError(
                "config: attn.layers must hold numbers of layers, 0 to "
                f"{self.num_hidden_layers - 1}, not {layers}"
            )

    @property
    def mlp_size(self) -> int:
        """The MLP's inner size."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        size = int(self.hidden_size * self.hidden_ratio * 2 / 3)
        return (size + 255) // 256 * 256

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """The config of a folder, of the class that its model_type names."""
        config_dict, _ = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        family = _family(config_dict, cls.model_type)
        return super(EflaConfig, family).from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of the class that config_dict's model_type names."""
        family = _family(config_dict, cls.model_type)
        return super(EflaConfig, family).from_dict(config_dict, **kwargs)


class GatedEflaConfig(EflaConfig):
    """A model of GatedEFLA layers: fla's GatedDeltaNet fields, and those that EFLA adds."""

    model_type = "gated_efla"
    gated = True

    def __init__(
        self,
        num_hidden_layers: int = 21,
        num_heads: int = 6,
        expand_v: float = 2.0,
        use_gate: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("expand_k", None)  # of old files; head_dim decides
        super().__init__(
            num_hidden_layers=num_hidden_layers,
            num_heads=num_heads,
            expand_v=expand_v,
            use_gate=use_gate,
            **kwargs,
        )


class _DeltaNetConfig(EflaConfig):
    """fla's delta_net; not registered with Auto classes, where the name is fla's."""

    model_type = "delta_net"

    def __init__(self, rule: str = "euler", qk_norm: str = "l2", **kwargs: Any) -> None:
        kwargs["use_output_norm"] = True  # fla's layer has it whatever the field says
        super().__init__(rule=rule, qk_norm=qk_norm, **kwargs)


class _GatedDeltaNetConfig(GatedEflaConfig):
    """fla's gated_deltanet."""

    model_type = "gated_deltanet"

    def __init__(self, rule: str = "euler", qk_norm: str = "l2", **kwargs: Any) -> None:
        kwargs["use_output_norm"] = True
        super().__init__(rule=rule, qk_norm=qk_norm, **kwargs)


_FAMILIES: dict[str, type[EflaConfig]] = {
    config.model_type: config
    for config in (EflaConfig, GatedEflaConfig, _DeltaNetConfig, _GatedDeltaNetConfig)
}


def _family(config_dict: dict[str, Any], default: str) -> type[EflaConfig]:
    model_type = config_dict.get("model_type", default)
    if model_type not in _FAMILIES:
        raise ValueError(
            f"config: model_type must be one of {', '.join(_FAMILIES)}, not {model_type!r}; "
            "flash-linear-attention's own classes read mamba2 and transformer folders"
        )
    return _FAMILIES[model_type]
