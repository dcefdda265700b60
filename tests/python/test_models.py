"""efla.models under transformers: checkpoints of fla and of the program `efla`, generate, Trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import efla
import pytest
import torch
from reference import relative_error
from safetensors.torch import load_file

transformers = pytest.importorskip(
    "transformers", minversion="5.0", reason="transformers 5 is not installed"
)
from efla.models import EflaConfig, EflaForCausalLM, EflaModel, GatedEflaConfig  # noqa: E402

transformers.utils.logging.disable_progress_bar()
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
PROGRAM = os.environ.get("EFLA_PROGRAM")
needs_program = pytest.mark.skipif(PROGRAM is None, reason="EFLA_PROGRAM does not name the program")

CONFIGS = {
    "efla": EflaConfig(num_heads=2, beta_activation="softplus", q_norm="l2", use_gate=True),
    "tied, adaptive": EflaConfig(num_heads=4, beta_activation="adaptive", tie_word_embeddings=True,
                                 expand_v=0.5, qk_activation="elu", use_output_norm=False),
    "gated_efla": GatedEflaConfig(num_heads=1, num_v_heads=2, head_dim=16, expand_v=1.0,
                                  rule="exact_log"),
    "hybrid": EflaConfig(num_heads=2, rule="euler", qk_norm="l2",
                         attn=dict(layers=[1], num_heads=4, num_kv_heads=2, window_size=5)),
}  # fmt: skip


def make(config, seed=0):
    """A small model in which every weight matters."""
    torch.manual_seed(seed)
    config = type(config).from_dict(config.to_dict())
    for name, value in dict(
        hidden_size=32, num_hidden_layers=2, vocab_size=61, intermediate_size=48
    ).items():
        setattr(config, name, value)
    model = EflaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens(batch=2, length=11, seed=1):
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


# --- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["delta_net", "gated_deltanet"])
def test_fla_checkpoints_give_flas_logits(family):
    model = EflaForCausalLM.from_pretrained(GOLDEN / family)
    golden = load_file(GOLDEN / family / "golden.safetensors")
    ids = golden["input_ids"].long()
    output = model(ids, labels=ids)
    assert relative_error(output.logits, golden["logits"]) < 1e-5
    assert abs(output.loss.item() - golden["loss"].item()) < 1e-5
    output.loss.backward()
    parameters = dict(model.named_parameters())
    gradients = {n[5:]: t for n, t in golden.items() if n.startswith("grad.")}
    assert len(gradients) > 5
    for name, expected in gradients.items():
        assert relative_error(parameters[name].grad, expected) < 1e-4, name


@needs_program
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_agree_with_the_program_in_both_directions(name, tmp_path):
    model = make(CONFIGS[name])
    model.save_pretrained(tmp_path / "ours")
    run("convert", tmp_path / "ours", tmp_path / "theirs", "--logits", tmp_path / "logits")
    saved = load_file(tmp_path / "logits")
    ids = saved["input_ids"].long()
    assert relative_error(model(ids).logits, saved["logits"]) < 1e-5
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert type(again.config) is type(model.config)
    assert torch.equal(again(ids).logits, model(ids).logits)


@needs_program
def test_reads_what_efla_train_writes(tmp_path):
    (tmp_path / "text.txt").write_text("the exact flow erases, then writes. " * 400)
    run("data", "prepare", "--input", tmp_path / "text.txt", "--tokenizer", "byte",
        "--output", tmp_path / "shards")  # fmt: skip
    (tmp_path / "recipe.toml").write_text(f"""
