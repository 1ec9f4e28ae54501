#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The README's quick start does what it says: quick_start.sh BUILD_DIRECTORY
set -euo pipefail

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
    sed 's/^/oscard: /' "$directory/log" >&2 || true
    exit 1
}

diff <(awk '/^```/ { inside = $0 == "```c"; next } inside' README.md) client/examples/worker.c ||
    fail 'the worker in the README is not client/examples/worker.c'

export XDG_RUNTIME_DIR=$directory
"$build/daemon/oscard" --runtime-dir "$directory/oscard" --budget 1G --backend host 2>"$directory/log" &
daemon=$!
for ((tries = 0; tries < 100; tries++)); do
    [[ -S $directory/oscard/worker.sock ]] && break
    kill -0 "$daemon" 2>/dev/null || fail 'oscard ended'
    sleep 0.1
done

expect() {
    local wanted=$1 said
    shift
    said=$("$@" 2>&1) || fail "$* says: $said"
    [[ $said == *"$wanted"* ]] || fail "$* says \"$said\", not \"$wanted\""
}
worker=$build/client/examples/worker
expect '0 of 200 tokens were cached' "$worker"
# The worker is gone when its pages are still to be sealed.
for ((tries = 0; tries < 100; tries++)); do
    stats=$("$build/client/oscarctl" stats --json)
    [[ $stats == *'"oscar_sequences":0,'* && $stats == *'"oscar_sequences_ending":0,'* ]] && break
    sleep 0.1
done
expect '192 of 200 tokens were cached' "$worker"
expect 'oscar' "$build/client/oscarctl" stats
expect '' "$build/client/oscarctl" flush
expect '0 of 200 tokens were cached' "$worker"
echo 'quick start: ok'
