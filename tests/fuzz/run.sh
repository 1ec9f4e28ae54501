#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh BUILD_DIR SECONDS [TARGET ...]: runs the fuzz targets (default: all), two at a time, and prints one line each. New inputs are
# kept in BUILD_DIR/corpus, logs in BUILD_DIR/logs, what makes a target fail in BUILD_DIR/findings. Fails when there is such an input.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")

# target; longest input in bytes; dictionary
targets=(
    'fuzz_request;4096;'
    'fuzz_reply;16384;'
    'fuzz_admin;16384;'
    'fuzz_record;512;'
    'fuzz_safetensors;4096;tensors.dict'
    'fuzz_calibration;20000;tensors.dict'
    'fuzz_pickle;4096;pickle.dict'
    'fuzz_torch;8192;pickle.dict'
    'fuzz_config;2048;config.dict'
    'fuzz_store;384;'
)
at_once=2

build=$1
seconds=$2
shift 2

# fuzz NAME MAX_LEN DICTIONARY: one target, and its line.
fuzz() {
    local name=$1 log=$build/logs/$1.log status=0 executions coverage finding
    local -a dictionary=()
    if [[ -n $3 ]]; then
        dictionary=("-dict=$here/$3")
    fi
    mkdir -p "$build/corpus/$name"
    "$build/tests/fuzz/$name" -max_total_time="$seconds" -timeout=30 -rss_limit_mb=2048 -max_len="$2" "${dictionary[@]}" \
        -print_final_stats=1 -artifact_prefix="$build/findings/$name-" "$build/corpus/$name" "$here/corpus/$name" \
        >"$log" 2>&1 || status=$?
    executions=$(awk '/^stat::number_of_executed_units:/ { print $2 }' "$log")
    coverage=$(grep -oE ' cov: [0-9]+' "$log" | tail -n 1 | tr -dc '0-9') || true
    if ((status == 0)); then
        finding='no finding'
    else
        finding=$(sed -n 's/.*Test unit written to /FINDING: /p' "$log" | tail -n 1)
        finding=${finding:-FAILED, exit status $status, see $log}
    fi
    printf '%-17s %9s executions, coverage %5s edges, %s\n' "$name" "${executions:-?}" "${coverage:-?}" "$finding"
    return "$status"
}

wanted() {
    local name=$1 one
    shift
    for one in "$@"; do
        if [[ $name == "$one" || $name == "fuzz_$one" ]]; then
            return 0
        fi
    done
    return 1
}

mkdir -p "$build/logs" "$build/findings"
status=0
started=0
running=0
for row in "${targets[@]}"; do
    IFS=';' read -r name max_len dictionary <<<"$row"
    if (($# > 0)) && ! wanted "$name" "$@"; then
        continue
    fi
    if ((running == at_once)); then
        wait -n || status=1
        running=$((running - 1))
    fi
    fuzz "$name" "$max_len" "$dictionary" &
    started=$((started + 1))
    running=$((running + 1))
done
while ((running > 0)); do
    wait -n || status=1
    running=$((running - 1))
done
if ((started == 0)); then
    printf 'no fuzz target %s; there are:' "$*" >&2
    printf ' %s' "${targets[@]%%;*}" >&2
    printf '\n' >&2
    status=2
fi
exit "$status"
