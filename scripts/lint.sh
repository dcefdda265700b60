#!/usr/bin/env bash
# Checks formatting (clang-format) and runs clang-tidy. Usage: scripts/lint.sh [FILE.cc ...]
# Formatting takes a second; clang-tidy about 20 seconds a file and core, so name files for a quick look.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

for tool in clang-format clang-tidy; do
  command -v $tool >/dev/null || { say "Installing $tool"; as_root apt-get -qq install -y $tool; }
done

say "clang-format"
git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror ||
  die "formatting differs: run clang-format -i on the files above"

say "clang-tidy"
# Without the precompiled header, which is g++'s and which clang cannot read.
cmake --preset dev -B build/lint -DEFLA_PCH=OFF >/dev/null
files=("$@")
[ ${#files[@]} -gt 0 ] || mapfile -t files < <(git ls-files 'efla/*.cc' | grep -v _test.cc)
printf '%s\n' "${files[@]}" | xargs -P "$JOBS" -n 1 clang-tidy -p build/lint --quiet \
  --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument ||
  die "clang-tidy found something: see above"
say "clean"
