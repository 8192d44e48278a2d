#!/bin/sh
# Makes tools/requirements-*.txt anew: every package by version and sha256, for all platforms.
# The resolver (uv) is installed into a folder of its own, as it is needed only here.
set -eu
cd "$(dirname "$0")/.."
if [ ! -x .trireme/uv/bin/uv ]; then
    "${PYTHON:-python3}" -m venv .trireme/uv
    .trireme/uv/bin/pip install --quiet uv
fi
lock() {
    name=$1
    shift
    .trireme/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
        "$@" "tools/requirements-$name.in" -o "tools/requirements-$name.txt"
}
lock onnxruntime --no-deps --no-annotate
lock models --no-deps --no-annotate
lock perf --no-deps --no-annotate
lock tests
