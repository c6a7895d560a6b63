# Two commands do everything on a fresh machine: `make rollout` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out
# Software OpenGL for pictures without a display. Installed only where it is missing and apt is there to do it.
GL_PACKAGES := libegl1 libegl-mesa0 libgl1-mesa-dri

.PHONY: rollout test test-slow check bench doctor clean system

rollout: $(VENV)/.ready  ## a simulated Franka picks up a cube, filmed: out/rollout.mp4
	$(BIN)/strands-cosmos3 rollout --task pick --instruction "pick up the red cube" \
	  --video $(OUT)/rollout.mp4 --plot $(OUT)/rollout.png --json $(OUT)/rollout.json

test: $(VENV)/.ready  ## the test suite, some minutes on two cores
	$(BIN)/python -m pytest

test-slow: $(VENV)/.ready  ## the slow checks: hundreds of episodes, millions of samples
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.ready  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/.ready  ## the figures in the README
	$(BIN)/strands-cosmos3 bench ik
	$(BIN)/strands-cosmos3 bench tracking
	$(BIN)/strands-cosmos3 bench sim

doctor: $(VENV)/.ready
	$(BIN)/strands-cosmos3 doctor

$(VENV)/.ready: pyproject.toml constraints.txt | system
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "strands-cosmos3 needs Python 3.11 or newer; run make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

system:
	@if [ "$$(uname)" = Linux ] && ! ldconfig -p 2>/dev/null | grep -q 'libEGL_mesa'; then \
	  if command -v apt-get >/dev/null; then \
	    echo "installing $(GL_PACKAGES) for drawing without a display"; \
	    SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	    $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq $(GL_PACKAGES); \
	  else echo "no Mesa EGL found; install the equivalents of $(GL_PACKAGES) to draw without a display"; fi; fi

clean:
	rm -rf $(VENV) $(OUT) dist build
