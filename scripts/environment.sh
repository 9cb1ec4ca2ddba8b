# Sourced by scripts/test and scripts/demo: a virtual environment with this checkout installed.
#
#   root=...; . "$root/scripts/environment.sh"
#   environment dev          makes $root/.venv if there is none, installs the extra `dev` if it is not; sets $python

environment() {
    local extra=$1 stamp
    python=$root/.venv/bin/python
    stamp=$root/.venv/installed-$extra
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "cupy_flash needs Python 3.10 or newer")'
        echo "making a virtual environment in .venv" >&2
        python3 -m venv "$root/.venv"
    fi
    # The stamp is the pyproject.toml that was installed: a change in it installs again.
    if ! cmp -s "$root/pyproject.toml" "$stamp"; then
        echo "installing cupy_flash[$extra] into .venv" >&2
        # why no bytecode: pip makes that of every file, and a program that of what it imports.
        "$python" -m pip install --quiet --disable-pip-version-check --no-compile --editable "$root[$extra]"
        cp "$root/pyproject.toml" "$stamp"
    fi
}
