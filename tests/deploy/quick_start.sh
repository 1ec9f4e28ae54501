#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The README's quick start does what it says: quick_start.sh BUILD_DIRECTORY
set -euo pipefail

# shellcheck source=tests/deploy/daemon.sh
. "${BASH_SOURCE[0]%/*}/daemon.sh"

diff <(awk '/^```/ { inside = $0 == "```c"; next } inside' README.md) client/examples/worker.c ||
    fail 'the worker in the README is not client/examples/worker.c'

export XDG_RUNTIME_DIR=$directory
daemon_start

expect() {
    local wanted=$1 said
    shift
    said=$("$@" 2>&1) || fail "$* says: $said"
    [[ $said == *"$wanted"* ]] || fail "$* says \"$said\", not \"$wanted\""
}
worker=$build/client/examples/worker
expect '0 of 200 tokens were cached' "$worker"
# The worker is gone when its pages are still to be sealed.
stats_wait '"oscar_sequences":0,' '"oscar_sequences_ending":0,'
expect '192 of 200 tokens were cached' "$worker"
expect 'oscar' "$build/client/oscarctl" stats
expect '' "$build/client/oscarctl" flush
expect '0 of 200 tokens were cached' "$worker"
echo 'quick start: ok'
