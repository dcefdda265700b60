"""lm-evaluation-harness and `efla eval` agree sample by sample on small files of every task, in the
layouts that the sets' authors use (scripts/compare_with_lm_eval.py)."""

import json
import pathlib
import subprocess
import sys
import unittest

from cli_support import Case, PROGRAM, TIMEOUT, english, write_model

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "compare_with_lm_eval.py"
PAGES = """ = Robert Smith =\x20
\x20
 Robert <unk> had a guest @-@ starring role ( in 2 @,@ 000 ) ; " The Bill " , Teddy 's , N .\x20
 = = Career = =\x20
 He cost 1 @.@ 5 dollars : ' why ' ? [ sic ] at 20 \u00b0 C\u00a0{ x } ! It was the boys ' own .\x20
 = Second page =\x20
\x20
 Short .\x20
"""


def text(words, seed):
    return english(words, seed=seed).strip()


def records(task, seed):
    """Six records of a task; another seed, other texts."""
    rows = []
    for i in range(6):
        n = 100 * seed + i
        a, b, c, d = (text(1 + (i + j) % 4, 7 * n + j) for j in range(4))
        long, label = text(4 + 3 * i, n), n % 2
        rows.append({
            "lambada_openai": {"text": f"{long}\n {a} caf\u00e9"},
            "piqa": {"goal": long, "sol1": a, "sol2": b + " end"},
            "hellaswag": {"activity_label": "Roof [x]", "ctx_a": f"{long} [title] Now.",
                          "ctx_b": "tHEN \u00c9VE  goes", "label": str(n % 4),
                          "endings": [f"{a} [step]  on", f" {b}.", f"{c} [title]", d]},
            "winogrande": {"sentence": f"{long} _ {b} .", "option1": "Ann", "option2": "Robert",
                           "answer": str(1 + label)},
            "arc_easy": {"question": {"stem": long + "?", "choices": [
                {"text": t, "label": s} for t, s in zip((a, b, c), "ABC")]}, "answerKey": "ABC"[n % 3]},
            "boolq": {"question": f"is {a}", "passage": long, "answer": bool(label), "title": "t"},
            "openbookqa": {"question": {"stem": long, "choices": [
                {"text": t, "label": s} for t, s in zip((a, b, c, d), "ABCD")]},
                "answerKey": "ABCD"[n % 4]},
            "sciq": {"support": f" {long}.", "question": f"what {a}?", "distractor1": a,
                     "distractor2": b, "distractor3": c, "correct_answer": d},
            "copa": {"premise": f"{long}.", "choice1": f"We {a}.", "choice2": f"They {b}.",
                     "question": ("cause", "effect")[label], "label": n % 2},
        }[task])
    return rows


class Agreement(Case):
    def test_every_task(self):
        model = write_model(self.folder / "model")
        data = self.folder / "data"
        data.mkdir()
        tasks = ["lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "boolq",
                 "openbookqa", "sciq", "copa"]
        for task in tasks:
            for seed, suffix in ((0, ""), (1, "_train")):
                rows = records(task, seed)
                if task == "piqa":
                    rows = [{**row, "label": i % 2} for i, row in enumerate(rows)]
                path = data / f"{task}{suffix}.jsonl"
                if task == "openbookqa" and suffix:
                    continue  # examples come from the evaluated set
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (data / "sciq.jsonl").unlink()
        (data / "sciq.json").write_text(json.dumps(records("sciq", 0), indent=1))
        (data / "arc_challenge.jsonl").write_text((data / "arc_easy.jsonl").read_text())
        (data / "wiki.test.raw").write_text(PAGES)
        tasks += ["arc_challenge", "wikitext"]
        for arguments in (["--window", "400"],
                          # Windows that cut contexts off, examples, and the doubled BOS.
                          ["--window", "64", "--shots", "2", "--bos", "harness"]):
            done = subprocess.run(
                [sys.executable, SCRIPT, "--model", model, "--data", data, "--efla", PROGRAM,
                 "--tasks", ",".join(tasks), *arguments], capture_output=True, text=True,
                timeout=TIMEOUT)
            self.assertEqual(done.returncode, 0, done.stderr[-3000:])
            self.assertIn("All samples agree.", done.stdout)
            for task in tasks:
                self.assertIn(f"| {task} | {2 if task == 'wikitext' else 6} |", done.stdout)


if __name__ == "__main__":
    unittest.main()
