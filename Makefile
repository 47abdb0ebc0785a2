# Each target creates what it needs. PYTHON is any Python >= 3.11.
# TORCH_INDEX is the package index of torch: without an NVIDIA GPU that of its CPU build (200 MB; the default index serves
# CUDA's, 3 GB), if it can be reached. Empty is the default index. CONSTRAINTS= (empty) lets pip choose torch.
PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints-cpu.txt
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
ARGS        ?=
VLLM_VENV   ?= $(VENV)-vllm
ECOSYSTEM_VENV ?= $(VENV)-ecosystem
ECOSYSTEM = verifiers==0.4.0+uv==0.13.9
OPENENV_VENV ?= $(VENV)-openenv
OPENENV = openenv==0.10.0
# The cookbook without tml-renderers, which it imports for audio alone and which not every index has.
TINKER_VENV ?= $(VENV)-tinker
TINKER = tinker==0.38.0+aiohttp+blobfile+chz+cloudpickle+datasets+math-verify+pillow+pylatexenc+pyrage+rich+termcolor+tiktoken+torch+transformers
COOKBOOK = tinker-cookbook==0.6.1
SGLANG_VENV ?= $(VENV)-sglang
# Bytecode is written as modules are imported: a run imports a fifth of what pip would compile, for a minute or two.
PIP          = $(VENV)/bin/python -m pip install --no-compile --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

# Bytecode is kept, also where the environment forbids it: a run of the tests imports the package a hundred times.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install quickstart test test-gpu test-explore test-quickstart test-recovery test-soak test-examples test-install test-benchmarks test-speed test-secret install-servers test-servers test-vllm test-sglang install-cluster test-hosts test-elastic test-simulate test-parallel test-hostile test-agents test-ecosystem test-options test-sandbox test-view pictures test-mistakes test-core test-core-faults test-ray test-ray-faults test-slurm chaos benchmark benchmark-runtime benchmark-burst benchmark-scale benchmark-core benchmark-agents benchmark-algorithms benchmark-data benchmark-logprobs benchmark-async benchmark-step benchmark-original benchmark-packing benchmark-busy benchmark-parallel benchmark-weights benchmark-memory benchmark-gpu simulate-validate lint format docs clean

help:            ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 26
	@echo "  ARGS=... is passed on, e.g. make quickstart ARGS='seed=2'"

install: $(VENV)/.installed            ## create .venv and install AReaLite (CPU build of torch)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing AReaLite into $(VENV): a download of about $(if $(TORCH_INDEX),500 MB,3 GB)"
	@$(if $(TORCH_INDEX),$(PIP) --retries 0 --timeout 10 --index-url $(TORCH_INDEX) torch || \
		echo "$(TORCH_INDEX) can't be reached: torch comes from the default index",true)
	$(PIP) -e .
	@$(VENV)/bin/python -c 'import arealite.engine.fsdp_engine, arealite.server.app, datasets'  # once, not in each process
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and linters need"
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what builds the docs"
	$(PIP) -e '.[docs]'
	@touch $@

quickstart: install            ## train a tiny model by asynchronous GRPO, in minutes, on a CPU
	$(VENV)/bin/arealite quickstart $(ARGS)

test: $(VENV)/.installed-dev            ## run the test suite (CPU, no network, 10 to 13 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 5 --dist loadgroup -m "not slow and not gpu and not multi_gpu" $(ARGS)

test-gpu: $(VENV)/.installed-dev            ## run the tests that need one or two CUDA devices; others are skipped (set CONSTRAINTS= for CUDA's torch)
	$(VENV)/bin/python -m pytest -m "gpu or multi_gpu" $(ARGS)

test-explore: $(VENV)/.installed-dev            ## run the property-based tests on new random examples, 20 times as many (15 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 -m hypothesis --hypothesis-profile explore $(ARGS)

test-quickstart: $(VENV)/.installed-dev            ## run the quickstart on three seeds and a control (10 minutes)
	$(VENV)/bin/python -m pytest -rP -m slow tests/test_quickstart.py $(ARGS)

test-recovery: $(VENV)/.installed-dev            ## resume killed and stopped runs, and runs without disk space or memory, bit-identically; diagnose stalls (10 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m slow tests/test_recovered_runs.py tests/trainer/test_recover.py tests/launcher/test_stalls.py tests/utils/test_distributed.py $(ARGS)

test-soak: $(VENV)/.installed-dev            ## train for 2,000 steps with the server in the trainer's process and beside it: memory and descriptors are constant (12 minutes; ARGS=--short: 6)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -rP -m slow tests/test_soak.py $(ARGS)

