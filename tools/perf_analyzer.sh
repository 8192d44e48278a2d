#!/bin/sh
# Runs perf_analyzer, the load generator of the Triton project, installing it into .trireme/perf first.
#
#   tools/perf_analyzer.sh -m file_type -i grpc -u localhost:8001 --concurrency-range 1:4
#
# The published program needs glibc 2.38. On an older Debian (12 has 2.36) it is run with the loader and the
# libraries of Debian 13, which are unpacked beside it, without root; apt checks their signatures. Exit status 77:
# it cannot be installed here, with the reason on stderr.
set -eu
cd "$(dirname "$0")/.."
home=$PWD/.trireme/perf

cannot() {
    echo "perf_analyzer cannot be installed here: $*" >&2
    exit 77
}

install_program() {
    "${PYTHON:-python3}" - <<'END' || cannot "its package could not be downloaded, see above"
import sys
sys.path.insert(0, "tools")
import wheels
found = wheels.download(
    wheels.TOOLS / "requirements-perf.txt", wheels.HOME / "wheels" / "perf",
    "--python-version=3.12", "--platform=manylinux_2_38_x86_64",
)
target = wheels.HOME / "perf" / "perf_analyzer"
wheels.extract(found, "perf-analyzer", "perf_analyzer/bin/perf_analyzer", target)
target.chmod(0o755)
found[0].unlink()
END
}

install_libraries() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
        cannot "glibc here is older than 2.38, and without apt the libraries of Debian 13 cannot be had"
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r "$keys" ] || cannot "the keys of Debian's archive are not at $keys"
    # The package source of this machine, whatever it is, carries the newer release too.
    archive=$(apt-get indextargets --format '$(REPO_URI)' 'Label: Debian' 2>/dev/null | grep -v security | head -1)
    [ -n "$archive" ] || cannot "apt has no source of Debian packages"
    work=$home/apt
    rm -rf "$work" "$home/root.partial"
    mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$home/root.partial"
    echo "deb [signed-by=$keys] $archive trixie main" >"$work/sources.list"
    set -- -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- \
        -o "Dir::State=$work/state" -o "Dir::State::lists=$work/state/lists" -o Dir::State::status=/dev/null \
        -o "Dir::Cache=$work/cache" -o Acquire::Languages=none -o APT::Sandbox::User=root \
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
    apt-get "$@" -qq update >"$work/log" 2>&1 || cannot "apt-get update for Debian 13 failed, see $work/log"
    (cd "$work" && apt-get "$@" -qq download libc6 libstdc++6 libgcc-s1 zlib1g libssl3t64 libzstd1) >>"$work/log" 2>&1 ||
        cannot "the libraries of Debian 13 could not be downloaded, see $work/log"
    for package in "$work"/*.deb; do
        dpkg-deb -x "$package" "$home/root.partial"
    done
    mv "$home/root.partial" "$home/root"
    rm -rf "$work"
}

[ "$(uname -m)" = x86_64 ] || cannot "it is published for x86_64 only, this is $(uname -m)"
[ -x "$home/perf_analyzer" ] || install_program
newest=$(printf '%s\n2.38\n' "$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)" | sort -V | tail -1)
if [ "$newest" != 2.38 ] && ldd "$home/perf_analyzer" >/dev/null 2>&1; then
    exec "$home/perf_analyzer" "$@"
fi
[ -d "$home/root" ] || install_libraries
libraries=$home/root/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$home/perf_analyzer" "$@"
