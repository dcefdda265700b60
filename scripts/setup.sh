#!/usr/bin/env bash
# Installs what the build and the tests need: Debian packages, and torch in .venv of this checkout.
# A second run finds everything in place and takes a second. First run: 1 to 5 minutes, most of it
# the download of torch (0.8 GB where the CUDA toolkit is installed, 3 GB elsewhere).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

PACKAGES=(g++ cmake ninja-build ccache pkg-config git python3 python3-venv
  libhwy-dev libcli11-dev libtomlplusplus-dev libfmt-dev libspdlog-dev nlohmann-json3-dev
  libsentencepiece-dev libgtest-dev libgmock-dev librapidcheck-dev zlib1g-dev liblzma-dev
  gnuplot-nox xz-utils)

missing=()
for package in "${PACKAGES[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "Installing ${#missing[@]} Debian packages (about 1 minute): ${missing[*]}"
  apt_install "${missing[@]}"
fi

# True where PYTHON imports a torch that is new enough.
torch_works() {
  "$1" -c 'import sys, torch; v = torch.__version__.split("."); sys.exit((int(v[0]), int(v[1])) < (2, 9))' 2>/dev/null
}

# An importable torch of python3 is used as it is. That of the system is seen through the
# environment; that of an active environment, which .venv does not inherit, through a .pth file.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 && ! .venv/bin/python -m ensurepip >/dev/null 2>&1; then
  say "Making a Python environment in .venv"
  rm -rf .venv  # broken, if it is there at all: half made, or its python3 has been replaced
  flags=()
  if torch_works python3; then flags=(--system-site-packages); fi
  python3 -m venv "${flags[@]}" .venv || die "python3 could not make .venv: install python3-venv, then start again"
  if torch_works python3 && ! torch_works .venv/bin/python; then
    own=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python3 -c 'import sys, sysconfig
if sys.prefix != sys.base_prefix:
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        print(f"import site; site.addsitedir({folder!r})")' >"$own/active_environment.pth"
  fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }

# What the Python tests use: pip name, then the module that shows it is there. accelerate comes without
# its dependencies, of which torch is one; lm_eval without those that only other tasks need.
small=(filelock typing-extensions sympy networkx jinja2 fsspec numpy pytest safetensors psutil
  'transformers>=5.17,<6' mypy==2.4.1 ruff==0.17.6 'scikit-build-core>=0.11'
  'datasets>=4' sacrebleu sentencepiece requests more_itertools)
if ! .venv/bin/python -c 'import importlib.util as u, sys
names = "filelock typing_extensions sympy networkx jinja2 fsspec numpy pytest safetensors psutil"
names += " transformers mypy ruff scikit_build_core accelerate"
names += " datasets sacrebleu sentencepiece requests more_itertools lm_eval"
sys.exit(any(u.find_spec(name) is None for name in names.split()))'; then
  say "Installing Python packages for the tests (about 1 minute)"
  pip install "${small[@]}" && pip install --no-deps 'accelerate>=1.1' lm_eval==0.4.13 ||
    die "pip could not install ${small[*]} accelerate lm_eval: is PyPI reachable from here?"
fi
if ! torch_works .venv/bin/python; then
  if has_cuda_toolkit; then
    say "Installing torch 2.11.0 beside the CUDA toolkit (0.8 GB, about 1 minute)"
    pip install --no-deps torch==2.11.0 nvidia-cusparselt-cu13==0.8.0 nvidia-nvshmem-cu13==3.4.5 \
      nvidia-cufile==1.15.1.6 || die "pip could not install torch 2.11.0: is PyPI reachable from here?"
  fi
  if ! torch_works .venv/bin/python; then
    say "Installing torch 2.11.0 with its own CUDA libraries (3 GB, 2 to 4 minutes)"
    pip install torch==2.11.0 || die "pip could not install torch 2.11.0: is PyPI reachable from here?"
  fi
  torch_works .venv/bin/python || die "torch is installed in .venv but does not import: run '.venv/bin/python -c \"import torch\"' to see why"
fi
