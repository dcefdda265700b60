# Shared by the scripts of this folder; sourced, not run.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
JOBS=${JOBS:-$(nproc)}

say() { printf '\n== %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Runs a command as root: directly, or through sudo.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "root is needed for '$*' and sudo is not here: run that line as root, then start again"
  fi
}

# Installs Debian packages. A failing `apt-get update` (one mirror of several, an offline image with
# a warm cache) does not stop it: whether the packages can be had is for the install to say.
apt_install() {
  command -v apt-get >/dev/null || die "apt-get is not here: install the equivalents of $*, then start again"
  if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; then
    die "root is needed to install packages and sudo is not here: run 'apt-get update && apt-get install -y --no-install-recommends $*' as root, then start again"
  fi
  local log
  log=$(mktemp)
  as_root apt-get -qq update >"$log" 2>&1 || say "apt-get update failed; going on with the package lists that are here"
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install -y --no-install-recommends "$@" >>"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    die "apt-get could not install $* (whole log: $log)"
  }
  rm -f "$log"
}

has_cuda_toolkit() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }
