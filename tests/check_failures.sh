#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every test that FAILURES.md names exists. In a row's last column, a file in backquotes, then names in it. That a test which is defined
# also runs is the compiler's to see: it warns of functions that nobody uses.
set -eu
cd "$(dirname "$0")/.."
awk -F '|' '
    /^\| [0-9]/ {
        rows++
        names = 0
        n = split($4, part, "`")
        for (i = 2; i <= n; i += 2) {
            if (part[i] ~ /\.c$/) {
                file = part[i]
            } else {
                print file, part[i]
                names++
            }
        }
        if (names == 0)
            print "(none)", "row" $2
    }
    END { if (rows == 0) print "(none)", "rows" }
' tests/FAILURES.md | {
    missing=0
    while read -r file name; do
        if ! grep -qwF -e "$name" "$file" 2>/dev/null; then
            echo "tests/FAILURES.md: no $name in $file" >&2
            missing=1
        fi
    done
    exit "$missing"
}
