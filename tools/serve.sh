#!/bin/sh
# Serves the example models with the binary that was just built; further arguments go to the server.
set -eu
cd "$(dirname "$0")/.."
: "${TRIREME_ONNXRUNTIME:=$PWD/.trireme/onnxruntime/libonnxruntime.so}"
export TRIREME_ONNXRUNTIME

# Waits in the background until the server is ready, so that the hint stands below the table of models, where
# a person looks; ends with the server.
hint() {
    server=$1
    while kill -0 "$server" 2>/dev/null; do
        if curl --silent --fail --output /dev/null http://localhost:8000/v2/health/ready; then
            cat <<'END'

Serving examples/repository: HTTP on 8000, gRPC on 8001, metrics on 8002. Ctrl-C stops it.
Ask what kind of file tests/data/program.txt is:

  curl -s localhost:8000/v2/models/file_type/infer -d @examples/requests/file_type.json

More clients, with pictures, text and sound: examples/README.md
END
            return
        fi
        sleep 0.1
    done
}
case " $* " in *" --http-port"* | *" --allow-http"*) ;; *) hint $$ & ;; esac
exec target/release/trireme serve --model-repository examples/repository "$@"
