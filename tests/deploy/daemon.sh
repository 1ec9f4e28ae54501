# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the tests of what the documents say, with a BUILD_DIRECTORY: a daemon in a directory of its own, both gone at the end.

build=$1
directory=$(mktemp -d)
daemon=
cleanup() {
    if [[ -n $daemon ]]; then
        kill "$daemon" 2>/dev/null || true
        wait "$daemon" || true
    fi
    rm -rf "$directory"
}
trap cleanup EXIT

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    sed 's/^/oscard: /' "$directory/log" >&2 2>/dev/null || true
    exit 1
}

daemon_start() {
    "$build/daemon/oscard" --runtime-dir "$directory/oscard" --budget 1G --backend host 2>"$directory/log" &
    daemon=$!
    for ((tries = 0; tries < 100; tries++)); do
        [[ -S $directory/oscard/worker.sock ]] && break
        kill -0 "$daemon" 2>/dev/null || fail 'oscard ended'
        sleep 0.1
    done
}

# stats_wait TEXT...: until the statistics hold all of this.
stats_wait() {
    local stats text held
    for ((tries = 0; tries < 100; tries++)); do
        stats=$("$build/client/oscarctl" --runtime-dir "$directory/oscard" stats --json)
        held=true
        for text in "$@"; do
            [[ $stats == *"$text"* ]] || held=false
        done
        [[ $held == true ]] && break
        sleep 0.1
    done
}
