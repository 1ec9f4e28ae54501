#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The library exports what its map says and nothing else, and its headers suit every compiler: abi.sh LIBRARY
set -euo pipefail

library=$1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
includes=(-I "$root/client/include" -I "$root/proto/include")
strict=(-Wall -Wextra -Wpedantic -Werror -fsyntax-only)

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}

# What the map promises, what the headers declare, and what is there: three times the same list.
mapped=$(sed -n 's/^ *\(oscar_[a-z_]*\);$/\1/p' "$root/client/liboscar.map" | sort)
exported=$(nm -D --defined-only "$library" | sed -n 's/^[0-9a-f]* [TDBRVW] \([^@]*\)@@OSCAR_0\.1$/\1/p' | sort)
others=$(nm -D --defined-only "$library" | grep -v ' A OSCAR_0\.1$' | grep -v '@@OSCAR_0\.1$' || true)
declared=$({
    grep -h '^OSCAR_API' "$root/client/include/oscar/oscar.h"
    grep -h '^const char \*oscar_error' "$root/proto/include/oscar/error.h"
} | grep -o 'oscar_[a-z_]*(' | tr -d '(' | sort)
[[ $mapped == "$exported" ]] || fail "map and library differ: $(diff <(echo "$mapped") <(echo "$exported"))"
[[ $mapped == "$declared" ]] || fail "map and headers differ: $(diff <(echo "$mapped") <(echo "$declared"))"
[[ -z $others ]] || fail "exported besides: $others"
readelf -d "$library" | grep -q 'SONAME.*\[liboscar\.so\.0\]' || fail 'the SONAME is not liboscar.so.0'

for header in oscar/oscar.h oscar/error.h oscar/geometry.h; do
    for standard in c99 c11 c17; do
        echo "#include <$header>" | cc -x c -std=$standard "${strict[@]}" "${includes[@]}" -
    done
done
use='#include <oscar/oscar.h>
int use(void);
int use(void) {
    struct oscar_client_options options = OSCAR_INIT(struct oscar_client_options);
    struct oscar_client *client = 0;
    options.timeout_ms = 1;
    return oscar_client_open(&options, &client);
}'
echo "$use" | cc -x c -std=c99 "${strict[@]}" "${includes[@]}" -
if command -v c++ >/dev/null; then
    for standard in c++11 c++17 c++20; do
        echo "$use" | c++ -x c++ -std=$standard "${strict[@]}" "${includes[@]}" -
    done
else
    echo 'no C++ compiler here: the headers were tried as C only'
fi
echo 'abi: ok'
