#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An installed tree is complete, and its unit, user and configuration fit the program: install.sh BUILD_DIRECTORY
set -euo pipefail

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
DESTDIR=$root cmake --install "$1" --prefix /usr >"$root/install.log"

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}

unit=$root/usr/lib/systemd/system/oscard.service
conf=$root/etc/oscard/oscard.conf
oscard=$root/usr/bin/oscard

for file in "$unit" "$conf" "$oscard" "$root"/usr/bin/oscarctl "$root"/usr/include/oscar/{oscar,error,geometry}.h \
    "$root"/usr/lib/{sysusers.d,tmpfiles.d}/oscard.conf "$root"/usr/share/doc/oscard/{README.md,CHANGELOG.md,LICENSE}; do
    [[ -f $file ]] || fail "${file#"$root"} is not installed"
done
[[ -n $(find "$root/usr" -name 'liboscar.so.*') ]] || fail 'liboscar is not installed'

read -r program arguments < <(sed -n 's/^ExecStart=//p' "$unit")
[[ $program == /usr/bin/oscard ]] || fail "the unit starts $program"
read -r -a flags <<<"${arguments//\/etc\//$root/etc/}"
"$oscard" --check-config "${flags[@]}" | grep -q '^socket = ' || fail "oscard does not accept $arguments with the sample configuration"

if ! command -v systemd-analyze >/dev/null; then
    echo 'SKIPPED: systemd is not here to check the unit'
    exit 77
fi
# systemd wants to find the program: it is at another place until the tree is really installed.
sed -i "s|^ExecStart=/usr/bin/oscard|ExecStart=$oscard|" "$unit"
complaints=$(systemd-analyze verify --man=no --recursive-errors=no "$unit" 2>&1) || fail "the unit: $complaints"
[[ -z $complaints ]] || fail "the unit: $complaints"

if ((EUID == 0)); then
    systemd-sysusers --root="$root" oscard.conf || fail 'sysusers.d/oscard.conf'
    grep -q '^oscard:' "$root/etc/passwd" || fail 'the user is not made'
    grep -q '^oscard-admin:.*:oscard$' "$root/etc/group" || fail 'the administrators have no group'
    systemd-tmpfiles --root="$root" --create oscard.conf || fail 'tmpfiles.d/oscard.conf'
    [[ -d $root/var/lib/oscard/calibrations ]] || fail 'no directory for calibrations'
fi
echo 'installed tree: ok'
