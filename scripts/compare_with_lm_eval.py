#!/usr/bin/env python3
"""Evaluates one model on the same local files with lm-evaluation-harness and with `efla eval`, and
compares every sample: log-likelihoods, greedy matches, accuracies, perplexities, standard errors.

lm-evaluation-harness runs its own task definitions (prompts, choices, WikiText's detokeniser,
few-shot draws, metrics, bootstrap) on a plain PyTorch model that this file holds: the recurrence of
docs/mathematics.md token by token, nothing shared with the C++ code but the checkpoint; with
--transformers it runs the Python package's EflaForCausalLM. Needs torch, and from PyPI: lm_eval datasets
sacrebleu more_itertools sentencepiece (scripts/setup.sh).

    python3 scripts/compare_with_lm_eval.py --model runs/quickstart --data data/tasks --tasks piqa,wikitext
"""

import argparse
import gzip
import itertools
import json
import lzma
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from lm_eval_models import ByteTokenizer, Model, PieceTokenizer, TransformersModel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

LOG_LIKELIHOOD = 1e-4  # absolute, per request of a multiple-choice task or last word
FLOAT32 = 2 ** -22     # relative: two last places of the float32 in which the harness sums it
RELATIVE = 1e-5        # word and byte perplexity, log-likelihoods of documents


# ---- the files, as the columns that lm-evaluation-harness's tasks read --------------------------

def read_text(path):
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        return file.read()


def read_records(path):
    text = read_text(path)
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def two_sentences(record):
    first, second = record["context_options"]
    stem = os.path.commonprefix([first, second])  # noqa: RUF071 - by characters
    stem = stem[:stem.rfind(" ") + 1]
    return {"sentence": f"{stem}_ {record['continuation']}", "option1": first[len(stem):],
            "option2": second[len(stem):], "answer": str(record["gold"] + 1)}


def labelled(record, stem_key):
    question = record["question"] if isinstance(record.get("question"), dict) else record
    choices = question["choices"]
    if isinstance(choices, list):
        choices = {key: [c[key] for c in choices] for key in ("text", "label")}
    stem = question.get("stem", question.get(stem_key))
    return {stem_key: stem, "choices": choices, "answerKey": record["answerKey"]}


def from_query(record, stem_key, stem):
    labels = "ABCDEFGH"[:len(record["choices"])]
    return {stem_key: stem, "choices": {"text": record["choices"], "label": list(labels)},
            "answerKey": labels[record["gold"]]}


def after(text, prefix):
    return text[len(prefix):] if text.startswith(prefix) else text


def lambada(r):
    return {"text": r["text"] if "text" in r else r["context"] + " " + r["continuation"]}


def piqa(r):
    if "query" in r:
        return {"goal": after(r["query"].rstrip(), "Question: "), "sol1": r["choices"][0],
                "sol2": r["choices"][1], "label": r["gold"]}
    return {k: r[k] for k in ("goal", "sol1", "sol2")} | {"label": int(r["label"])}


def hellaswag(r):
    return {k: r[k] for k in ("activity_label", "ctx_a", "ctx_b", "endings")} | {
        "label": str(r["label"])}


def winogrande(r):
    if "context_options" in r:
        return two_sentences(r)
    return {k: r[k] for k in ("sentence", "option1", "option2", "answer")}


def arc(r):
    if "query" in r:
        return from_query(r, "question", after(r["query"].rstrip(), "Question: "))
    return labelled(r, "question")


def boolq(r):
    if "query" in r:
        passage, question = r["query"].rstrip().rsplit("\nQuestion: ", 1)
        return {"passage": after(passage, "Passage: "), "question": question.removesuffix("?"),
                "label": r["gold"]}
    return {"passage": r["passage"], "question": r["question"],
            "label": int(r["label"] if "label" in r else r["answer"])}


def openbookqa(r):
    return from_query(r, "question_stem", r["query"]) if "query" in r else (
        labelled(r, "question_stem"))


def sciq(r):
    keys = ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")
    return {k: r[k] for k in keys}


def copa(r):
    if "query" in r:
        premise, connector = r["query"].rsplit(" ", 1)
        return {"premise": premise.removesuffix(",") + ".",
                "question": {"because": "cause", "therefore": "effect"}[connector],
                "choice1": r["choices"][0], "choice2": r["choices"][1], "label": r["gold"]}
    return {k: r[k] for k in ("premise", "question", "choice1", "choice2")} | {
        "label": int(r["label"])}


