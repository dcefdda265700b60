#!/usr/bin/env bash
# Checks formatting (clang-format) and runs clang-tidy. Usage: scripts/lint.sh [FILE.cc ...]
# Formatting takes a second; clang-tidy 15 minutes on 2 cores, so name files for a quick look.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

VERSION=23.1.4  # of PyPI's clang-tidy, four times as fast as Debian 12's on torch's headers
command -v clang-format >/dev/null || { say "Installing clang-format"; as_root apt-get -qq install -y clang-format; }
tidy=.venv/bin/clang-tidy
[[ $($tidy --version 2>/dev/null) == *"$VERSION"* ]] ||
  .venv/bin/python -m pip --disable-pip-version-check -q install clang-tidy==$VERSION ||
  die "clang-tidy could not be installed: run scripts/setup.sh first, and see whether PyPI is reachable"

say "clang-format"
git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror ||
  die "formatting differs: run clang-format -i on the files above"

say "clang-tidy"
# Without the precompiled header, which is g++'s and which clang cannot read.
cmake --preset dev -B build/lint -DEFLA_PCH=OFF -DEFLA_CUDA=OFF >/dev/null
files=("$@")
[ ${#files[@]} -gt 0 ] || mapfile -t files < <(git ls-files 'efla/*.cc' | grep -v _test.cc)
printf '%s\n' "${files[@]}" | xargs -P "$JOBS" -n 1 $tidy -p build/lint --quiet \
  --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument \
  --extra-arg=-idirafter --extra-arg="$(g++ -print-file-name=include)" ||  # for g++'s omp.h
  die "clang-tidy found something: see above"
say "clean"
