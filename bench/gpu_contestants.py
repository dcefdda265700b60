"""The operators that gpu_peers.py times: ours, and the public ones where they are installed.

A contestant has a name and, each possibly absent:
  forward(x)   o of an Inputs, no gradient kept
  train(x)     the same, differentiable in x.leaves
  decode(s)    a function of i that runs the step on the i-th state of a DecodeInputs
and `takes(x)`, the reason why it cannot run these inputs ("" if it can).
"""

import functools
import sys
from dataclasses import dataclass, field

import torch


@dataclass
class Inputs:
    """One set of inputs on the device. beta (and log_decay) float32, keys of norm 1."""

    q: torch.Tensor  # [B, T, H, K]
    k: torch.Tensor
    v: torch.Tensor  # [B, T, H, V]
    beta: torch.Tensor  # [B, T, H]
    log_decay: torch.Tensor  # of the gated rules only
    grad_o: torch.Tensor
    cu_seqlens: torch.Tensor = None  # int64 on the device, or None: dense
    zero_decay: torch.Tensor = None  # for peers that know gated rules only
    packed: dict = field(default_factory=dict)  # views without the batch axis

    @property
    def leaves(self):
        return [self.q, self.k, self.v, self.beta]

    def bytes(self):
        return sum(t.numel() * t.element_size() for t in (*self.leaves, self.grad_o))


@dataclass
class DecodeInputs:
    """One token of `batch` sequences and enough states that none is found in the cache."""

    q: torch.Tensor  # [batch, H, D]
    k: torch.Tensor
    v: torch.Tensor
    logit: torch.Tensor  # beta = sigmoid(logit), bfloat16 [batch, H]
    states: list  # of [batch, H, D, D] float32


class Ours:
    def __init__(self, efla, rule, gated=False):
        self.efla, self.rule, self.gated = efla, rule, gated
        self.name = f"efla {rule}" + (" gated" if gated else "")

    def takes(self, x):
        return ""

    def forward(self, x):
        decay = x.log_decay if self.gated else None
        options = {"rule": self.rule, "cu_seqlens": x.cu_seqlens}
        return self.efla.chunk(x.q, x.k, x.v, x.beta, decay, **options)[0]

    train = forward

    def decode(self, s):
        beta = s.logit.float().sigmoid()

        def step(i):
            return self.efla.step_(s.q, s.k, s.v, beta, s.states[i], rule=self.rule)

        return step


class Recompute(Ours):
    """Half the workspace in the backward."""

    def __init__(self, efla, rule):
        super().__init__(efla, rule)
        self.name += ", recompute"

    def train(self, x):
        options = {"rule": self.rule, "cu_seqlens": x.cu_seqlens, "recompute": True}
        return self.efla.chunk(x.q, x.k, x.v, x.beta, **options)[0]


class RoundedState(Ours):
    """Decoding on bfloat16 states: half the bytes."""

    def __init__(self, efla, rule):
        super().__init__(efla, rule)
        self.name += ", bfloat16 state"

    def decode(self, s):
        states = [x.bfloat16() for x in s.states]
        beta = s.logit.float().sigmoid()

        def step(i):
            return self.efla.step_(s.q, s.k, s.v, beta, states[i], rule=self.rule)

        return step


class Fla:
    """flash-linear-attention's Triton kernels: DeltaNet, no gate. float32 runs token by token there."""

    name = "fla"

    def __init__(self):
        import triton.testing

        # It tries some 150 configurations per head count: 20 ms each, where Triton takes 100.
        bench = triton.testing.do_bench
        triton.testing.do_bench = functools.partial(bench, warmup=5, rep=20)
        from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule

        self.chunk, self.recurrent = chunk_delta_rule, fused_recurrent_delta_rule

    def takes(self, x):
        return ""

    def forward(self, x):
        op = self.recurrent if x.q.dtype == torch.float32 else self.chunk
        return op(x.q, x.k, x.v, x.beta, cu_seqlens=x.cu_seqlens)[0]

    train = forward

    def decode(self, s):
        q, k, v = (t[:, None] for t in (s.q, s.k, s.v))
        beta = s.logit.float().sigmoid()[:, None]

        def step(i):
            o, _ = self.recurrent(q, k, v, beta, initial_state=s.states[i], output_final_state=True)
            return o[:, 0]

        return step