def wikitext_pages(text):
    pages, page = [], []
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            pages.append("\n".join(page))
            page = []
        page.append(line)
    pages.append("\n".join(page))
    return [{"page": p} for p in pages if p.strip()]


# Task: (its file in lm_eval/tasks, the split that is evaluated, records to columns).
TASKS = {
    "wikitext": ("wikitext/wikitext.yaml", "test", None),
    "lambada_openai": ("lambada/lambada_openai.yaml", "test", lambada),
    "piqa": ("piqa/piqa.yaml", "validation", piqa),
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation", hellaswag),
    "winogrande": ("winogrande/default.yaml", "validation", winogrande),
    "arc_easy": ("arc/arc_easy.yaml", "test", arc),
    "arc_challenge": ("arc/arc_challenge.yaml", "test", arc),
    "boolq": ("super_glue/boolq/default.yaml", "validation", boolq),
    "openbookqa": ("openbookqa/openbookqa.yaml", "test", openbookqa),
    "sciq": ("sciq/sciq.yaml", "test", sciq),
    "copa": ("super_glue/copa/default.yaml", "validation", copa),
}


def write_task(folder, name, path, train_path):
    """The task as lm_eval has it, on local files."""
    import lm_eval.tasks
    definition, split, convert = TASKS[name]
    definition = pathlib.Path(lm_eval.tasks.__file__).parent / definition

    def write_rows(source, target):
        if name == "wikitext" and ".jsonl" not in source.name:
            rows = wikitext_pages(read_text(source))
        elif name == "wikitext":
            rows = [{"page": r["page"]} for r in read_records(source)]
        else:
            records = read_records(source)
            labels = source.parent / (source.name.split(".")[0] + "-labels.lst")
            if name == "piqa" and labels.exists():
                records = [r | {"label": int(answer)}
                           for r, answer in zip(records, labels.read_text().split(), strict=True)]
            rows = [convert(r) for r in records]
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    files = {split: str(folder / f"{name}.jsonl")}
    write_rows(path, folder / f"{name}.jsonl")
    if train_path:
        files["train"] = str(folder / f"{name}_train.jsonl")
        write_rows(train_path, folder / f"{name}_train.jsonl")
    config = {"include": str(definition), "task": f"local_{name}", "dataset_path": "json",
              "dataset_name": None, "dataset_kwargs": {"data_files": files}, "tag": [],
              "training_split": "train" if train_path else None,
              "validation_split": split if split == "validation" else None,
              "test_split": split if split == "test" else None}
    if split == "test" and not train_path:
        config["fewshot_split"] = "test"  # examples from the set itself, but never the question
    if name == "wikitext":
        config["num_fewshot"] = 0  # documents have no examples, whatever the others have
    if name not in ("wikitext", "lambada_openai", "winogrande"):
        config["metric_list"] = [{"metric": m, "aggregation": "mean", "higher_is_better": True}
                                 for m in ("acc", "acc_norm", "acc_bytes")]
    # JSON is YAML; only an !function could not be written so, and those are in the included file.
    (folder / f"local_{name}.yaml").write_text(json.dumps(config))


