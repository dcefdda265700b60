"""The models and tokenizers that compare_with_lm_eval.py gives lm-evaluation-harness: an EFLA or DeltaNet
model written again in plain PyTorch, token by token, which shares no code with what it checks; the
transformers class; the program's two tokenizers."""

import json
import sys


class Model:
    """A language model with EFLA or DeltaNet layers from a folder of `efla train` or fla, float32."""

    def __init__(self, folder):
        import torch
        from safetensors.torch import load_file
        self.torch = torch
        self.config = c = json.loads((folder / "config.json").read_text())
        self.weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        delta_net = c["model_type"] == "delta_net"
        self.rule = "euler" if delta_net else c["rule"]
        for key, value in (("hidden_act", "swish"), ("beta_activation", "sigmoid"),
                           ("use_gate", False), ("use_beta", True), ("use_short_conv", True),
                           ("use_output_norm", True), ("allow_neg_eigval", False), ("attn", None)):
            if c.get(key, value) != value:
                sys.exit(f"compare_with_lm_eval: {folder}/config.json: {key} {c[key]!r} is not one "
                         f"that this script computes; give a model with {value!r}")
        if c["model_type"] not in ("efla", "delta_net") or self.rule not in ("exact", "euler"):
            sys.exit(f"compare_with_lm_eval: {folder} is not a model of the rules exact or euler")

    def norm(self, x, name):
        scale = (x.square().mean(-1, keepdim=True) + self.config.get("norm_eps", 1e-6)).rsqrt()
        return x * scale * self.weights[name]

    def conv(self, x, name):
        weight = self.weights[name]  # [D, 1, W]
        padded = self.torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[2] - 1, 0))
        return self.torch.nn.functional.conv1d(padded, weight, groups=x.shape[2]).transpose(1, 2)

    def mix(self, x, p):
        torch, c = self.torch, self.config
        heads = c["num_heads"]
        silu = torch.nn.functional.silu

        def stream(name):
            y = silu(self.conv(x @ self.weights[f"{p}{name}_proj.weight"].T,
                               f"{p}{name}_conv1d.weight"))
            return y.unflatten(2, (heads, -1))

        q, k, v = stream("q"), stream("k"), stream("v")
        if c.get("qk_norm", "l2") == "l2":
            q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        beta = (x @ self.weights[f"{p}b_proj.weight"].T).sigmoid()  # [B, T, H]
        step = beta
        if self.rule == "exact":
            norm2 = k.square().sum(-1)
            z = beta * norm2
            step = torch.where(z > 0, -torch.expm1(-z) / norm2.clamp_min(1e-30), beta)
        q = q * k.shape[-1] ** -0.5
        # [B, T, H, ...] -> [T, B H, 1, ...]; S += k step (v - S^T k)^T, o = S^T q, token by token.
        q, k, v = (y.movedim(1, 0).flatten(1, 2).unsqueeze(2).contiguous() for y in (q, k, v))
        step = step.movedim(1, 0).flatten(1)[:, :, None, None]
        state = x.new_zeros(k.shape[1], k.shape[-1], v.shape[-1])
        outputs = torch.empty_like(v)
        for t in range(x.shape[1]):
            state.baddbmm_(k[t].transpose(1, 2), step[t] * (v[t] - k[t].bmm(state)))
            torch.bmm(q[t], state, out=outputs[t])
        o = outputs.squeeze(2).unflatten(1, (-1, heads)).movedim(0, 1)  # [B, T, H, V]
        o = self.norm(o, f"{p}o_norm.weight")
        return o.flatten(2) @ self.weights[f"{p}o_proj.weight"].T

    def logits(self, ids):
        torch, w = self.torch, self.weights
        x = w["model.embeddings.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            x = x + self.mix(self.norm(x, p + "attn_norm.weight"), p + "attn.")
            h = self.norm(x, p + "mlp_norm.weight")
            gate = torch.nn.functional.silu(h @ w[p + "mlp.gate_proj.weight"].T)
            x = x + (gate * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embeddings.weight"])
        return self.norm(x, "model.norm.weight") @ head.T


class TransformersModel:
    """The same folder as efla.models.EflaForCausalLM: every family that it reads."""

    def __init__(self, folder, device):
        import torch
        from efla.models import EflaForCausalLM
        model = EflaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model, self.device = model.eval().to(device), device

    def logits(self, ids):
        return self.model(ids.to(self.device), use_cache=False).logits.cpu()


class ByteTokenizer:
    bos, eos = 256, 257

    def encode(self, text):
        return list(text.encode())


class PieceTokenizer:
    def __init__(self, path):
        import sentencepiece
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.bos, self.eos = self.model.bos_id(), self.model.eos_id()

    def encode(self, text):
        return self.model.encode(text)
