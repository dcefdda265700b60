# Source this after a build, from bash or zsh:   . scripts/env.sh [preset]
# Puts `efla` on PATH and makes `import efla` work in python3.

_efla_root=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)
_efla_build=$_efla_root/build/${1:-release}
if [ -x "$_efla_build/efla/cli/efla" ]; then
  [ -x "$_efla_root/.venv/bin/python" ] && PATH=$_efla_root/.venv/bin:$PATH
  export PATH=$_efla_build/efla/cli:$PATH
  export PYTHONPATH=$_efla_root/python${PYTHONPATH:+:$PYTHONPATH}
  export EFLA_LIBRARY=$_efla_build/efla/ops/libefla_ops.so
else
  echo "error: $_efla_build holds no efla program: run scripts/build.sh ${1:-release} first" >&2
fi
unset _efla_root _efla_build
