#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The code in docs/CLIENT.md is that of client/examples, line by line, and the engine does what the manual says: manual.sh BUILD_DIRECTORY
set -euo pipefail

# shellcheck source=tests/deploy/daemon.sh
. "${BASH_SOURCE[0]%/*}/daemon.sh"

# Each block of C must be lines that follow each other in one of the examples, whatever their indentation.
awk '
    { sub(/^[ \t]+/, "") }
    FILENAME != manual { source[FILENAME] = source[FILENAME] "\n" $0; next }
    /^```/ {
        if (inside) {
            for (name in source)
                found = found || index(source[name] "\n", block "\n") > 0
            if (!found) {
                print "FAILED: no example has these lines:" block > "/dev/stderr"
                status = 1
            }
            blocks++
        }
        inside = $0 == "```c"
        block = ""
        found = 0
        next
    }
    inside { block = block "\n" $0 }
    END { exit status || blocks < 10 }
' manual=docs/CLIENT.md client/examples/*.c docs/CLIENT.md || fail 'docs/CLIENT.md and client/examples differ'

export OSCAR_SOCKET=$directory/oscard/worker.sock
daemon_start

expect() {
    local wanted=$1 said
    said=$("$build/client/examples/engine" 2>&1) || fail "the engine says: $said"
    [[ $said == "$wanted"*' of them read as INT2' ]] || fail "the engine says \"$said\", not \"$wanted\""
}
expect $'0 of 500 tokens were cached\n448 of 500 tokens were cached\n571 tokens, '
# The engine is gone when its pages are still to be sealed and packed.
stats_wait '"oscar_sequences":0,' '"oscar_sequences_ending":0,' '"oscar_pages{form=\"dense\"}":0,'
expect $'192 of 500 tokens were cached\n192 of 500 tokens were cached\n571 tokens, '
echo 'manual: ok'
