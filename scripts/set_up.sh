#!/usr/bin/env bash
# Make .venv (the package, the CPU engine, the tools) and prepare the embedded model. Called by the Makefile.
# The stamp .venv/.ready comes last, so a set-up that was cut short is begun again, not trusted.
set -euo pipefail

python=$1
needed_mib=4000

fail() {
    echo "set-up: $1" >&2
    exit 1
}

command -v "$python" >/dev/null ||
    fail "$python is not here; apt-get install python3 python3-venv, or name one: make ... PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old, 3.11 or newer is needed; name another: make ... PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments; apt-get install python3-venv"

if [ -e .venv/.ready ]; then # whole, but pyproject.toml has changed since
    rm .venv/.ready
else
    free_mib=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free_mib" -ge "$needed_mib" ] ||
        fail "$free_mib MiB are free in $PWD, $needed_mib MiB are needed (PyTorch alone takes 800); free some or clone elsewhere"
    rm -rf .venv
    echo "set-up: making .venv with $("$python" --version); this downloads some 700 MB once and takes a few minutes"
    "$python" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
fi
echo "set-up: installing rackserve and its tools, compiling the kernels"
.venv/bin/pip install --quiet --disable-pip-version-check --editable '.[engine,dev]'
.venv/bin/python -c 'from rackserve.kernels.cpu.library import found; print("set-up: native kernels:", found()[1])'
echo "set-up: preparing the embedded model (93 MB, once per machine)"
.venv/bin/python -m rackserve.model.embedded
touch .venv/.ready
