#!/bin/sh
# Installs the Chromium in which the viewer's page is tested, if this machine lacks it. Debian, as root.
set -eu

for name in chromium chromium-browser; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "can't install chromium: that needs apt-get and root" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium
