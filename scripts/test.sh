#!/usr/bin/env bash
# Installs, builds and tests. Usage: scripts/test.sh [preset] [ctest options]
# About 26 minutes on 2 cores from nothing, 18 of them compiling.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
preset=release
case ${1:-} in release | dev | asan | cuda) preset=$1 && shift ;; esac

scripts/build.sh "$preset"
say "Running the tests of preset '$preset' (about 7 minutes)"
ctest --preset "$preset" "$@"