test-examples: $(VENV)/.installed-dev            ## run the commands of the docs and every example script, on tiny models (12 minutes)
	sh tests/install.sh bwrap:bubblewrap
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m slow tests/test_docs.py tests/test_typed_blocks.py tests/test_end_to_end.py tests/trainer/test_bounds.py tests/launcher/supervise/test_preflight.py tests/examples $(ARGS)

test-install: $(VENV)/.installed-dev            ## install the wheel outside a checkout, and train the folders of arealite init (3 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m slow tests/test_packaging.py tests/cli/test_init.py $(ARGS)

test-benchmarks: $(VENV)/.installed-dev            ## run every benchmark except algorithms.py briefly, to check its numbers, not its speed (8 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m slow tests/test_benchmarks.py $(ARGS)

WRAPPERS = $(VENV)/bin/python -m pytest -q
SERVERS = PYTHONPATH=tests $(VENV)/bin/python -m servers

test-speed: $(VENV)/.installed-dev            ## compare the CPU time of packing, episodes and weight updates with that of plain code (1 minute)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/gate.py $(ARGS)

test-secret: $(VENV)/.installed-dev            ## search logs, files, environments and command lines of a failing run for its secret (1 minute)
	$(VENV)/bin/python -m pytest -m slow tests/test_secret_of_runs.py $(ARGS)

install-servers:            ## install vLLM and SGLang for CPUs, each in its own environment (3 minutes)
	sh tests/servers/install_vllm.sh $(VLLM_VENV)
	sh tests/servers/install_sglang.sh $(SGLANG_VENV)

test-servers: $(VENV)/.installed            ## test lite, vLLM and SGLang by one suite on a CPU (5 minutes once installed)
	sh tests/servers/install_vllm.sh $(VLLM_VENV)
	@if sh tests/servers/install_sglang.sh $(SGLANG_VENV); then \
		$(SERVERS) conformance --vllm $(VLLM_VENV)/bin/python --sglang $(SGLANG_VENV)/bin/python $(ARGS); \
	else \
		$(SERVERS) conformance --vllm $(VLLM_VENV)/bin/python --skipped "SGLang, which can't be installed here" $(ARGS); \
	fi

test-vllm: $(VENV)/.installed-dev            ## train with a real vLLM on a CPU (5 minutes once installed)
	sh tests/servers/install_vllm.sh $(VLLM_VENV)
	AREALITE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(WRAPPERS) tests/launcher/serve/test_vllm_server.py $(ARGS)
	$(SERVERS) train --server vllm --python $(VLLM_VENV)/bin/python $(ARGS)

test-sglang: $(VENV)/.installed-dev            ## train with a real SGLang on a CPU, also on images (8 minutes); skipped with a message if it can't be installed
	@if sh tests/servers/install_sglang.sh $(SGLANG_VENV); then \
		AREALITE_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(WRAPPERS) tests/launcher/serve/test_sglang_server.py $(ARGS) && \
		$(if $(filter --short,$(ARGS)),true,$(SERVERS) images --server sglang --python $(SGLANG_VENV)/bin/python) && \
		$(SERVERS) train --server sglang --python $(SGLANG_VENV)/bin/python $(ARGS); \
	else \
		echo "SKIPPED: SGLang can't be installed here, see above"; \
		echo 'RESULT {"skipped": "SGLang can not be installed here"}'; \
	fi

test-core: $(VENV)/.installed-dev            ## compare Core's numbers with scripts of ranks, on a real Ray; ends with RESULT {json} (4 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist loadgroup -m slow tests/core --ignore-glob='*/test_faults.py' --ignore-glob='*/test_group.py' $(ARGS)

test-core-faults: $(VENV)/.installed-dev            ## kill workers, a node and a master of Core: equal numbers, no process left (8 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist loadgroup tests/core/test_faults.py tests/core/test_group.py $(ARGS)

test-ray: $(VENV)/.installed-dev            ## train on a real Ray cluster of four nodes and kill two of them (3 minutes)
	PYTHONPATH=tests $(VENV)/bin/python -m cluster.on_ray

test-ray-faults: $(VENV)/.installed-dev            ## kill each process of a job on Ray: no process may remain (3 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -m slow tests/launcher/place/test_ray.py $(ARGS)

install-cluster: $(VENV)/.installed-dev            ## install the dependencies of cluster tests: Slurm, iptables (Debian, root)
	sh tests/install.sh slurmctld:slurm-wlm munged:munge ip:iproute2 iptables:iptables

test-slurm: $(VENV)/.installed            ## train on a real Slurm cluster of four nodes and kill one (3 minutes; skipped without root and Slurm)
	PYTHONPATH=tests $(VENV)/bin/python -m cluster.on_slurm

test-hosts: $(VENV)/.installed            ## train by torchrun over hosts with network failures (4 minutes; skipped without root and iptables)
	PYTHONPATH=tests $(VENV)/bin/python -m cluster.hosts

