#!/usr/bin/env bash
# Builds only. Usage: scripts/build.sh [preset] [target ...]   (preset: release, dev, asan, cuda)
# First build of everything on 2 cores: 18 minutes; later builds compile what changed.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
preset=${1:-release}
[ $# -gt 0 ] && shift

scripts/setup.sh
say "Building preset '$preset' ${*:+($*) }in build/$preset with $JOBS jobs"
log=build/$preset/configure.log
mkdir -p "build/$preset"
cmake --preset "$preset" >"$log" 2>&1 || {
  grep -m 3 -A 4 'CMake Error' "$log" >&2 || tail -n 5 "$log" >&2
  die "cmake could not configure preset '$preset' (whole log: $log)"
}
cmake --build --preset "$preset" --parallel "$JOBS" ${*:+--target "$@"} ||
  die "the build of preset '$preset' failed: the first error is above"