def make_adapter(model, folder, window, bos, batch):
    """A model as lm-evaluation-harness calls it; what HFLM does, for the models above."""
    import torch
    import torch.nn.functional as F
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    path = folder / "tokenizer.model"
    tokenizer = PieceTokenizer(path) if path.exists() else ByteTokenizer()

    class Adapter(TemplateLM):
        max_length = window
        tokenizer_name = "efla"

        @property
        def eot_token_id(self):
            return tokenizer.eos

        @property
        def prefix_token_id(self):
            return tokenizer.bos if tokenizer.bos >= 0 else tokenizer.eos

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            front = bos != "never" and add_special_tokens is not False and tokenizer.bos >= 0
            return [tokenizer.bos] * front + tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
            rows = []
            for index, (_, context, continuation) in enumerate(requests):
                assert context and continuation and len(continuation) <= self.max_length
                tokens = (context + continuation)[-(self.max_length + 1):]
                rows.append((tokens[:-1], continuation, index))
            rows.sort(key=lambda row: -len(row[0]))
            results = [None] * len(rows)
            for first in range(0, len(rows), batch):
                group = rows[first:first + batch]
                width = len(group[0][0])
                ids = torch.tensor([row[0] + [0] * (width - len(row[0])) for row in group])
                log_probs = F.log_softmax(model.logits(ids), dim=-1, dtype=torch.float32)
                for row, (inputs, continuation, index) in zip(log_probs, group, strict=True):
                    part = row[len(inputs) - len(continuation):len(inputs)]
                    wanted = torch.tensor(continuation)
                    greedy = bool((part.argmax(-1) == wanted).all())
                    results[index] = (float(part.gather(1, wanted[:, None]).sum()), greedy)
            return results

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            windows, owners = [], []
            for owner, request in enumerate(requests):
                text, = request.args
                tokens = self.tok_encode(text, add_special_tokens=None if bos == "harness" else False)
                for pair in utils.get_rolling_token_windows(tokens, self.prefix_token_id,
                                                            self.max_length, 1):
                    windows.append((None, *utils.make_disjoint_window(pair)))
                    owners.append(owner)
            totals = [0.0] * len(requests)
            for owner, (log, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
                totals[owner] += log
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            raise NotImplementedError

    return Adapter()


# ---- the comparison ---------------------------------------------------------------------------

def run_harness(folder, tasks, options):
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    torch.set_grad_enabled(False)
    model = (TransformersModel(options.model, options.device) if options.transformers
             else Model(options.model))
    adapter = make_adapter(model, options.model, options.window, options.bos, options.batch)
    begin = time.time()
    result = simple_evaluate(
        model=adapter, tasks=[f"local_{name}" for name in tasks], num_fewshot=options.shots or None,
        limit=options.limit, log_samples=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False))
    return result, time.time() - begin


def run_efla(folder, options):
    command = [options.efla, "eval", "--model", options.model, "--tasks", ",".join(options.tasks),
               "--output", folder, "--json", "--device", options.device, "--dtype", "float32",
               "--bos", options.bos, "--window", options.window, "--shots", options.shots]
    for path in options.data:
        command += ["--data", path]
    if options.limit:
        command += ["--limit", options.limit]
    begin = time.time()
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"compare_with_lm_eval: efla eval failed: {' '.join(map(str, command))}")
    seconds = time.time() - begin
    return {r["task"]: r for r in map(json.loads, done.stdout.splitlines())}, seconds


class Comparison:
    def __init__(self):
        self.differences = []

    def check(self, what, theirs, ours, tolerance):
        """The difference, which is noted when it is larger than allowed."""
        difference = abs(theirs - ours)
        if not difference <= tolerance:
            self.differences.append(f"{what}: lm-evaluation-harness {theirs}, efla {ours}")
        return difference

    def samples(self, task, theirs, ours):
        """Largest difference of a log-likelihood; accuracies and greedy matches must be equal."""
        worst = 0.0
        theirs = sorted(theirs, key=lambda s: s["doc_id"])
        if len(theirs) != len(ours):
            self.differences.append(f"{task}: {len(theirs)} and {len(ours)} samples")
        for their, our in zip(theirs, ours):
            where = f"{task} sample {our['index']} ({our['origin']})"
            if task == "wikitext":
                log, words = their["word_perplexity"]
                assert their["byte_perplexity"][1] == our["bytes"] and words == our["words"], where
                worst = max(worst, self.check(where, log, our["log_likelihoods"][0],
                                              RELATIVE * abs(log)))
                continue
            answers = list(their["filtered_resps"])
            assert len(answers) == len(our["log_likelihoods"]), where
            for (log, greedy), our_log, our_greedy in zip(
                    answers, our["log_likelihoods"], our["greedy"]):
                tolerance = max(LOG_LIKELIHOOD, FLOAT32 * abs(our_log))
                worst = max(worst, self.check(where, float(log), our_log, tolerance))
                self.check(where + " greedy", bool(greedy), our_greedy, 0)
            for metric in ("acc", "acc_norm", "acc_bytes"):
                if metric in their and metric in our:
                    self.check(f"{where} {metric}", their[metric], our[metric], 0)
        return worst