test-simulate: $(VENV)/.installed-dev            ## simulate large clusters whose servers die, hang and slow down, in virtual time, and calibrate this machine (3 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 -m slow tests/simulate tests/planner tests/cli/test_calibrate.py $(ARGS)

test-parallel: $(VENV)/.installed-dev            ## train models over tensor, context, expert and pipeline ranks: the numbers of one rank (8 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist loadgroup -m slow tests/engine/parallel tests/test_parallel_runs.py $(ARGS)

test-elastic: $(VENV)/.installed            ## servers join, leave and die during a run (2 minutes)
	PYTHONPATH=tests $(VENV)/bin/python -m cluster.elastic

test-hostile: $(VENV)/.installed-dev            ## send junk to servers, the Tinker API, client, files, workflows, rewards, agents, tools and environments (7 minutes; ARGS=--short: 2.5)
	PYTHONPATH=tests $(VENV)/bin/python -m hostile $(ARGS)

test-agents: $(VENV)/.installed-dev            ## train agents on OpenAI's and Anthropic's packages, and a command, token-exactly, on every chat template (4 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -m slow tests/agent
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(VENV)/bin/python -m trained_agents $(ARGS)

# $(call venv,FOLDER,PACKAGES+...,OPTIONS,FIRST ||): an environment of its own, kept until the packages change.
venv = [ -e '$(1)/installed-$(2)' ] || { rm -rf $(1) && $(PYTHON) -m venv $(1) && { $(4) true; } && \
	$(1)/bin/python -m pip install -q $(3) $(subst +, ,$(2)) && touch '$(1)/installed-$(2)'; }
CONSTRAINED = $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

test-ecosystem: $(VENV)/.installed-dev            ## run what people have: environments of verifiers and OpenEnv, all tasks of reasoning-gym, recipes of the Tinker cookbook (4 minutes; installs each)
	@$(call venv,$(ECOSYSTEM_VENV),$(ECOSYSTEM))
	@$(call venv,$(OPENENV_VENV),$(OPENENV))
	@$(call venv,$(TINKER_VENV),$(TINKER),$(CONSTRAINED),$(if $(TORCH_INDEX),$(TINKER_VENV)/bin/python -m pip install -q \
		$(CONSTRAINED) --retries 0 --timeout 10 --index-url $(TORCH_INDEX) torch ||))
	@$(TINKER_VENV)/bin/python -m pip install -q --no-deps $(COOKBOOK)
	@tests=tests/ecosystem/test_verifiers.py; $(ECOSYSTEM_VENV)/bin/uv -q run --no-project --no-config --with httpx python -c 'import httpx' || \
		{ tests=; echo "SKIPPED: environments of verifiers, as uv, by which it starts agents, reaches no index"; }; \
	OMP_NUM_THREADS=1 VERIFIERS_PYTHON=$(abspath $(ECOSYSTEM_VENV))/bin/python OPENENV_PYTHON=$(abspath $(OPENENV_VENV))/bin/python \
		TINKER_PYTHON=$(abspath $(TINKER_VENV))/bin/python $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile -m slow $$tests \
		tests/ecosystem/test_openenv.py tests/ecosystem/test_tinker.py tests/reward/test_gym_reward.py $(ARGS)

test-options: $(VENV)/.installed-dev            ## compile a model (a minute)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -m slow tests/engine/test_options.py $(ARGS)

test-sandbox: $(VENV)/.installed-dev            ## attack the sandbox for programs of models (a minute; installs bubblewrap)
	sh tests/install.sh bwrap:bubblewrap
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/reward/test_sandbox.py tests/reward/test_escapes.py $(ARGS)

test-view: $(VENV)/.installed-dev            ## test the viewer's page in a real Chromium (a minute; installs chromium, and playwright in a separate folder)
	@command -v chromium-browser > /dev/null || sh tests/install.sh chromium:chromium
	$(PIP) --quiet --upgrade --target $(VENV)-playwright playwright
	PYTHONPATH=$(VENV)-playwright $(VENV)/bin/python -m pytest -q -m slow tests/viewer $(ARGS)

pictures: $(VENV)/.installed            ## train the quickstart and take the pictures of the README from it (5 minutes; installs chromium and playwright as test-view)
	@command -v chromium > /dev/null || sh tests/install.sh chromium:chromium
	$(PIP) --quiet --upgrade --target $(VENV)-playwright playwright
	rm -rf runs/pictures
	$(VENV)/bin/arealite quickstart cluster.fileroot=runs/pictures trial_name=run evaluator.freq_steps=2
	PYTHONPATH=.:$(VENV)-playwright $(VENV)/bin/python docs/generate/pictures.py runs/pictures/quickstart/run

