#!/usr/bin/env bash
# Makes a fresh clone ready: uv, a virtual environment with the locked packages, kLLM itself, and the one system library
# that the KV transfer engine needs. Does nothing that is done already; takes seconds then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly python_version=3.11
readonly requirements=requirements/dev.txt
readonly venv=.venv
readonly stamp=$venv/.kllm-setup
readonly uv_home=.cache/uv

started=$SECONDS
say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# Runs apt-get as root, or says which command a person has to run.
install_system_package() {
  local package=$1 reason=$2
  command -v apt-get >/dev/null || fail "$reason: install your distribution's counterpart of Debian's $package"
  [ "$(id -u)" -eq 0 ] || fail "$reason: run: sudo apt-get install --yes $package"
  say "installing Debian's $package ($reason)"
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends -qq "$package" >&2
}

# Prints the path of a uv: the one on PATH, else one installed from its locked wheel.
find_uv() {
  command -v uv && return
  if [ ! -x "$uv_home/bin/uv" ]; then
    command -v python3 >/dev/null || fail "python3 is not on PATH; it is needed to install uv"
    python3 -c 'import ensurepip' 2>/dev/null || install_system_package python3-venv "python3 cannot make environments"
    say "installing uv"
    rm -rf "$uv_home"
    python3 -m venv "$uv_home"
    "$uv_home/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/uv.txt >&2
  fi
  printf '%s\n' "$PWD/$uv_home/bin/uv"
}

library_is_there() {
  local ldconfig
  ldconfig=$(command -v ldconfig || printf '/sbin/ldconfig')
  "$ldconfig" -p 2>/dev/null | grep -F "$1" >/dev/null
}

fingerprint() {
  { printf '%s\n' "$PWD" "$python_version"; cat "$requirements" pyproject.toml scripts/setup.sh; } | sha256sum
}

library_is_there libibverbs.so.1 || install_system_package libibverbs1 "the KV transfer engine loads libibverbs.so.1"

wanted=$(fingerprint)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

uv=$(find_uv)
# The environment is named outright: one that is active in the caller's shell is not touched.
export UV_NO_PROGRESS=1 VIRTUAL_ENV=$PWD/$venv
unset UV_PROJECT_ENVIRONMENT UV_SYSTEM_PYTHON CONDA_PREFIX
if ! "$venv/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$python_version')" 2>/dev/null; then
  say "making $venv with Python $python_version"
  "$uv" venv --quiet --clear --python "$python_version" "$venv"
fi
rm -f "$stamp"
say "installing the locked packages (a first time takes about a minute and a half)"
# Without compiled modules the import of the engine's code takes 14 s instead of 6 s, each time where Python may not write
# them, once where it may.
"$uv" pip sync --compile-bytecode --quiet --python "$venv/bin/python" --require-hashes "$requirements"
say "installing kLLM itself"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
printf '%s\n' "$wanted" >"$stamp"
say "ready after $((SECONDS - started)) s"