def compare(options, folder, paths):
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")  # before datasets is imported
    for name, (path, train_path) in paths.items():
        write_task(folder, name, path, train_path)
    ours, our_seconds = run_efla(folder / "efla", options)
    result, their_seconds = run_harness(folder, list(paths), options)
    comparison = Comparison()
    lines = ["| task | samples | largest difference of a log-likelihood | metric | "
             "lm-evaluation-harness | efla |", "|---|---:|---:|---|---:|---:|"]
    for name in paths:
        log = [json.loads(line)
               for line in (folder / "efla" / f"samples_{name}.jsonl").read_text().splitlines()]
        worst = comparison.samples(name, result["samples"][f"local_{name}"], log)
        for key, value in result["results"][f"local_{name}"].items():
            metric, _, _ = key.partition(",")
            if metric not in ours[name] or metric.endswith("_stderr"):
                continue
            exact = metric.startswith("acc")
            comparison.check(f"{name} {metric}", value, ours[name][metric],
                             1e-12 if exact else RELATIVE * value)
            shown = [f"{value:.6f}", f"{ours[name][metric]:.6f}"]
            error = result["results"][f"local_{name}"].get(f"{metric}_stderr,none")
            if isinstance(error, float) and not math.isnan(error):
                our_error = ours[name][f"{metric}_stderr"] or 0.0
                # The bootstrap draws the same samples; its deviation follows the log-likelihoods.
                comparison.check(f"{name} {metric} stderr", error, our_error,
                                 1e-9 if exact else 1e-4 * error)
                shown = [f"{s} ± {e:.6f}" for s, e in zip(shown, (error, our_error))]
            lines.append(f"| {name} | {len(log)} | {worst:.1e} | {metric} | {shown[0]} | "
                         f"{shown[1]} |")
    print("\n".join(lines))
    name = "EflaForCausalLM" if options.transformers else "the PyTorch model"
    print(f"\nlm-evaluation-harness with {name}: {their_seconds:.1f} s; efla eval: "
          f"{our_seconds:.1f} s")
    for difference in comparison.differences[:20]:
        print("DIFFERENT", difference, file=sys.stderr)
    if comparison.differences:
        sys.exit(f"compare_with_lm_eval: {len(comparison.differences)} values differ by more than "
                 "allowed")
    print("All samples agree.")


def find_paths(options):
    """The files that efla eval would read."""
    paths = {}
    for name in options.tasks:
        if name not in TASKS:
            sys.exit(f"compare_with_lm_eval: {name} is none of {', '.join(TASKS)}")
        aliases = {"openbookqa": ["openbookqa", "openbook_qa"], "wikitext": [
            "wikitext", "wiki.test", "wikitext2/test"]}.get(name, [name])

        def find(suffix, aliases=aliases):
            for data, alias, ending, packed in itertools.product(
                    options.data, aliases, (".jsonl", ".json", ".raw", ".tokens", ".txt"),
                    ("", ".gz", ".xz")):
                path = data / f"{alias}{suffix}{ending}{packed}"
                if path.exists():
                    return path
            return None

        path = find("")
        if path is None:
            sys.exit(f"compare_with_lm_eval: {', '.join(map(str, options.data))} holds no file of "
                     f"{name}")
        paths[name] = (path, find("_train") if options.shots else None)
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="model folder")
    parser.add_argument("--data", type=pathlib.Path, required=True, action="append",
                        help="folder of the task files; may be given several times")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS))
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--window", type=int, help="default: max_position_embeddings")
    parser.add_argument("--bos", choices=("once", "harness", "never"), default="once")
    parser.add_argument("--batch", type=int, default=32, help="rows of the PyTorch model")
    parser.add_argument("--device", default="cpu", help="of efla eval, and with --transformers")
    parser.add_argument("--transformers", action="store_true",
                        help="evaluate efla.models.EflaForCausalLM instead of the plain model")
    parser.add_argument("--efla", default=shutil.which("efla") or "efla", help="the program")
    options = parser.parse_args()
    if (options.model / "final").is_dir():
        options.model = options.model / "final"
    if options.window is None:
        config = json.loads((options.model / "config.json").read_text())
        options.window = config["max_position_embeddings"]
    paths = find_paths(options)
    with tempfile.TemporaryDirectory(prefix="efla_lm_eval_") as name:
        compare(options, pathlib.Path(name), paths)


if __name__ == "__main__":
    main()
