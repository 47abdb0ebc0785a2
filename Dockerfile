# AReaLite on a CPU, where there is no Linux; results, and models of the hub, go to the folder that is mounted:
#
#     docker build -t arealite .
#     docker run --rm -it --init -v "$PWD:/work" arealite quickstart
#
# `--build-arg TORCH_INDEX=` takes torch from the default index, as where PyTorch's can't be reached.
FROM python:3.11-slim
ENV HF_HOME=/work/.huggingface
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# bubblewrap runs programs that a model wrote: docs/security.md says which options of `docker run` it needs.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap libseccomp2 && rm -rf /var/lib/apt/lists/*
COPY . /arealite
RUN pip install --no-cache-dir -c /arealite/constraints-cpu.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir -c /arealite/constraints-cpu.txt "/arealite[lora,agents]" pytest
WORKDIR /work
ENTRYPOINT ["arealite"]
CMD ["--help"]