[model]
hidden_size = 32
num_hidden_layers = 2
num_heads = 2
intermediate_size = 48
[data]
train = "{tmp_path}/shards"
tokenizer = "byte"
length = 64
batch = 4
[optimizer]
learning_rate = 1e-2
[train]
out = "{tmp_path}/run"
steps = 20
""")
    run("train", tmp_path / "recipe.toml")
    run("convert", tmp_path / "run", tmp_path / "copy", "--logits", tmp_path / "logits")
    saved = load_file(tmp_path / "logits")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert isinstance(model, EflaForCausalLM)
    assert relative_error(model(saved["input_ids"].long()).logits, saved["logits"]) < 1e-5


def test_round_trips(tmp_path):
    model = make(CONFIGS["gated_efla"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "gated_efla" and written["rule"] == "exact_log"
    assert written["num_heads"] == 1 and written["norm_eps"] == 1e-6  # defaults too
    again = EflaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    half = EflaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    kinds = {n: p.dtype for n, p in half.named_parameters()}
    assert (
        kinds["model.layers.0.attn.A_log"] == kinds["model.layers.1.attn.dt_bias"] == torch.float32
    )
    assert kinds["model.layers.0.attn.q_proj.weight"] == torch.bfloat16
    assert relative_error(half(tokens()).logits, model(tokens()).logits) < 5e-2
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, EflaModel)
    hidden = base.eval()(tokens()).last_hidden_state
    torch.testing.assert_close(model.lm_head(hidden), model(tokens()).logits)
    ties = make(CONFIGS["tied, adaptive"])
    assert ties.lm_head.weight is ties.model.embeddings.weight


def test_first_weights():
    torch.manual_seed(0)
    model = EflaForCausalLM(
        GatedEflaConfig(hidden_size=64, num_hidden_layers=1, num_heads=2, head_dim=16,
                        initializer_range=0.05, conv_initializer_range=0.3)
    )  # fmt: skip
    layer = model.model.layers[0]
    assert abs(model.lm_head.weight.std() - 0.05) < 2e-3
    assert abs(layer.attn.q_conv1d.weight.std() - 0.3) < 0.05
    assert torch.equal(layer.attn_norm.weight, torch.ones(64))
    assert layer.attn.A_log.exp().max() < 16
    folder = GOLDEN / "gated_deltanet"  # what is loaded is not drawn again
    stored = load_file(folder / "model.safetensors")
    for name, parameter in EflaForCausalLM.from_pretrained(folder).named_parameters():
        assert torch.equal(parameter, stored[name]), name


# --- Calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_with_left_padding(name):
    model, ids = make(CONFIGS[name]), tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)
    together = model.generate(ids, attention_mask=mask, **options)
    assert together.shape == (2, 20) and torch.equal(together[:, :11], ids)
    for row, start in ((0, 4), (1, 0)):
        alone = model.generate(ids[row : row + 1, start:], **options)
        assert torch.equal(together[row : row + 1, start:], alone)
        again = model.generate(ids[row : row + 1, start:], use_cache=False, **options)
        assert torch.equal(again, alone)
    beams = model.generate(ids, attention_mask=mask, num_beams=3, **options)
    alone = model.generate(ids[:1, 4:], num_beams=3, use_cache=False, **options)
    assert torch.equal(beams[:1, 4:], alone)
    torch.manual_seed(0)
    sampled = model.generate(ids, attention_mask=mask, **{**options, "do_sample": True})
    assert sampled.shape == (2, 20)


@pytest.mark.parametrize("name", ["efla", "hybrid"])
def test_a_cache_continues(name):
    model, ids = make(CONFIGS[name]), tokens()
    with torch.no_grad():
        whole = model(ids).logits
        output = model(ids[:, :6], use_cache=True)
        cache = output.past_key_values
        assert cache.get_seq_length() == 6
        pieces = [output.logits]
        for start, end in [(6, 7), (7, 11)]:
            pieces.append(model(ids[:, start:end], past_key_values=cache).logits)
    assert relative_error(torch.cat(pieces, 1), whole) < 1e-5
    assert cache.get_seq_length() == 11 and len(cache) == 2
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, logits_to_keep=2).logits.shape == (2, 2, 61)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3 and states[0].shape == (2, 11, 32)
    embedded = model(inputs_embeds=model.model.embeddings(ids)).logits
    assert torch.equal(embedded, model(ids).logits)


def test_labels_masks_and_packing():
    model, ids = make(CONFIGS["gated_efla"]), tokens()
    labels = ids.clone()
    labels[0, 3:5] = -100
    output = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    torch.testing.assert_close(output.loss, expected)
    summed = model(ids, labels=labels, num_items_in_batch=7).loss
    torch.testing.assert_close(summed, expected * 18 / 7)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 8 + [0] * 3])
    logits = model(ids, attention_mask=mask).logits
    for row in range(2):
        alone = model(ids[row : row + 1, mask[row] != 0]).logits
        assert relative_error(logits[row : row + 1, mask[row] != 0], alone) < 1e-5
    packed = model(ids.reshape(1, 22), cu_seqlens=torch.tensor([0, 11, 22])).logits
    assert relative_error(packed.view(2, 11, 61), model(ids).logits) < 1e-5


def test_gradient_checkpointing_and_compile():
    model, ids = make(CONFIGS["efla"]).train(), tokens()
    gradients = []
    for prepare in (lambda: None, model.gradient_checkpointing_enable):
        prepare()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    assert model(ids, use_cache=True).past_key_values is None  # a block would advance it twice
    model.gradient_checkpointing_disable()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = make(CONFIGS["efla"])
    pattern = [{"input_ids": (torch.arange(16) * (1 + i % 3)) % 61} for i in range(24)]
    for row in pattern:
        row["labels"] = row["input_ids"]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, per_device_train_batch_size=8, max_steps=12, learning_rate=1e-2,
        logging_steps=1, save_steps=12, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=pattern,
                                   eval_dataset=pattern)  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.7 * before
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12").eval()
    ids = pattern[0]["input_ids"][None]
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)


# --- Bad input -----------------------------------------------------------------------------------


def test_bad_configs(tmp_path):
    with pytest.raises(ValueError, match="model_type must be one of efla.*not 'mamba2'.*flash-"):
        EflaForCausalLM.from_pretrained(GOLDEN / "mamba2")
    for fields, match in (
        (dict(hidden_act="gelu"), "hidden_act must be 'swish' here, not 'gelu'"),
        (dict(use_l2warp=True), "use_l2warp must be False"),
        (dict(attnres_block_size=2), "attnres_block_size must be None"),
        (dict(conv_bias=True), "conv_bias must be False"),
    ):
        with pytest.raises(ValueError, match=match):
            EflaConfig(**fields)
    small = dict(hidden_size=32, num_hidden_layers=1, vocab_size=61)
    for fields, match in (
        (dict(num_heads=5), "num_heads must be a divisor of hidden_size"),
        (dict(num_heads=2, rule="exact_log"), "rule must be one of"),
        (dict(num_heads=2, attn=dict(layers=[0])), "attn must have the key 'num_heads'"),
        (dict(num_heads=2, attn=dict(layers=[0], num_heads=2, head=1)), "unknown key 'head'"),
        (dict(num_heads=2, attn=dict(layers=[3], num_heads=2)), r"attn.layers.*0 to 0, not \[3\]"),
    ):
        with pytest.raises(ValueError, match=match):
            EflaForCausalLM(EflaConfig(**small, **fields))


def test_bad_calls():
    model, ids = make(CONFIGS["efla"]), tokens()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(TypeError, match=r"the cache must be an efla\.nn\.Cache, not DynamicCache"):
        model(ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        model(ids, attention_mask=torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match="EflaForCausalLM got an unexpected.*'attn_mask'"):
        model(ids, attn_mask=None)
    with pytest.raises(IndexError, match="out of range"):
        model(ids + 61)


def test_without_transformers_the_rest_works():
    code = """
import sys, types
import efla, torch
efla.nn.EFLA(hidden_size=8, num_heads=1)
old = types.ModuleType("transformers")
old.__version__ = "4.57.1"
for found in (None, old):
    sys.modules["transformers"] = found
    try:
        efla.EflaForCausalLM
    except ImportError as error:
        print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(efla.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    missing, old = done.stdout.splitlines()
    assert "pip install 'transformers>=5'" in missing
    assert "transformers 5 or newer, but 4.57.1 is installed: pip install" in old
