#!/usr/bin/env bash
# Trains every family from its recipe in configs/ on the quickstart's text, lets each write a line,
# and puts the held-out curves and a table into docs/ (families.md, images/families.png).
# Arguments go to every `efla train`: scripts/families.sh train.steps=100. What is trained already is
# not trained again. Needs the quickstart's data and gnuplot.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
. scripts/env.sh "${PRESET:-release}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}

families=(efla delta_net gated_deltanet gated_efla mamba2 transformer hybrid)
[ -d data/austen/shards/valid ] || die "data/austen/shards is not there: run scripts/quickstart.sh first, which makes it"

for family in "${families[@]}"; do
  say "$family"
  efla train "configs/$family.toml" "$@"
  out=runs/families/$family
  efla info "$out" --json >"$out/info.json"
  efla eval --model "$out" --data data/austen/shards/test --metric windows --max-tokens 32768 --json >"$out/eval.json"
  efla generate --model "$out" --prompt "It was a truth" --max-tokens 40 --temperature 0.8 --top-p 0.95 --seed 7 --json >"$out/sample.json"
done
python3 scripts/families_report.py "${families[@]}" -- "$@"
say "docs/families.md and docs/images/families.png are written"
