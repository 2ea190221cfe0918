# Sourced by the other scripts: `use_environment EXTRA` leaves `$python` set to an interpreter of the project's own
# environment, .venv, in which the project and that extra are installed. Makes the environment when it is missing or
# broken, installs when pyproject.toml has changed since the last time, and does nothing otherwise.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
say() { printf '%s\n' "$*" >&2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# A Python of version 3.12 or newer: $PYTHON, one on PATH, one of pyenv's, the default one.
find_python() {
  local candidate versions
  versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
  for candidate in "${PYTHON:-}" python3.12 "$versions"/3.12*/bin/python python3.13 python3.14 \
    "$versions"/3.13*/bin/python "$versions"/3.14*/bin/python python3 python; do
    if [ -n "$candidate" ] && is_new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

make_venv() {
  local base
  if base="$(find_python)" && "$base" -m venv --clear "$venv" >&2; then
    return
  fi
  if command -v uv >/dev/null 2>&1 && uv venv --clear --seed --python '>=3.12' "$venv" >&2; then
    return
  fi
  say "error: no usable Python of version 3.12 or newer was found (looked at \$PYTHON, PATH, pyenv and uv)."
  say "       Install one, with its venv module, or set PYTHON=/path/to/python3.12 and run this again."
  return 3
}

use_environment() {
  local extra="$1" wanted stamp
  python="$venv/bin/python"
  if ! is_new_enough "$python"; then
    say "making $venv"
    make_venv || exit 3
  fi
  # "dev" contains every other extra, and "test" all that programs need: their stamps stand for the others'.
  wanted="$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest(), sys.argv[2], sys.version.split()[0])' "$root/pyproject.toml" "$venv")"
  for stamp in "$extra" test dev; do
    if [ "$stamp:$extra" != test:dev ] && [ "$wanted" = "$(cat "$venv/.installed-$stamp" 2>/dev/null)" ]; then
      return
    fi
  done
  say "installing mirage-jax[$extra] into $venv (a minute or two the first time)"
  if ! "$python" -m pip install --quiet --disable-pip-version-check --no-input --editable "$root[$extra]" >&2; then
    say "error: the installation failed; the lines above say why. Nothing outside of $venv was changed."
    exit 3
  fi
  printf '%s\n' "$wanted" >"$venv/.installed-$extra"
}
