# The commands of the project; each prepares the environment it needs first (see tools/setup_env.py).
#   PYTHON=/path/to/python   use this Python, or the environment it belongs to, unless another checkout is installed there
#   ARGS="..."               further arguments of the command, as in: make test ARGS="-k tokenizer -x"

BOOTSTRAP := $(if $(PYTHON),$(PYTHON),$(shell command -v python3 || command -v python || echo python3))
RUN := $(BOOTSTRAP) tools/setup_env.py
PYTEST := -m pytest --durations=20
WORKERS := -n 2 --no-loadscope-reorder
GPU_WORKERS := -n 5 --no-loadscope-reorder
ARGS ?=
export PYTHON
# Without the sources' bytecode, each process that a test starts would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test test-repeats test-gpu test-faults lint format docs bench-train bench-kernels bench-memory bench-cleaning bench-convergence bench-generate bench-network bench-gpu bench-time-to-loss bench-islands safety-card clean clean-all
.DEFAULT_GOAL := help

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart:  ## train a small GPT on four processes of this machine, end to end; again: resume
	@$(RUN) -- -m tools.quickstart.run $(ARGS)

test:  ## run the tests
	@OMP_NUM_THREADS=1 $(RUN) --extras test,lint --oracle -- $(PYTEST) $(WORKERS) $(ARGS)

test-repeats:  ## run the tests that repeat others with further layouts, models and compressors
	@OMP_NUM_THREADS=1 $(RUN) --extras test,lint --oracle -- $(PYTEST) $(WORKERS) --repeats -m repeats $(ARGS)

test-gpu:  ## run the tests that need a CUDA device, those of several ranks on one GPU included
	@OMP_NUM_THREADS=1 $(RUN) --extras test,lint -- $(PYTEST) $(GPU_WORKERS) tests/gpu $(ARGS)

test-faults:  ## run the long fault-injection tests: processes killed at many random moments
	@OMP_NUM_THREADS=1 $(RUN) --extras test,lint -- $(PYTEST) --faults -m faults $(ARGS)

lint:  ## check style, types and import layers
	@$(RUN) --extras test,lint -- tools/lint.py $(ARGS)

format:  ## rewrite the sources in the project's style
	@$(RUN) --extras test,lint -- tools/lint.py --fix

docs:  ## build the site of docs/ into site/
	@NO_MKDOCS_2_WARNING=1 $(RUN) --extras docs -- -m mkdocs build --strict $(ARGS)

bench-train:  ## measure training speed beside Hugging Face's models
	@$(RUN) --extras test,lint -- -m benchmarks.train $(ARGS)

bench-kernels:  ## measure the compressors' kernels beside a copy and their reference implementations
	@$(RUN) --extras test,lint -- -m benchmarks.kernels $(ARGS)

bench-memory:  ## measure peak memory of compressors and pipeline schedules
	@$(RUN) --extras test,lint -- -m benchmarks.memory $(ARGS)

bench-convergence:  ## train a small GPT with and without compressors and compare losses and bytes (hours; ARGS="--cases ...")
	@$(RUN) --extras test,lint -- -m benchmarks.convergence $(ARGS)

safety-card:  ## train small models with and without compressors, and write a page about them (ARGS="--short --spec dp-grad=cast")
	@$(RUN) --extras test,lint -- -m benchmarks.safety.run $(ARGS)

bench-cleaning:  ## measure find_duplicates beside a plain loop over datasketch
	@$(RUN) --extras test,lint -- -m benchmarks.cleaning $(ARGS)

bench-generate:  ## measure generation beside Hugging Face's generate
	@$(RUN) --extras test,lint -- -m benchmarks.generate $(ARGS)

bench-network:  ## train on shaped links with and without compressors, beside torch DDP's hooks (Linux, root, an hour)
	@$(RUN) --extras test,lint -- -m benchmarks.network.run $(ARGS)

bench-gpu:  ## measure speeds on a GPU, beside nanoGPT's model and Hugging Face's (the first rows in eight minutes; again: the next)
	@$(RUN) --extras test,lint -- -m benchmarks.gpu.run $(ARGS)

bench-time-to-loss:  ## losses over time on slow links, compressed and not (Linux, root, a quarter of an hour)
	@$(RUN) --extras test,lint -- -m benchmarks.network.time_to_loss $(ARGS)

bench-islands:  ## islands over a slow link, beside data parallelism (Linux, root, half an hour)
	@$(RUN) --extras test,lint -- -m benchmarks.network.islands $(ARGS)

clean:  ## remove caches, builds and the quickstart's output
	rm -rf build dist *.egg-info quickstart_out bench_out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find megatron benchmarks tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean  ## the same, and remove .venv
	rm -rf .venv