class FlashQla:
    """Gated delta rule with gate 0."""

    name = "FlashQLA"

    def __init__(self):
        from flash_qla import chunk_gated_delta_rule

        self.chunk = chunk_gated_delta_rule
        self.decode = None

    def takes(self, x):
        ok = x.q.shape[-1] == x.v.shape[-1] == 128 and x.q.dtype != torch.float32
        return "" if ok else "head size 128 in 16 bits only"

    def forward(self, x):
        # Without a backward to come it need not keep its split of the sequence.
        keep = torch.is_grad_enabled()
        return self.chunk(
            x.q, x.k, x.v, x.zero_decay, x.beta, cu_seqlens=x.cu_seqlens, enable_fwd_cp_cache=keep
        )[0]

    train = forward


class FlashInfer:
    """Forward only. `context_parallel` is its use_cp: "auto", True or False."""

    train = None

    def __init__(self, context_parallel):
        from flashinfer import gdn_decode, gdn_prefill

        self.chunk, self.step = gdn_prefill.chunk_gated_delta_rule, gdn_decode
        self.context_parallel = context_parallel
        suffix = {"auto": "", True: " split", False: " unsplit"}[context_parallel]
        self.name = "FlashInfer" + suffix
        if context_parallel != "auto":
            self.decode = None

    def takes(self, x):
        ok = x.q.shape[-1] == x.v.shape[-1] == 128 and x.q.dtype != torch.float32
        return "" if ok else "head size 128 in 16 bits only"

    def forward(self, x):
        if not x.packed:
            batch, tokens = x.q.shape[:2]
            x.packed.update({n: getattr(x, n).flatten(0, 1) for n in ("q", "k", "v", "beta")})
            ends = torch.arange(0, batch * tokens + 1, tokens, device=x.q.device)
            x.packed["cu_seqlens"] = ends if x.cu_seqlens is None else x.cu_seqlens
        o = self.chunk(**x.packed, use_cp=self.context_parallel)
        return (o[0] if isinstance(o, tuple) else o).view(x.v.shape)

    def decode(self, s):
        q, k, v, b = (t[:, None].contiguous() for t in (s.q, s.k, s.v, s.logit))
        heads = v.shape[2]
        # A_log = -30: the decay is 1 to the last bit of float32.
        a_log = torch.full((heads,), -30.0, device=v.device)
        a, bias = torch.zeros_like(b), torch.zeros(heads, device=v.device)

        def step(i):
            # Its state is V-major: the same memory read as the transpose.
            o, _ = self.step.gated_delta_rule_decode_pretranspose(
                q, k, v, s.states[i], a_log, a, bias, b, use_qk_l2norm=False
            )
            return o[:, 0]

        return step

    transposed_state = True


PEERS = {
    "fla": lambda: [Fla()],
    "flashqla": lambda: [FlashQla()],
    "flashinfer": lambda: [FlashInfer(mode) for mode in ("auto", True, False)],
}


def find_peers(names):
    """The contestants of these names that can be imported; says what is left out, and why."""
    found = []
    for name in names:
        try:
            found += PEERS[name]()
        except Exception as error:  # whatever keeps it from being imported
            print(f"{name} left out: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return found


def versions():
    """Versions of what takes part, for the record."""
    import contextlib
    from importlib import metadata

    names = ("torch", "triton", "fla-core", "flash-linear-attention", "flash-qla", "tilelang",
             "flashinfer-python", "nvidia-cutlass-dsl")  # fmt: skip
    out = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            out[name] = metadata.version(name)
    return out
