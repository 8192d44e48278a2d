#!/bin/sh
# Runs redis-server for the tests of the Redis cache, installing it into .trireme/redis first.
#
#   tools/redis_server.sh --port 6379 --bind 127.0.0.1 --save ''
#
# One that is in PATH is used as it is. Otherwise the packages of this Debian are unpacked, without root; apt checks
# their signatures. Exit status 77: it cannot be installed here, with the reason on stderr.
set -eu
cd "$(dirname "$0")/.."
home=$PWD/.trireme/redis

cannot() {
    echo "redis-server cannot be installed here: $*" >&2
    exit 77
}

install_packages() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || cannot "there is neither redis-server nor apt"
    work=$home/apt
    rm -rf "$work" "$home/root.partial"
    mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/debs" "$home/root.partial"
    set -- -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/archives" -o Acquire::Languages=none \
        -o APT::Sandbox::User=root -o Debug::NoLocking=1
    apt-get "$@" -qq update >"$work/log" 2>&1 || cannot "apt-get update failed, see $work/log"
    # The program is in redis-tools, together with what it is linked with beyond the C library.
    libraries=$(apt-cache "$@" depends redis-tools | sed -n 's/^ *Depends: \(lib[^ ]*\)$/\1/p' | grep -v '^libc6$')
    # shellcheck disable=SC2086 # one word a package
    (cd "$work/debs" && apt-get "$@" -qq download redis-tools redis-server $libraries) >>"$work/log" 2>&1 ||
        cannot "the packages could not be downloaded, see $work/log"
    for package in "$work"/debs/*.deb; do
        dpkg-deb -x "$package" "$home/root.partial"
    done
    mv "$home/root.partial" "$home/root"
    rm -rf "$work"
}

if command -v redis-server >/dev/null; then
    exec redis-server "$@"
fi
[ -d "$home/root" ] || install_packages
program=$home/root/usr/bin/redis-server
[ -x "$program" ] || cannot "the packages hold no $program"
libraries=$(find "$home/root" -name 'lib*.so.*' -exec dirname {} + | sort -u | paste -sd:)
LD_LIBRARY_PATH=$libraries exec "$program" "$@"