test-mistakes: $(VENV)/.installed            ## make typical user mistakes and compare the errors with golden.txt (3 minutes)
	PYTHONPATH=tests $(VENV)/bin/python -m mistakes $(ARGS)

chaos: $(VENV)/.installed            ## kill processes of runs at random, break servers and agents, then audit (20 minutes; ARGS=--short: 3)
	PYTHONPATH=tests $(VENV)/bin/python -m chaos $(ARGS)

benchmark: $(VENV)/.installed            ## compare the embedded server with transformers, and with vLLM by ARGS="--vllm PYTHON" (a few minutes)
	$(VENV)/bin/python benchmarks/engine.py $(ARGS)

benchmark-runtime: $(VENV)/.installed            ## measure the overhead of the rollout runtime (a minute)
	$(VENV)/bin/python benchmarks/runtime_overhead.py $(ARGS)

benchmark-burst: $(VENV)/.installed            ## measure the client when long replies come all at once, and when servers return one by one (a minute)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/reply_burst.py $(ARGS)

benchmark-scale: $(VENV)/.installed            ## simulate up to 512 GPUs, bounds, and what the client's CPU time costs there, and plot benchmarks/results/scale.svg (15 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/scale.py --out benchmarks/results/scale.jsonl --plot benchmarks/results/scale.svg $(ARGS)

benchmark-core: $(VENV)/.installed-dev            ## measure the overhead of a master and its workers, with 64 idle processes (10 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/core.py $(ARGS)

benchmark-agents: $(VENV)/.installed-dev            ## measure the cost of an agent's turn, with a thousand concurrent runs (3 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/agents.py $(ARGS)

benchmark-async: $(VENV)/.installed            ## compare asynchronous with synchronous training, also with tools that take 200 ms (5 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/async_vs_sync.py $(ARGS)

simulate-validate: $(VENV)/.installed            ## measure how far off predictions of arealite simulate are, on a quiet machine (18 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/simulate_validate.py $(ARGS)

benchmark-weights: $(VENV)/.installed            ## measure weight updates, and how long they pause generation (2 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/weight_sync.py $(ARGS)

benchmark-step: $(VENV)/.installed            ## compare a step of GRPO with TRL's, which the first run installs (10 minutes; ARGS=--curve: learning curves)
	$(VENV)/bin/python benchmarks/grpo_step.py $(ARGS)

benchmark-original: $(VENV)/.installed            ## compare our rollout runtime and packing with those of AReaL 1.0, which the first run installs (3 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/original.py $(ARGS)

benchmark-packing: $(VENV)/.installed            ## measure the positions left unused by packing and distributing rows (half a minute)
	$(VENV)/bin/python benchmarks/packing.py $(ARGS)

benchmark-busy: $(VENV)/.installed            ## measure a step beside busy programs, and as OpenMP waits by itself (10 minutes)
	$(VENV)/bin/python benchmarks/busy.py $(ARGS)

benchmark-parallel: $(VENV)/.installed            ## measure what dividing a model over 4 ranks costs: tokens/s, collectives, padding (20 minutes)
	$(VENV)/bin/python benchmarks/parallel.py $(ARGS)

benchmark-algorithms: $(VENV)/.installed            ## train with every algorithm, 3 seeds and 3 staleness bounds; continues an interrupted series (2 hours)
	$(VENV)/bin/python benchmarks/algorithms.py $(ARGS)

benchmark-data: $(VENV)/.installed            ## measure memory and time of a data set on two ranks, cold and warm (a minute; ARGS="--rows 1000000": half an hour)
	$(VENV)/bin/python benchmarks/data.py $(ARGS)

benchmark-logprobs: $(VENV)/.installed            ## measure memory and time of a policy's loss at a large vocabulary (10 minutes)
	$(VENV)/bin/python benchmarks/logprob_memory.py $(ARGS)

benchmark-memory: $(VENV)/.installed-dev            ## measure the memory of a training step, term by term, against the plan (3 minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/memory.py $(ARGS)

benchmark-gpu: $(VENV)/.installed            ## measure trainer and decoding beside transformers, GRPO and memory on one GPU (4 minutes; set CONSTRAINTS= for CUDA's torch)
	PYTHON=$(VENV)/bin/python sh benchmarks/gpu.sh $(ARGS)

lint: $(VENV)/.installed-dev            ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.installed-dev            ## format and fix with ruff
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.installed-docs            ## build docs/ as a site in site/, with a reference generated from the code (a minute)
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(VENV)/bin/mkdocs build --strict $(ARGS)
	@echo "site/index.html is the first page; its search needs a server: python3 -m http.server --bind 127.0.0.1 --directory site"

clean:            ## remove .venv, those of vLLM, SGLang and playwright, the site, and caches
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-sglang $(VENV)-playwright .mypy_cache .ruff_cache .pytest_cache .hypothesis site
