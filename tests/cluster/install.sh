#!/bin/sh
# Installs what the suites on clusters need and this machine lacks: Slurm and network namespaces' tools.
# Debian and Ubuntu, as root; no service is started.
set -eu

missing=
for pair in slurmctld:slurm-wlm munged:munge ip:iproute2 iptables:iptables; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || [ -x "/usr/sbin/${pair%%:*}" ] || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "can't install$missing: that needs apt-get and root" >&2
    exit 1
fi
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing
