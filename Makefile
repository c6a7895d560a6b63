# Two commands do everything on a fresh machine: `make rollout` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out
WORKERS := 2
PYTHONS := python3.11 python3.12 python3.13
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
# Software OpenGL for pictures without a display. Installed only where it is missing and apt is there to do it.
GL_PACKAGES := libegl1 libegl-mesa0 libgl1-mesa-dri
# make LOCK=requirements-ci.txt installs exactly the packages of that file, by hash, as CI does (Python 3.11, Linux x86-64).
LOCK ?=

.PHONY: docs libero test-libero libero-policy bundled-policy test-docs chromium rollout view test test-isa test-install test-limits test-robots test-peers test-peer-sources test-slow test-recipes test-strands test-hostile test-browser test-lerobot licences lock check bench doctor clean system

rollout: $(VENV)/.sim  ## the bundled policy picks up a cube in simulation, filmed: out/rollout.mp4
	$(BIN)/strands-cosmos3 rollout --task pick --instruction "pick up the red cube" \
	  --video $(OUT)/rollout.mp4 --plot $(OUT)/rollout.png --json $(OUT)/rollout.json

view: $(VENV)/.sim  ## the same on a live page: http://127.0.0.1:8080
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[view]'
	$(BIN)/strands-cosmos3 view

libero: $(VENV)-libero/.done  ## ten episodes of the LIBERO benchmark by the scripted expert; installs it beside (a download of 700 MB)
	$(VENV)-libero/bin/strands-cosmos3 evaluate --world libero/libero_object --backend scripted --seeds 1 --resume --out $(OUT)/libero

test-libero: $(VENV)-libero/.train  ## what needs LIBERO: its conventions, the expert, an evaluation, the recipe (about ten minutes)
	$(VENV)-libero/bin/python -m pip install --quiet --constraint constraints.txt 'pytest>=8' 'hypothesis>=6.100'
	$(VENV)-libero/bin/python -m pytest -m libero tests/worlds/libero tests/evaluation/test_libero_evaluation.py tests/test_examples.py \
	  tests/recipes/test_libero_policy.py tests/recipes/test_libero_demos.py

libero-policy: $(VENV)-libero/.train  ## a small policy for LIBERO from nothing, in out/libero-policy; again, to go on. TINY=1: a trial run in minutes
	$(VENV)-libero/bin/python -m recipes.libero_policy --out $(OUT)/libero-policy$(if $(TINY),-tiny --tiny) --workers $(WORKERS)

test: $(VENV)/.dev  ## the test suite on two cores; more with WORKERS=N
	$(PYTEST)

test-peers: $(VENV)/.dev  ## strands-robots 0.5.3, openpi 0.1 and franky 2.0, each in its own environment (Python 3.12 for the first)
	$(PYTEST) -m "peers and not slow" tests/policy/test_strands_robots.py tests/serving/test_peers.py tests/test_examples.py tests/test_real_franka.py

test-peer-sources: $(VENV)/.dev  ## RoboLab's, Arena's and NVIDIA's: ROBOLAB=, COSMOS_FRAMEWORK=, ISAACLAB_ARENA=CHECKOUT; RECORD=1 writes transcripts
	$(BIN)/python -m pytest -m peers -rs tests/serving/test_peer_sources.py tests/engine/test_framework_sources.py

test-slow: $(VENV)/.docs chromium  ## the slow checks: hundreds of episodes, millions of samples
	$(BIN)/python -m pytest -m slow

test-recipes: $(VENV)/.dev  ## the recipes of the policies, in tiny forms: nightly
	$(PYTEST) -m "slow or smoke" tests/recipes

test-hostile: $(VENV)/.dev  ## 10,000 frames, 500 checkpoints and 2,000 command lines at random; ten minutes of kills, stops, floods, a full disk
	$(BIN)/python -m pytest -m "slow or not slow" -s tests/test_hostile.py tests/engine/test_hostile_checkpoints.py tests/serving/test_attacks.py tests/serving/test_soak.py

test-isa: $(VENV)/.dev  ## engine, ranks and backends with torch's plain, AVX2 and AVX-512 kernels, and with MKL's and oneDNN's AVX2 (about ten minutes)
	PYTHONPATH=tests $(BIN)/python -m helpers.instructions -n $(WORKERS)

test-install: $(VENV)/.dev  ## wheel and sdist, built, checked and installed on several Pythons: PYTHONS="python3.11 python3.12 python3.13"
	$(BIN)/python -m pip install --quiet 'twine>=6'
	cd tests && ../$(BIN)/python -m helpers.install_check --pythons $(PYTHONS)

