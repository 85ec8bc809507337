# What can be run here? `make help` lists it. Everything below works from a clean clone with Python 3.11 and nothing else.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3 python,$(shell command -v $(name) 2>/dev/null)))
PY := .venv/bin/python
# One thread a process: ranks and engine share the cores, and threads that wait for each other spin.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo-model smollm2-model train train-smollm2 learning-curves test test-faults lint docs bench bench-weights bench-algorithms clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install:  ## fill .venv (instant where nothing has changed)
	@test -n "$(PYTHON)" || { echo "install: no Python found; install Python 3.11 or run \`make PYTHON=/path/to/python3.11 ...\`" >&2; exit 1; }
	@$(PYTHON) scripts/install.py

demo-model: install  ## tokenizer, data and warm-started tiny Llama of configs/demo_cpu.yaml, cached in .cache/demo
	@$(PY) -m scripts.demo_model

smollm2-model: install  ## SmolLM2-135M-Instruct as a Hugging Face folder, cached in .cache/smollm2-135m
	@$(PY) -m scripts.smollm2_model

train: demo-model  ## PPO on the tiny Llama: pp2 x vpp2, critic, reference, real vLLM
	@.venv/bin/megappo train configs/demo_cpu.yaml

train-smollm2: smollm2-model  ## PPO on SmolLM2-135M-Instruct: pp2 x vpp3, critic, real vLLM
	@.venv/bin/megappo train configs/smollm2_135m_cpu.yaml

learning-curves: demo-model  ## PPO, GRPO, RLOO and REINFORCE++ on the tiny Llama; writes docs/learning_curves.{md,svg}
	@$(PY) -m scripts.learning_curves

test: install  ## all tests but those marked long
	@$(PY) -m pytest -p no:cacheprovider -m "not long"

test-faults: install  ## the tests that kill or starve ranks on purpose, and those marked long
	@$(PY) -m pytest -p no:cacheprovider -m "faults or long"

lint: install  ## ruff, mypy, import contracts
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

docs: install  ## write docs/config.md and docs/metrics.md anew
	@$(PY) -m scripts.reference_pages

bench: install bench-weights bench-algorithms  ## every benchmark; results in benchmarks/results/
	@set -e; for name in controller; do echo "== $$name"; $(PY) -m benchmarks.$$name; done

bench-weights: install  ## the hand-over of weights beside peers' code and memcpy (docs/benchmarks.md says how peers come in)
	@set -e; for name in weights weights_vllm; do echo "== $$name"; $(PY) -W ignore -m benchmarks.$$name; done

bench-algorithms: install  ## advantages, balance, packing, output head and batches to workers beside peers' code and matmul
	@echo "== algorithms"; $(PY) -W ignore -m benchmarks.algorithms

clean:  ## remove cached models and tool caches (neither .venv nor runs/)
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build megappo.egg-info
