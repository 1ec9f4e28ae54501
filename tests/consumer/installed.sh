#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The installed library serves a program of somebody else, by pkg-config and by CMake: installed.sh BUILD_DIRECTORY
set -euo pipefail

build=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}

# Without a daemon it must say so, with the cause and the remedy.
expect_not_running() {
    local said
    if said=$(OSCAR_SOCKET=$directory/none.sock LD_LIBRARY_PATH=$library "$1"); then
        fail "$1 found a daemon where there is none"
    fi
    [[ $said == NOT_RUNNING:*"$directory/none.sock"*remedy:*"start oscard"* ]] || fail "$1 says: $said"
}

for way in destdir prefix; do
    case $way in
    destdir) DESTDIR=$directory/$way cmake --install "$build" --component oscar >/dev/null ;;
    prefix) cmake --install "$build" --component oscar --prefix "$directory/$way" >/dev/null ;;
    esac
    package=$(find "$directory/$way" -name oscar.pc)
    library=$(dirname "$(dirname "$package")")
    prefix=$(cd "$(dirname "$(find "$directory/$way" -path '*/include/oscar' -type d)")/.." && pwd)
    [[ -n $package && $(readlink "$library/liboscar.so.0") == liboscar.so.* ]] || fail "$way: the library is not complete"

    read -ra flags <<<"$(PKG_CONFIG_PATH=$(dirname "$package") pkg-config --cflags --libs oscar)"
    cc -std=c11 -Wall -Wextra -Werror -o "$directory/$way-program" "$here/consumer.c" "${flags[@]}"
    expect_not_running "$directory/$way-program"

    cmake -S "$here" -B "$directory/$way-build" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
    cmake --build "$directory/$way-build" >/dev/null
    expect_not_running "$directory/$way-build/consumer"
done
echo 'installed library: ok'