test-limits: $(VENV)/.dev  ## a hundred million references against every limit (about an hour on one core)
	PYTHONPATH=tests $(BIN)/python -m helpers.limit_sweep --parts 100

test-robots: $(VENV)/.dev  ## fetched robots on their own feasible chunks, with figures; fetches them (a download of 400 MB)
	for robot in openarm ur5e_2f85 xarm7 iiwa7 iiwa14; do $(BIN)/strands-cosmos3 robot fetch $$robot || exit; done
	$(BIN)/python -m pytest -m robots -s tests/robots tests/sim/test_fetched_arms.py tests/test_examples.py

test-strands: $(VENV)/.dev  ## strands-robots 0.5.3 drives our arm with our policy, with figures (a part of test-peers)
	$(BIN)/python -m pytest -m peers tests/policy/test_strands_robots.py -s

test-browser: $(VENV)/.dev chromium  ## the live page in a real browser; installs Chromium where it is missing
	$(BIN)/python -m pytest -m slow tests/view

test-lerobot: $(VENV)/.dev  ## datasets and the plugin in lerobot 0.6.1, in an environment of its own (a download of 3 GB; Python 3.12)
	$(BIN)/python -m pytest -m slow tests/datasets/test_lerobot.py tests/policy/test_lerobot_plugin.py \
	  tests/engine/test_lerobot_processors.py

chromium:
	@if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq chromium; fi

docs: $(VENV)/.docs  ## the documentation site, in out/site
	$(BIN)/python -m mkdocs build --strict

test-docs: $(VENV)/.docs  ## code blocks of README and docs, the notebook, the site: about three minutes
	$(PYTEST) -m slow tests/docs tests/sim/test_rerun.py

check: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

licences: $(VENV)/.dev  ## LICENCES.md: what the dependencies are licensed under
	PYTHONPATH=tests $(BIN)/python -m helpers.licences

lock: $(VENV)/.dev  ## requirements-ci.txt: what CI installs, each package by its hash
	PYTHONPATH=tests $(BIN)/python -m helpers.lock

bench: $(VENV)/.sim  ## the figures in the README
	for name in ik tracking loop sim; do $(BIN)/python benchmarks/$$name.py > $(OUT)/bench-$$name.json || exit; done

bundled-policy: $(VENV)/.dev  ## the bundled policy from nothing, in out/bundled-policy: hours; again, to go on. TINY=1: a trial run in minutes
	$(BIN)/python -m recipes.table_policy --out $(OUT)/bundled-policy$(if $(TINY),-tiny --tiny) --workers $(WORKERS)

doctor: $(VENV)/.sim
	$(BIN)/strands-cosmos3 doctor

INSTALL_LOCKED = $(BIN)/python -m pip install --require-hashes --requirement $(LOCK) \
  && $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .

# make rollout needs the simulation and ONNX Runtime; tests the whole set (constraints.txt says how to get torch's CPU build).
$(VENV)/.sim: pyproject.toml constraints.txt | system
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "strands-cosmos3 needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(if $(LOCK),,$(BIN)/python -m pip install --quiet --upgrade pip)
	@echo "installing into $(VENV): MuJoCo, ONNX Runtime and others; a minute on the first run"
	$(if $(LOCK),$(INSTALL_LOCKED),$(BIN)/python -m pip install --constraint constraints.txt --editable '.[sim,onnx]')
	@touch $@

# LIBERO's robosuite limits MuJoCo and others, so it has an environment of its own.
$(VENV)-libero/.done: pyproject.toml constraints.txt | system
	$(PYTHON) -m venv $(VENV)-libero
	@echo "installing LIBERO into $(VENV)-libero: a few minutes on the first run"
	$(VENV)-libero/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[libero,serve]'
	@touch $@

$(VENV)-libero/.train: $(VENV)-libero/.done
	@echo "installing PyTorch into $(VENV)-libero"
	$(VENV)-libero/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[libero,serve,train,diffusers]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(if $(LOCK),,$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,rerun]')
	@touch $@

$(VENV)/.dev: $(VENV)/.sim
	@echo "installing the packages that tests need into $(VENV)"
	$(if $(LOCK),$(INSTALL_LOCKED),$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]')
	@touch $@

system:
	@if [ "$$(uname)" = Linux ] && ! ldconfig -p 2>/dev/null | grep -q 'libEGL_mesa'; then \
	  if command -v apt-get >/dev/null; then \
	    echo "installing $(GL_PACKAGES) for drawing without a display"; \
	    SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	    $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq $(GL_PACKAGES); \
	  else echo "no Mesa EGL found; install the equivalents of $(GL_PACKAGES) to draw without a display"; fi; fi

clean:
	rm -rf $(VENV) $(VENV)-libero $(OUT) dist build
