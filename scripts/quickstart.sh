#!/usr/bin/env bash
# From nothing to a language model: installs, builds, trains a small EFLA model on four Jane Austen
# novels, measures it on a novel it has never seen, and lets it write. About 16 minutes on 2 cores,
# 4 of them training. A second run starts from what is there.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

scripts/build.sh release efla
. scripts/env.sh
data=data/austen
run=runs/quickstart

if [ ! -d $data/test ]; then
  say "Fetching six Austen novels from Debian's package r-cran-janeaustenr (2 MB)"
  # A machine whose package lists were removed needs them once.
  python3 scripts/austen.py $data || { as_root apt-get -qq update && python3 scripts/austen.py $data; }
fi
if [ ! -f $data/tokenizer.model ]; then
  say "Training a tokenizer of 2,048 pieces on the four training novels (5 seconds)"
  efla tokenizer train --input $data/train/*.txt --vocab-size 2048 --output $data/tokenizer.model
fi
mkdir -p $data/shards
for split in train valid test; do
  if [ ! -d $data/shards/$split ]; then
    efla data prepare --input $data/$split/*.txt --tokenizer $data/tokenizer.model --output $data/shards/$split
  fi
done

say "Training (about 4 minutes on 2 cores; Ctrl-C saves, running this again resumes)"
efla train configs/quickstart.toml

say "Measuring on Northanger Abbey, which neither the model nor the tokenizer has seen"
efla eval --model $run --data $data/shards/test --metric windows
novel=$data/test/northanger-abbey.txt
printf 'xz -9e on the same text: %s bits per byte\n' \
  "$(echo "$(xz -9e -c $novel | wc -c) $(wc -c <$novel)" | awk '{printf "%.3f", 8 * $1 / $2}')"

say "A sample of 200 tokens"
efla generate --model $run --prompt "It was a truth" --max-tokens 200 --temperature 0.8 --top-p 0.95 --seed 7 --echo

say "The loss curve is $run/loss.png, the model $run; try: . scripts/env.sh && efla generate --model $run --prompt 'Dear Sir'"
