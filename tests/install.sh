#!/bin/sh
# Installs what a suite needs and this machine lacks:  install.sh COMMAND:PACKAGE ...
# Debian and Ubuntu, as root; no service is started.
set -eu

missing=
for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || [ -x "/usr/sbin/${pair%%:*}" ] || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "can't install$missing: that needs apt-get and root" >&2
    exit 1
fi
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
wait_s=300  # another suite may be installing
apt-get -o "DPkg::Lock::Timeout=$wait_s" update -qq
# shellcheck disable=SC2086
apt-get -o "DPkg::Lock::Timeout=$wait_s" install -y -qq --no-install-recommends $missing
