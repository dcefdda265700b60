#!/usr/bin/env bash
# From nothing to a language model: installs, builds, trains a small EFLA model on four Jane Austen
# novels, measures it on a novel it has never seen, and lets it write. About 12 minutes on 2 cores,
# 4 of them training. A second run starts from what is there.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

scripts/build.sh release efla
. scripts/env.sh
data=data/austen
run=runs/quickstart

if [ ! -f $data/test/northanger-abbey.txt ]; then
  say "Fetching six Austen novels from Debian's package r-cran-janeaustenr (2 MB)"
  scripts/austen.py $data
fi
if [ ! -f $data/tokenizer.model ]; then
  say "Training a tokenizer of 2,048 pieces on the four training novels (5 seconds)"
  efla tokenizer train --input $data/train/*.txt --vocab-size 2048 --output $data/tokenizer.model
fi
for split in train valid test; do
  if [ ! -d $data/shards/$split ]; then
    efla data prepare --input $data/$split/*.txt --tokenizer $data/tokenizer.model --output $data/shards/$split
  fi
done

say "Training (about 4 minutes on 2 cores; Ctrl-C saves, running this again resumes)"
efla train configs/quickstart.toml
